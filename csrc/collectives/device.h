// What a schedule needs of a device: memory, encode, decode, accumulate, copy.
#pragma once

#include <cstdint>
#include <memory>

#include "codec/codec.h"

namespace zipccl {

class Device {
 public:
  virtual ~Device() = default;

  // Uninitialised memory on a 128-byte boundary.
  virtual std::shared_ptr<uint8_t> allocate(uint64_t bytes) = 0;
  virtual void copy(void* output, const void* input, uint64_t bytes) = 0;

  // The codec's functions of the same names.
  virtual Encoded encode(const void* input, uint64_t elements, DType dtype, const EncodeOptions& options,
                         uint64_t inline_bytes, uint8_t* statics, uint8_t* dynamic) = 0;
  virtual void decode(const Message& message, uint64_t elements, DType dtype, void* output) = 0;
  virtual void accumulate(const Message& message, uint64_t elements, DType dtype, Reduction reduction,
                          float* accumulator) = 0;
  virtual void accumulate_values(const void* values, uint64_t elements, DType dtype, float scale, Reduction reduction,
                                 float* accumulator) = 0;
  virtual void finish(const float* accumulator, uint64_t elements, float divisor, DType dtype, void* output) = 0;
};

// The processor: everything runs at once on the calling thread.
Device& cpu_device();

}  // namespace zipccl
