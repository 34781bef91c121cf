// A coder is a table of functions for one instruction set. All coders write the same bytes.
//
// The functions know no message: codec.cpp cuts messages into chunks, checks them, and pads short chunks, so that
// chunk functions only see whole sub-blocks of 1024 elements and scratch memory with room behind it.
#pragma once

#include <cstdint>

#include "../codec.h"

namespace zipccl {

// Bytes of the scratch for one chunk's escapes. Coders read and write whole vectors, beyond the escapes themselves.
constexpr uint32_t kEscapeRoom = kChunkElements + 64;

// Alignment of body and values that the streaming functions need.
constexpr uint32_t kStreamAlignment = 64;

struct Coder {
  const char* name;

  // Encodes `elements` bf16 values into a body and its escapes. Sets one escape_end per sub-block.
  using EncodeChunk = void (*)(const uint16_t* values, uint32_t elements, Window window, uint8_t* body,
                               uint8_t* escapes, uint16_t* escape_end);
  // The inverse. False if a sub-block's zero codes are not as many as escape_end says; then `values` is garbage.
  using DecodeChunk = bool (*)(const uint8_t* body, uint32_t elements, Window window, const uint8_t* escapes,
                               const uint16_t* escape_end, uint16_t* values);

  EncodeChunk encode;            // for data in the caches
  EncodeChunk encode_streaming;  // past the caches: non-temporal stores, then finish_streaming
  DecodeChunk decode;
  DecodeChunk decode_streaming;
  void (*finish_streaming)();  // orders the non-temporal stores before whatever follows

  // Raw chunks: sign-mantissa bytes and exponent bytes, without codes. `elements` is even.
  void (*split)(const uint16_t* values, uint32_t elements, uint8_t* sign_mantissas, uint8_t* exponents);
  void (*merge)(const uint8_t* sign_mantissas, const uint8_t* exponents, uint32_t elements, uint16_t* values);

  // fp32 <-> its upper and lower halves; narrow says whether any lower half is non-zero, widen takes null for all zero.
  // Byte pointers may have any alignment.
  bool (*narrow)(const uint8_t* values, uint32_t elements, uint16_t* high, uint8_t* low);
  void (*widen)(const uint16_t* high, const uint8_t* low, uint32_t elements, uint8_t* values);

  // accumulator = reduction(accumulator, value * scale)
  void (*accumulate_bfloat16)(const uint8_t* values, uint64_t elements, float scale, Reduction reduction,
                              float* accumulator);
  void (*accumulate_float32)(const uint8_t* values, uint64_t elements, float scale, Reduction reduction,
                             float* accumulator);
  void (*finish_bfloat16)(const float* accumulator, uint64_t elements, float divisor, uint16_t* output);
  void (*finish_float32)(const float* accumulator, uint64_t elements, float divisor, float* output);

  // Sum modulo 2^64 of little-endian 64-bit words.
  uint64_t (*sum_words)(const uint8_t* bytes, uint64_t words);
};

extern const Coder kPortableCoder;
#if defined(__x86_64__)
extern const Coder kAvx2Coder;
extern const Coder kAvx512Coder;
#endif

}  // namespace zipccl
