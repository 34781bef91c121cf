#include "collectives/device.h"

#include <cstring>
#include <new>

namespace zipccl {
namespace {

class CpuDevice final : public Device {
 public:
  std::shared_ptr<uint8_t> allocate(uint64_t bytes) override {
    const std::align_val_t alignment{kAlignment};
    return {static_cast<uint8_t*>(::operator new(bytes, alignment)),
            [alignment](uint8_t* memory) { ::operator delete(memory, alignment); }};
  }
  void copy(void* output, const void* input, uint64_t bytes) override {
    if (bytes != 0) std::memcpy(output, input, bytes);
  }
  Encoded encode(const void* input, uint64_t elements, DType dtype, const EncodeOptions& options, uint64_t inline_bytes,
                 uint8_t* statics, uint8_t* dynamic) override {
    return zipccl::encode(input, elements, dtype, options, inline_bytes, statics, dynamic);
  }
  void decode(const Message& message, uint64_t elements, DType dtype, void* output) override {
    zipccl::decode(message, elements, dtype, output);
  }
  void accumulate(const Message& message, uint64_t elements, DType dtype, Reduction reduction,
                  float* accumulator) override {
    zipccl::accumulate(message, elements, dtype, reduction, accumulator);
  }
  void accumulate_values(const void* values, uint64_t elements, DType dtype, float scale, Reduction reduction,
                         float* accumulator) override {
    zipccl::accumulate_values(values, elements, dtype, scale, reduction, accumulator);
  }
  void finish(const float* accumulator, uint64_t elements, float divisor, DType dtype, void* output) override {
    zipccl::finish(accumulator, elements, divisor, dtype, output);
  }
};

}  // namespace

Device& cpu_device() {
  static CpuDevice device;
  return device;
}

}  // namespace zipccl
