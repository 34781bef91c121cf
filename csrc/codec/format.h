// Wire format, version 1: geometry, headers and sizes. docs/format.md describes it byte by byte.
//
// Everything here is constexpr and free of host libraries, so that host and device code share it.
// All integers are little-endian. Sizes and counts are 64-bit; "elements" counts values, "bytes" bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define ZIPCCL_HOST_DEVICE __host__ __device__
#else
#define ZIPCCL_HOST_DEVICE
#endif

namespace zipccl {

constexpr uint32_t kMagic = 0x4c43505a;  // "ZPCL"
constexpr uint16_t kVersion = 1;
constexpr uint32_t kChunkElements = 8192;
constexpr uint32_t kSubBlockElements = 1024;
constexpr uint32_t kSubBlocks = kChunkElements / kSubBlockElements;
constexpr uint32_t kPlanes = 3;
constexpr uint32_t kAlignment = 128;
constexpr uint32_t kBodyStride = kChunkElements + kPlanes * kChunkElements / 8;  // 11,264
constexpr uint32_t kNoLow = 0xffffffff;

// What the elements of a message are. kBytes (any other dtype, seen as bytes) only travels plain.
enum class DType : uint8_t { kBytes = 0, kBFloat16 = 1, kFloat32 = 2 };

// How the exponents of one chunk are written.
enum class Mode : uint8_t {
  kWindow = 0,         // codes 1..7 are the exponents top .. top-6
  kWindowAndZero = 1,  // codes 1..6 are top .. top-5, code 7 is exponent 0
  kRaw = 2,            // no codes: exponent bytes fill the plane slots, then the pool
};

enum Flags : uint8_t {
  kPlain = 1,     // no chunks: the values follow at byte 128 as they are
  kChecksum = 2,  // `checksum` is filled in and must match
};

struct MessageHeader {
  uint32_t magic;
  uint16_t version;
  DType dtype;
  uint8_t flags;
  uint64_t elements;
  uint64_t pool_bytes;    // used bytes of the escape pool, inline and dynamic together
  uint64_t inline_bytes;  // pool capacity inside the static part
  uint64_t low_bytes;     // low halves of fp32 chunks, padding included
  float scale;            // receivers that accumulate multiply by it first (PREMUL_SUM)
  uint32_t reserved0;     // zero
  uint64_t checksum;      // sum modulo 2^64 of the message's 64-bit words, this field taken as zero
  uint64_t reserved1;     // zero
};
static_assert(sizeof(MessageHeader) == 64);

struct ChunkHeader {
  uint16_t elements;  // 1 .. 8192; 8192 in all chunks but the last
  uint8_t top;        // exponent field of code 1
  Mode mode;
  uint32_t low;                     // offset of the low halves in units of 128 bytes, kNoLow: all zero
  uint64_t pool_offset;             // of this chunk's escapes in the pool
  uint16_t escape_end[kSubBlocks];  // escapes before the end of each sub-block; the last is the chunk's count
};
static_assert(sizeof(ChunkHeader) == 32);

ZIPCCL_HOST_DEVICE constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

ZIPCCL_HOST_DEVICE constexpr uint32_t element_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kBFloat16 ? 2 : 1;
}

ZIPCCL_HOST_DEVICE constexpr uint64_t chunk_count(uint64_t elements) {
  return elements / kChunkElements + (elements % kChunkElements != 0);
}

// Elements of chunk `chunk` of a message, and the same padded to whole sub-blocks as its arrays are.
ZIPCCL_HOST_DEVICE constexpr uint32_t chunk_elements(uint64_t elements, uint64_t chunk) {
  const uint64_t left = elements - chunk * kChunkElements;
  return left < kChunkElements ? static_cast<uint32_t>(left) : kChunkElements;
}
ZIPCCL_HOST_DEVICE constexpr uint32_t padded_elements(uint32_t elements) {
  return static_cast<uint32_t>(round_up(elements, kSubBlockElements));
}
ZIPCCL_HOST_DEVICE constexpr uint32_t body_bytes(uint32_t elements) {
  return padded_elements(elements) / 8 * (8 + kPlanes);
}

