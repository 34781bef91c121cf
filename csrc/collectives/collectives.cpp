#include "collectives/collectives.h"

#include <algorithm>
#include <exception>

namespace zipccl {
namespace {

// The phases of a hierarchical call, beside those of the call itself.
constexpr uint8_t kWithinHost = 0x10, kBetweenHosts = 0x20;

Call phase_of(const Call& call, Route route, uint8_t phase) {
  Call result = call;
  result.route = route;
  if (call.phase != kFailedPhase) result.phase |= phase;
  return result;
}

// Elements of a part that are in [offset, offset + count).
uint64_t clipped(uint64_t elements, uint64_t offset, uint64_t count) {
  return offset < elements ? std::min(count, elements - offset) : 0;
}

// What a call over a hierarchy knows of its rank's place in it.
struct Place {
  const Hosts& hosts;
  const std::vector<int>& mates;  // the ranks of this host
  std::vector<int> counterparts;  // one a host, the own rank among them

  explicit Place(const Exchange& exchange) : hosts(exchange.hosts()), mates(hosts.ranks(hosts.of(exchange.rank()))) {
    for (int other = 0; other < hosts.count(); other++) {
      counterparts.push_back(hosts.ranks(other)[hosts.place(exchange.rank())]);
    }
  }
};

Parts empty_parts(const Exchange& exchange, const std::vector<int>& members) {
  Parts parts;
  parts.outgoing.resize(exchange.size());
  parts.incoming.resize(exchange.size());
  parts.members = members;
  return parts;
}

// Between hosts, each rank exchanges with its counterparts; what one of them sends is, segment by segment, passed on
// inside the host. So each part crosses the network once.
void all_gather_by_hosts(Exchange& exchange, const Call& call, const Parts& all) {
  const Place place(exchange);
  const auto& elements = all.incoming;
  const Call within_call = phase_of(call, Route::kRaw, kWithinHost);
  Parts between = empty_parts(exchange, place.counterparts);
  between.agreed = true;
  between.same = true;
  between.outputs = all.outputs;
  between.longest = *std::max_element(elements.begin(), elements.end());
  for (int rank : place.counterparts) {
    between.outgoing[rank] = all.outgoing[rank];
    between.incoming[rank] = elements[rank];
  }
  between.deliver = [&](uint64_t offset, uint64_t count, bool failed) {
    Call inner = within_call;
    if (failed) inner.phase = kFailedPhase;
    for (int host = 0; host < place.hosts.count(); host++) {
      const auto& origins = place.hosts.ranks(host);
      const int own = place.counterparts[host];
      Parts within = empty_parts(exchange, place.mates);
      within.same = true;
      within.outputs.resize(exchange.size());
      for (size_t i = 0; i < place.mates.size(); i++) {
        const int mate = place.mates[i];
        within.outgoing[mate] = {at_offset(all.outputs[own], offset, call.dtype),
                                 clipped(elements[own], offset, count)};
        within.incoming[mate] = clipped(elements[origins[i]], offset, count);
        within.outputs[mate] = at_offset(all.outputs[origins[i]], offset, call.dtype);
      }
      exchange.run(inner, within);
    }
  };
  exchange.run(phase_of(call, Route::kZip, kBetweenHosts), between);
}

// Inside each host, ranks first sum what they have for each rank of their own place, whichever host it is on; then each
// sends the sums to its counterparts. So each host's sum crosses the network once.
void reduce_scatter_by_hosts(Exchange& exchange, const Call& call, const Parts& all) {
  const Place place(exchange);
  const auto& inputs = all.outgoing;
  const bool as_bf16 = call.dtype == DType::kBFloat16 && all.reduce.bf16_partial_sums;
  const Call within_call = phase_of(call, Route::kRaw, kWithinHost);
  Call between_call = phase_of(call, Route::kZip, kBetweenHosts);
  between_call.dtype = as_bf16 ? DType::kBFloat16 : DType::kFloat32;

  Parts between = empty_parts(exchange, place.counterparts);
  between.agreed = true;
  between.reduce.reduction = all.reduce.reduction;
  between.reduce.divisor = all.reduce.divisor;
  between.output = all.output;
  between.output_dtype = call.dtype;
  for (const Part& part : inputs) between.longest = std::max(between.longest, part.elements);
  const uint64_t segment = std::min(exchange.segment_elements(between_call, place.counterparts.size()),
                                    round_up(between.longest, kAlignment));
  const uint64_t segment_bytes = segment * element_bytes(between_call.dtype);
  between.stage_elements = segment;
  between.stages = exchange.segments_in_flight();
  std::vector<uint8_t*> sums;
  for (int host = 0; host < place.hosts.count(); host++) {
    const int rank = place.counterparts[host];
    sums.push_back(exchange.stage(host, between.stages * segment_bytes));
    between.outgoing[rank] = {sums.back(), inputs[rank].elements};
    between.incoming[rank] = inputs[exchange.rank()].elements;
  }
  between.produce = [&](uint64_t k, uint64_t offset, uint64_t count) {
    for (int host = 0; host < place.hosts.count(); host++) {
      Parts within = empty_parts(exchange, place.mates);
      within.agreed = true;
      within.reduce = all.reduce;
      within.reduce.divisor = 1.0f;
      within.output = sums[host] + k % between.stages * segment_bytes;
      within.output_dtype = between_call.dtype;
      for (size_t i = 0; i < place.mates.size(); i++) {
        const Part& part = inputs[place.hosts.ranks(host)[i]];
        within.outgoing[place.mates[i]] = {at_offset(part.data, offset, call.dtype),
                                           clipped(part.elements, offset, count)};
        within.incoming[place.mates[i]] = clipped(inputs[place.counterparts[host]].elements, offset, count);
      }
      exchange.run(within_call, within);
    }
  };
  exchange.run(between_call, between);
}

// Finds that all ranks make the same call before its parts begin to move, each of which only some ranks see: in the
// second round they hear whether another found something else.
void agree(Exchange& exchange, const Call& call, const Parts& all) {
  Call verdict = call;
  std::exception_ptr failure;
  try {
    exchange.agree(call, all);
  } catch (const MismatchError&) {
    failure = std::current_exception();
    verdict.phase = kFailedPhase;
  }
  try {
    exchange.agree(verdict, all);
  } catch (const MismatchError&) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
}

Parts all_gather_parts(const Part& input, const std::vector<void*>& outputs, const std::vector<uint64_t>& elements) {
  Parts parts;
  parts.outgoing.assign(outputs.size(), input);
  parts.same = true;
  parts.incoming = elements;
  parts.outputs = outputs;
  return parts;
}

Parts reduce_scatter_parts(const Exchange& exchange, const Call& call, const std::vector<Part>& inputs,
                           const Reduce& reduce, void* output) {
  Parts parts;
  parts.outgoing = inputs;
  parts.incoming.assign(inputs.size(), inputs[exchange.rank()].elements);
  parts.reduce = reduce;
  parts.output = output;
  parts.output_dtype = call.dtype;
  return parts;
}

}  // namespace

void all_gather(Exchange& exchange, const Call& call, const Part& input, const std::vector<void*>& outputs,
                const std::vector<uint64_t>& elements) {
  const Parts parts = all_gather_parts(input, outputs, elements);
  if (call.route == Route::kHierarchical) {
    agree(exchange, call, parts);
    return all_gather_by_hosts(exchange, call, parts);
  }
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
  const Parts parts = reduce_scatter_parts(exchange, call, inputs, reduce, output);
  if (call.route == Route::kHierarchical) {
    agree(exchange, call, parts);
    return reduce_scatter_by_hosts(exchange, call, parts);
  }
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
  Call next = call;
  next.phase = 1;
  const Part& own = inputs[exchange.rank()];  // and then the result
  void* result = outputs[exchange.rank()];
  if (call.route != Route::kHierarchical &&
      exchange.run_with(call, reduce_scatter_parts(exchange, call, inputs, reduce, result), next,
                        all_gather_parts(own, outputs, shares))) {
    return;
  }
  std::exception_ptr failure;
  try {
    reduce_scatter(exchange, call, inputs, reduce, result);
  } catch (const MismatchError&) {
    failure = std::current_exception();
  } catch (const FormatError&) {
    failure = std::current_exception();
  }
  // Also after a failure: the peers wait.
  if (failure) next.phase = kFailedPhase;
  try {
    all_gather(exchange, next, own, outputs, shares);
  } catch (const MismatchError&) {
    if (!failure) throw;
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace zipccl
