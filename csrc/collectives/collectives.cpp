#include "collectives/collectives.h"

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

}  // namespace zipccl
