// The CPU codec's interface for ctypes.
#include <cstring>

#include "codec.h"
#include "guarded.h"

using namespace zipccl;

namespace {

EncodeOptions make_options(const int16_t* tops, int plain, int checksum, float scale) {
  EncodeOptions options;
  options.windows = tops;
  options.plain = plain != 0;
  options.checksum = checksum != 0;
  options.scale = scale;
  return options;
}

}  // namespace

extern "C" {

const char* api_coder_name() { return coder_name(); }
int api_set_coder(const char* name) {
  return guarded([&] { set_coder(name); });
}

uint64_t api_static_bytes(uint64_t elements, uint64_t inline_bytes) { return static_bytes(elements, inline_bytes); }
uint64_t api_plain_bytes(uint64_t elements, int dtype) { return plain_bytes(elements, static_cast<DType>(dtype)); }
uint64_t api_pool_offset(uint64_t elements) { return pool_offset(elements); }
uint64_t api_body_offset(uint64_t elements, uint64_t chunk) { return body_offset(elements, chunk); }
uint64_t api_chunk_count(uint64_t elements) { return chunk_count(elements); }
uint64_t api_pool_bound(uint64_t elements) { return pool_bound(elements); }
uint64_t api_low_bound(uint64_t elements, int dtype) { return low_bound(elements, static_cast<DType>(dtype)); }
uint64_t api_dynamic_bytes(uint64_t pool_bytes, uint64_t inline_bytes, uint64_t low_bytes) {
  return dynamic_bytes(pool_bytes, inline_bytes, low_bytes);
}
uint64_t api_dynamic_bound(uint64_t elements, int dtype, uint64_t inline_bytes) {
  return dynamic_bound(elements, static_cast<DType>(dtype), inline_bytes);
}
uint64_t api_contiguous_bound(uint64_t elements, int dtype) {
  return contiguous_bound(elements, static_cast<DType>(dtype));
}
int api_contiguous_message(const uint8_t* data, uint64_t size, uint64_t* static_size, uint64_t* dynamic_offset) {
  return guarded([&] {
    const Message message = contiguous_message(data, size);
    *static_size = message.static_size;
    *dynamic_offset = static_cast<uint64_t>(message.dynamic - data);
  });
}
int api_window_top(float sigma) { return window_top(sigma); }
int api_best_window(const uint32_t* counts) {
  Histogram histogram;
  std::memcpy(histogram.count, counts, sizeof histogram.count);
  const Window window = best_window(histogram);
  return window.top | static_cast<int>(window.mode) << 8;
}

int api_plan(const void* input, uint64_t elements, int dtype, int16_t* windows, uint32_t* escapes) {
  return guarded([&] { plan(input, elements, static_cast<DType>(dtype), windows, escapes); });
}

int api_encode(const void* input, uint64_t elements, int dtype, const int16_t* tops, int plain, int checksum,
               float scale, uint64_t inline_bytes, uint8_t* statics, uint8_t* dynamic, uint64_t* dynamic_size,
               uint64_t* escapes) {
  return guarded([&] {
    const Encoded encoded = encode(input, elements, static_cast<DType>(dtype),
                                   make_options(tops, plain, checksum, scale), inline_bytes, statics, dynamic);
    *dynamic_size = encoded.dynamic_bytes;
    *escapes = encoded.escapes;
  });
}

int api_encode_contiguous(const void* input, uint64_t elements, int dtype, const int16_t* tops, int plain, int checksum,
                          float scale, uint8_t* output, uint64_t* size) {
  return guarded([&] {
    *size = encode_contiguous(input, elements, static_cast<DType>(dtype), make_options(tops, plain, checksum, scale),
                              output);
  });
}

int api_read_header(const uint8_t* statics, uint64_t size, MessageHeader* header) {
  return guarded([&] { *header = read_header(statics, size); });
}

int api_decode(const uint8_t* statics, uint64_t static_size, const uint8_t* dynamic, uint64_t dynamic_size,
               uint64_t elements, int dtype, void* output) {
  return guarded(
      [&] { decode({statics, static_size, dynamic, dynamic_size}, elements, static_cast<DType>(dtype), output); });
}

int api_accumulate(const uint8_t* statics, uint64_t static_size, const uint8_t* dynamic, uint64_t dynamic_size,
                   uint64_t elements, int dtype, int reduction, float* accumulator) {
  return guarded([&] {
    accumulate({statics, static_size, dynamic, dynamic_size}, elements, static_cast<DType>(dtype),
               static_cast<Reduction>(reduction), accumulator);
  });
}

int api_accumulate_values(const void* values, uint64_t elements, int dtype, float scale, int reduction,
                          float* accumulator) {
  return guarded([&] {
    accumulate_values(values, elements, static_cast<DType>(dtype), scale, static_cast<Reduction>(reduction),
                      accumulator);
  });
}

int api_finish(const float* accumulator, uint64_t elements, float divisor, int dtype, void* output) {
  return guarded([&] { finish(accumulator, elements, divisor, static_cast<DType>(dtype), output); });
}

}  // extern "C"
