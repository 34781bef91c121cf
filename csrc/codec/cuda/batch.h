// The codec on a GPU: many messages a launch, in stream order.
//
// The format is that of the CPU coders, and their messages are exchangeable; only the order in which chunks use the
// escape pool and the low halves differs. All pointers are to memory that the device can access. Nothing here
// allocates, synchronises or waits: a function returns when its kernels are queued, and throws std::runtime_error if
// they could not be. Functions may be called from several threads at once; the current device must be the stream's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "codec/codec.h"

namespace zipccl::cuda {

// A message to encode. The dynamic part's two ranges are apart here, as the first one's length is known last.
struct Outgoing {
  const void* values;      // aligned as the dtype is
  uint64_t elements;       // 0 is a message too
  uint8_t* statics;        // static_bytes(elements, inline_bytes), or plain_bytes(elements, dtype); 128-byte aligned
  uint8_t* pool;           // the pool beyond inline_bytes: dynamic_low_offset(pool_bound(elements), inline_bytes) bytes
  uint8_t* low;            // low_bound(elements, dtype) bytes; 128-byte aligned
  const int16_t* windows;  // as EncodeOptions::windows
  uint64_t inline_bytes;
  float scale;
  uint32_t plain;
};

// A message to decode, or values that never were one (`values` is not null: then only that and `scale` count).
struct Incoming {
  const uint8_t* statics;  // as announced: of `elements` values, plain or with `inline_bytes` of inline pool
  const uint8_t* pool;     // what has arrived of the dynamic part: `pool_room` bytes of the pool beyond inline_bytes
  const uint8_t* low;      //   and `low_room` bytes of low halves, 128-byte aligned
  uint64_t pool_room;
  uint64_t low_room;
  const uint64_t* sum;  // of a message with a checksum: what sum_messages found; else null
  const void* values;
  void* output;  // of decode(): aligned as the dtype is
  uint64_t elements;
  uint64_t inline_bytes;
  float scale;  // of `values`; a message brings its own
  uint32_t plain;
};

enum class Fault : uint32_t {
  kNone = 0,
  kNoMessage,   // magic, version or flags
  kOtherDType,  // the header is not of the message that was announced
  kOtherCount,
  kOtherInline,
  kSizes,  // impossible sizes of pool or low halves
  kChecksum,
  kChunkHeader,  // count, mode, escape counts
  kPoolRange,    // a chunk's escapes, or
  kLowRange,     // low halves leave their range
  kCodes,        // codes do not match the count of escapes
};
const char* describe(Fault fault);

// What decoding found; device memory, zeroed before the first kernel that writes it.
struct Findings {
  uint32_t fault;    // the first one; a Fault
  uint32_t message;  // whose it is
  uint64_t chunk;
  uint32_t deferred;  // not 0: a message needs more of its dynamic part than has arrived. Its chunks were skipped, and
                      // of reduce() all chunks
  uint32_t reserved;
};

// Used bytes of a message's pool and low halves.
struct Sizes {
  uint64_t pool_bytes;
  uint64_t low_bytes;
};

// What the host learns of a call; pinned memory.
struct Report {
  Findings findings;
  uint32_t open;  // not 0: a dynamic part is to be exchanged, sent or received, or something is wrong
};

// `sums`: null, or scratch of one word a message: then the messages carry checksums.
void encode(const std::vector<Outgoing>& messages, DType dtype, uint64_t* sums, cudaStream_t stream);

// Decodes every message to its output. One that cannot be decoded is a finding; what its output holds is undefined.
void decode(const std::vector<Incoming>& messages, DType dtype, Findings* findings, cudaStream_t stream);

// output = round((((m0 * scale) + m1 * scale) + ...) / divisor): in the order of `messages`, in fp32, each operation
// rounded by itself, with `reduction` (kSum, kMin, kMax) for the sum. All have `elements` values. `output` may be one
// of the `values` if it has their dtype. `accumulator`: `elements` floats where there are more than kBatch messages,
// else it may be null.
struct Reducing {
  Reduction reduction;
  float divisor;  // positive and finite, below 2^126
  uint64_t elements;
  float* accumulator;
  void* output;
  DType output_dtype;
  uint32_t first_message;  // what findings call messages[0]
  bool
      after_findings;  // do nothing if `findings` say that earlier launches, whose outputs these are, did not do theirs
};
void reduce(const std::vector<Incoming>& messages, DType dtype, const Reducing& reducing, Findings* findings,
            cudaStream_t stream);

// The sum of each message's 64-bit words into sums[i], for Incoming::sum.
void sum_messages(const std::vector<Incoming>& messages, DType dtype, uint64_t* sums, cudaStream_t stream);

// After decode() or reduce(): reports findings and the sizes of the dynamic parts of all messages, and stores `value`
// to `flag` if there is nothing left to do: no dynamic part in either direction, no fault.
// `outgoing_sizes` and `incoming_sizes`: pinned, one entry a message.
struct Settling {
  const Findings* findings;
  Report* report;
  Sizes* outgoing_sizes;
  Sizes* incoming_sizes;
  uint32_t* flag;
  uint32_t value;
};
void settle(const std::vector<Outgoing>& outgoing, const std::vector<Incoming>& incoming, const Settling& settling,
            cudaStream_t stream);

// Messages of one launch, whose parameters hold them.
constexpr int kBatch = 32;

}  // namespace zipccl::cuda
