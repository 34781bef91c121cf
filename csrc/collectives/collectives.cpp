#include "collectives/collectives.h"

#include <algorithm>
#include <exception>

namespace zipccl {

void all_gather(Exchange& exchange, const Call& call, const void* input, const std::vector<void*>& outputs,
                const std::vector<uint64_t>& elements) {
  Parts parts;
  parts.outgoing.assign(outputs.size(), Part{input, elements[exchange.rank()]});
  parts.same = true;
  parts.incoming = elements;
  parts.outputs = outputs;
  exchange.run(call, parts);
}

void all_to_all(Exchange& exchange, const Call& call, const std::vector<Part>& inputs,
                const std::vector<void*>& outputs, const std::vector<uint64_t>& incoming) {
  Parts parts;
  parts.outgoing = inputs;
  parts.incoming = incoming;
  parts.outputs = outputs;
  exchange.run(call, parts);
}

void reduce_scatter(Exchange& exchange, const Call& call, const std::vector<Part>& inputs, const Reduce& reduce,
                    void* output) {
  Parts parts;
  parts.outgoing = inputs;
  parts.incoming.assign(inputs.size(), inputs[exchange.rank()].elements);
  parts.reduce = reduce;
  parts.output = output;
  exchange.run(call, parts);
}

uint64_t all_reduce_share(uint64_t elements, int size) {
  return round_up((elements + size - 1) / static_cast<uint64_t>(size), kAlignment);
}

void all_reduce(Exchange& exchange, const Call& call, void* values, uint64_t elements, const Reduce& reduce) {
  const uint64_t share = all_reduce_share(elements, exchange.size());
  std::vector<Part> inputs;
  std::vector<void*> outputs;
  std::vector<uint64_t> shares;
  for (int r = 0; r < exchange.size(); r++) {
    const uint64_t begin = std::min(r * share, elements);
    shares.push_back(std::min(share, elements - begin));
    outputs.push_back(at_offset(values, begin, call.dtype));
    inputs.push_back({outputs.back(), shares.back()});
  }
  Call phase = call;
  void* own = outputs[exchange.rank()];
  std::exception_ptr failure;
  try {
    reduce_scatter(exchange, phase, inputs, reduce, own);
  } catch (const MismatchError&) {
    failure = std::current_exception();
  } catch (const FormatError&) {
    failure = std::current_exception();
  }
  // Also after a failure: the peers wait.
  phase.phase = failure ? kFailedPhase : 1;
  try {
    all_gather(exchange, phase, own, outputs, shares);
  } catch (const MismatchError&) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace zipccl
