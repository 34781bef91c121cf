// The collectives over an exchange: what each rank has for the others, and what becomes of what they have for it.
//
// All pointers are to contiguous memory of the exchange's device. Errors and the time at which a call is done are the
// exchange's own.
#pragma once

#include <vector>

#include "collectives/exchange.h"

namespace zipccl {

// outputs[r] receives elements[r] values from rank r; `input` has elements[own rank] values and may be outputs[own
// rank] itself, but overlaps no other output.
void all_gather(Exchange& exchange, const Call& call, const Part& input, const std::vector<void*>& outputs,
                const std::vector<uint64_t>& elements);

// Sends inputs[r] to rank r and receives incoming[r] values from it into outputs[r]. Zero elements, on any side, are
// ordinary. Inputs and outputs do not overlap.
void all_to_all(Exchange& exchange, const Call& call, const std::vector<Part>& inputs,
                const std::vector<void*>& outputs, const std::vector<uint64_t>& incoming);

// inputs[r] is this rank's contribution to rank r's output; `output` has inputs[own rank].elements values and overlaps
// no input but possibly, exactly, the own one.
void reduce_scatter(Exchange& exchange, const Call& call, const std::vector<Part>& inputs, const Reduce& reduce,
                    void* output);

// `values`: `elements` of this rank's contribution, which the result replaces: a reduce_scatter of shares, then their
// all_gather. The result is the same on all ranks, bit for bit. After a MismatchError or FormatError, ranks whose
// result would lack a failed rank's share fail too.
void all_reduce(Exchange& exchange, const Call& call, void* values, uint64_t elements, const Reduce& reduce);
// Elements of each rank's share but the last ones', which may be shorter.
uint64_t all_reduce_share(uint64_t elements, int size);

}  // namespace zipccl
