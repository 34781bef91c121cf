// Timed loops around the codec and memcpy, for benchmarks/codec.py: a call from Python would cost as much as a message
// in the second-level cache takes. Each returns the seconds of one repetition.
#include <chrono>
#include <cstring>
#include <vector>

#include "codec/codec.h"

namespace {

template <typename Function>
double seconds_of(int repeat, Function function) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeat; i++) function();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repeat;
}

}  // namespace

extern "C" {

// 0, or -1 where the processor cannot run the coder.
int choose_coder(const char* name) {
  try {
    zipccl::set_coder(name);
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}

uint64_t static_size(uint64_t elements) { return zipccl::static_bytes(elements, zipccl::pool_bound(elements)); }
uint64_t dynamic_size(uint64_t elements, int dtype) {
  return zipccl::dynamic_bound(elements, static_cast<zipccl::DType>(dtype), zipccl::pool_bound(elements));
}

double time_memcpy(void* output, const void* input, uint64_t bytes, int repeat) {
  return seconds_of(repeat, [&] { std::memcpy(output, input, bytes); });
}

// `sigma`: of the values, where it is known; 0: samples choose windows.
double time_encode(const void* input, uint64_t elements, int dtype, uint8_t* statics, uint8_t* dynamic, float sigma,
                   int repeat) {
  const uint64_t pool = zipccl::pool_bound(elements);
  const std::vector<int16_t> windows(zipccl::chunk_count(elements), zipccl::window_top(sigma));
  zipccl::EncodeOptions options;
  if (sigma > 0) options.windows = windows.data();
  return seconds_of(repeat, [&] {
    zipccl::encode(input, elements, static_cast<zipccl::DType>(dtype), options, pool, statics, dynamic);
  });
}

double time_decode(uint8_t* statics, uint8_t* dynamic, uint64_t elements, int dtype, void* output, int repeat) {
  const zipccl::Message message{statics, static_size(elements), dynamic, dynamic_size(elements, dtype)};
  return seconds_of(repeat, [&] { zipccl::decode(message, elements, static_cast<zipccl::DType>(dtype), output); });
}
}
