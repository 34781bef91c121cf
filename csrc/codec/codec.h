// Encode, decode, decode-and-accumulate: one signature for every target.
//
// A message is two byte ranges: the static part, whose size both sides know beforehand, and the dynamic part, whose
// size a receiver reads from the static part's header. Nothing here allocates memory that outlives the call or knows
// of PyTorch. All functions may be called from several threads at once on different buffers.
//
// Errors: a message that breaks the format raises FormatError, which names the chunk where there is one. A decoder
// checks every count, offset and length before it uses it and never reads or writes outside the given ranges; what
// it had decoded by then is in the output, which the caller must discard.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "format.h"
#include "window.h"

namespace zipccl {

class FormatError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct EncodeOptions {
  // given_window(), one a chunk; negative: sample the chunk. Null: sample all. One that does not fit a chunk, where
  // more than an eighth of the values escape, gives way to a sample's, unless it is to be kept.
  const int16_t* windows = nullptr;
  // Send the values as they are behind the header. Always so for DType::kBytes.
  bool plain = false;
  bool checksum = false;
  float scale = 1.0f;
};

struct Encoded {
  uint64_t dynamic_bytes = 0;  // used bytes of the dynamic range
  uint64_t escapes = 0;        // pool bytes: escaped exponents, and the overhang of raw chunks
  uint64_t sampled_chunks = 0;
};

// Encodes `elements` values at `input` (any alignment that the dtype itself has).
// `statics`: static_bytes(elements, inline_bytes) bytes, or plain_bytes(elements, dtype) for a plain message.
// `dynamic`: dynamic_bound(elements, dtype, inline_bytes) bytes; may be null when that is zero.
// Bytes of the inline pool beyond the used ones are left as they were.
Encoded encode(const void* input, uint64_t elements, DType dtype, const EncodeOptions& options, uint64_t inline_bytes,
               uint8_t* statics, uint8_t* dynamic);

// What encode() will do with these values, without doing it: sets escapes[c] to the pool bytes of chunk c. A window
// that escapes more than a sixteenth of its chunk's values, or a negative one, first gives way to a sample's, to be
// kept. `values`: bf16, or fp32, whose upper halves count.
void plan(const void* values, uint64_t elements, DType dtype, int16_t* windows, uint32_t* escapes);

// The same as one contiguous range: the static part with exactly the inline pool it needs, padding to 128 bytes, and
// the low halves if there are any. `output` has contiguous_bound bytes; returns how many were used.
uint64_t contiguous_bound(uint64_t elements, DType dtype);
uint64_t encode_contiguous(const void* input, uint64_t elements, DType dtype, const EncodeOptions& options,
                           uint8_t* output);

// Reads and checks the header of a static part that lies in the first of `size` bytes: it may be all of them, or the
// beginning of a contiguous message.
MessageHeader read_header(const uint8_t* statics, uint64_t size);

struct Message {
  const uint8_t* statics;
  uint64_t static_size;
  const uint8_t* dynamic;
  uint64_t dynamic_size;
};

// The parts of a contiguous message of exactly `size` bytes.
Message contiguous_message(const uint8_t* data, uint64_t size);

// Decodes a message of exactly `elements` values of `dtype` to `output`; another count or dtype is a FormatError.
void decode(const Message& message, uint64_t elements, DType dtype, void* output);

// What accumulate does with a value v (times the message's scale) and the accumulator a.
enum class Reduction : uint8_t {
  kStore,  // a = v
  kSum,    // a = a + v
  kMin,    // a = v < a or v is NaN ? v : a
  kMax,    // a = v > a or v is NaN ? v : a
};

// Decodes `elements` values (bf16 or fp32) and accumulates them into fp32. The product with the scale and the sum are
// each rounded to fp32; they are not fused.
void accumulate(const Message& message, uint64_t elements, DType dtype, Reduction reduction, float* accumulator);

// The same for values that never were a message: a rank's own contribution.
void accumulate_values(const void* values, uint64_t elements, DType dtype, float scale, Reduction reduction,
                       float* accumulator);

// The one rounding at the end: output = accumulator / divisor, to nearest even for bf16 (NaN becomes 0x7FC0).
void finish(const float* accumulator, uint64_t elements, float divisor, DType dtype, void* output);

// Name of the coder that runs: "avx512", "avx2" or "portable"; the best that the processor has, or the one that the
// environment variable ZIPCCL_CPU names. A name that the processor cannot run is a std::runtime_error.
const char* coder_name();
// For tests: chooses the coder by name from now on; an empty name restores the choice above.
void set_coder(const std::string& name);

}  // namespace zipccl