// Exponent bytes of a raw chunk that find room in its plane slots, and those that go to the pool.
ZIPCCL_HOST_DEVICE constexpr uint32_t raw_slot_bytes(uint32_t elements) {
  return padded_elements(elements) / 8 * kPlanes;
}
ZIPCCL_HOST_DEVICE constexpr uint32_t raw_pool_bytes(uint32_t elements) {
  return elements > raw_slot_bytes(elements) ? elements - raw_slot_bytes(elements) : 0;
}
ZIPCCL_HOST_DEVICE constexpr uint32_t low_slot_bytes(uint32_t elements) {
  return static_cast<uint32_t>(round_up(2 * elements, kAlignment));
}

// Offsets inside the static part.
ZIPCCL_HOST_DEVICE constexpr uint64_t chunk_header_offset(uint64_t chunk) {
  return sizeof(MessageHeader) + chunk * sizeof(ChunkHeader);
}
ZIPCCL_HOST_DEVICE constexpr uint64_t body_offset(uint64_t elements, uint64_t chunk) {
  return round_up(chunk_header_offset(chunk_count(elements)), kAlignment) + chunk * kBodyStride;
}
ZIPCCL_HOST_DEVICE constexpr uint64_t pool_offset(uint64_t elements) {
  const uint64_t chunks = chunk_count(elements);
  return chunks == 0 ? sizeof(MessageHeader)
                     : body_offset(elements, chunks - 1) + body_bytes(chunk_elements(elements, chunks - 1));
}

// Bytes of the static part: a function of what both sides know beforehand.
ZIPCCL_HOST_DEVICE constexpr uint64_t static_bytes(uint64_t elements, uint64_t inline_bytes) {
  return pool_offset(elements) + inline_bytes;
}
ZIPCCL_HOST_DEVICE constexpr uint64_t plain_bytes(uint64_t elements, DType dtype) {
  return elements == 0 ? sizeof(MessageHeader) : kAlignment + elements * element_bytes(dtype);
}

// Bytes of the dynamic part: the pool beyond `inline_bytes`, then, on a 128-byte boundary, the low halves.
ZIPCCL_HOST_DEVICE constexpr uint64_t beyond_inline(uint64_t pool_bytes, uint64_t inline_bytes) {
  return pool_bytes > inline_bytes ? pool_bytes - inline_bytes : 0;
}
ZIPCCL_HOST_DEVICE constexpr uint64_t dynamic_low_offset(uint64_t pool_bytes, uint64_t inline_bytes) {
  return round_up(beyond_inline(pool_bytes, inline_bytes), kAlignment);
}
ZIPCCL_HOST_DEVICE constexpr uint64_t dynamic_bytes(uint64_t pool_bytes, uint64_t inline_bytes, uint64_t low_bytes) {
  if (low_bytes != 0) return dynamic_low_offset(pool_bytes, inline_bytes) + low_bytes;
  return beyond_inline(pool_bytes, inline_bytes);
}

// Upper bounds, for allocation: no chunk's escapes exceed what its raw mode puts into the pool.
ZIPCCL_HOST_DEVICE constexpr uint64_t pool_bound(uint64_t elements) {
  const uint64_t full = elements / kChunkElements;
  return full * raw_pool_bytes(kChunkElements) + raw_pool_bytes(static_cast<uint32_t>(elements % kChunkElements));
}
ZIPCCL_HOST_DEVICE constexpr uint64_t low_bound(uint64_t elements, DType dtype) {
  if (dtype != DType::kFloat32) return 0;
  const uint64_t full = elements / kChunkElements;
  return full * low_slot_bytes(kChunkElements) + low_slot_bytes(static_cast<uint32_t>(elements % kChunkElements));
}
ZIPCCL_HOST_DEVICE constexpr uint64_t dynamic_bound(uint64_t elements, DType dtype, uint64_t inline_bytes) {
  return dynamic_low_offset(pool_bound(elements), inline_bytes) + low_bound(elements, dtype);
}

}  // namespace zipccl
