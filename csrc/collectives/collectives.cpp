#include "collectives/collectives.h"

namespace zipccl {
namespace {

uint8_t* at_offset(void* data, uint64_t elements, DType dtype) {
  return static_cast<uint8_t*>(data) + elements * element_bytes(dtype);
}
const uint8_t* at_offset(const void* data, uint64_t elements, DType dtype) {
  return static_cast<const uint8_t*>(data) + elements * element_bytes(dtype);
}

// A consumer that puts every part where it belongs; the own one comes from `own`.
Consume place(const ExchangeContext& context, DType dtype, const void* own, const std::vector<void*>& outputs) {
  return [&context, dtype, own, &outputs](int source, uint64_t offset, uint64_t elements, const Message* message) {
    uint8_t* output = at_offset(outputs[source], offset, dtype);
    if (message) {
      context.device.decode(*message, elements, dtype, output);
    } else if (own != outputs[source]) {
      context.device.copy(output, at_offset(own, offset, dtype), elements * element_bytes(dtype));
    }
  };
}

}  // namespace

void all_gather(const ExchangeContext& context, const Call& call, const void* input, const std::vector<void*>& outputs,
                const std::vector<uint64_t>& elements) {
  const std::vector<Part> same(outputs.size(), Part{input, elements[context.transport.rank()]});
  exchange(context, call, same, elements, 1.0f, place(context, call.dtype, input, outputs));
}

void all_to_all(const ExchangeContext& context, const Call& call, const std::vector<Part>& inputs,
                const std::vector<void*>& outputs, const std::vector<uint64_t>& incoming) {
  const void* own = inputs[context.transport.rank()].data;
  exchange(context, call, inputs, incoming, 1.0f, place(context, call.dtype, own, outputs));
}

void reduce_scatter(const ExchangeContext& context, const Call& call, const std::vector<Part>& inputs,
                    const Reduce& reduce, void* output) {
  const Part& own = inputs[context.transport.rank()];
  const int last = context.transport.size() - 1;
  float* accumulator = nullptr;
  uint64_t accumulated = 0;  // offset of the segment in the accumulator
  // exchange() hands over one segment of all ranks, in rank order, before the next segment. It leaves out ranks that
  // called with other arguments, so that rank 0 need not be the first.
  auto consume = [&](int source, uint64_t offset, uint64_t elements, const Message* message) {
    Reduction reduction = reduce.reduction;
    if (accumulator == nullptr || accumulated != offset) {
      reduction = Reduction::kStore;
      accumulated = offset;
      accumulator =
          reinterpret_cast<float*>(context.workspace.get(Workspace::kAccumulator, 0, 0, elements * sizeof(float)));
    }
    if (message) {
      context.device.accumulate(*message, elements, call.dtype, reduction, accumulator);
    } else {
      context.device.accumulate_values(at_offset(own.data, offset, call.dtype), elements, call.dtype, reduce.scale,
                                       reduction, accumulator);
    }
    if (source == last) {
      context.device.finish(accumulator, elements, reduce.divisor, call.dtype, at_offset(output, offset, call.dtype));
    }
  };
  exchange(context, call, inputs, std::vector<uint64_t>(inputs.size(), own.elements), reduce.scale, consume);
}

}  // namespace zipccl
