// Kernels of the codec. A block of 256 threads codes one chunk, a warp one sub-block of 1024 elements, a lane 32
// neighbouring elements.
//
// A sub-block's values pass through shared memory: global memory is read and written 16 bytes a lane, side by side,
// while lanes work on neighbouring elements; odd alignments, short sub-blocks and fp32 differ only in how the tile is
// filled and emptied. Between these, everything happens on 32-bit words of four exponents or two values, without a
// branch per element. Escapes are patched one by one: 3 % of the elements.
//
// Compiled by nvcc, and by a C++ compiler for the emulator of the tests, which brings "simt.h". Shared memory is
// dynamic only, because the emulator checks its bounds.
//
// Comments that begin with "cold" and "loop:" tell benchmarks/sass.py what belongs to the usual path.
#pragma once

#ifdef __CUDACC__
#include <cuda_pipeline_primitives.h>
#define ZIPCCL_SHARED(Type, name)                                 \
  extern __shared__ __align__(128) unsigned char zipccl_shared[]; \
  Type& name = *reinterpret_cast<Type*>(zipccl_shared)
#define ZIPCCL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
#define ZIPCCL_NOINLINE __noinline__
#else
#define ZIPCCL_NOINLINE __attribute__((noinline))
#include "simt.h"
#endif

#include "codec/cuda/batch.h"

// Whether the device adds and takes the minimum of two 16-bit halves in one instruction.
#ifndef ZIPCCL_ADD_MIN
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define ZIPCCL_ADD_MIN 0
#else
#define ZIPCCL_ADD_MIN 1
#endif
#endif

namespace zipccl::cuda {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kLanes = 32;
constexpr uint32_t kWarps = kThreads / kLanes;
constexpr uint32_t kLaneElements = kSubBlockElements / kLanes;
constexpr uint32_t kAllLanes = 0xffffffff;
static_assert(kWarps == kSubBlocks && kLaneElements == 32);

// Granules: 16 bytes, 8 bf16. A lane owns four neighbouring ones, and moves every 32nd from and to global memory.
constexpr uint32_t kGranules = kSubBlockElements / 8;
constexpr uint32_t kLaneGranules = kGranules / kLanes;

// With an empty granule behind every eight, so that both ways to walk through it find all banks of shared memory, and
// both at fixed distances.
struct Tile {
  uint4 granules[kGranules + kGranules / 8];
};

// Up to so many escapes of a sub-block go through a list in shared memory, an eighth of it: then lanes share them out,
// and those beside each other move bytes beside each other.
constexpr uint32_t kListed = 128;

__device__ __forceinline__ uint32_t place(uint32_t g) { return g + g / 8; }

// A lane's places in its warp's tile.
struct Places {
  uint8_t* owned;
  uint8_t* moved;
  uint8_t* quads;

  __device__ __forceinline__ Places(Tile& tile, uint32_t lane) {
    auto* bytes = reinterpret_cast<uint8_t*>(&tile);
    owned = bytes + lane * 64 + lane / 2 * 16;
    moved = bytes + lane * 16 + lane / 8 * 16;
    quads = bytes + lane * 8 + lane / 16 * 16;
  }
  // Granule b of the lane's own four; element i of its 32, with its exponent in the second byte once it is rotated.
  __device__ __forceinline__ uint4& own_granule(uint32_t b) const { return reinterpret_cast<uint4*>(owned)[b]; }
  __device__ __forceinline__ uint16_t& own_element(uint32_t i) const { return reinterpret_cast<uint16_t*>(owned)[i]; }
  // Granule 32 j + lane, and elements 4 (32 j + lane) .. + 3.
  __device__ __forceinline__ uint4& granule(uint32_t j) const { return reinterpret_cast<uint4*>(moved)[place(j * 32)]; }
  __device__ __forceinline__ uint2& quad(uint32_t j) const {
    return reinterpret_cast<uint2*>(quads)[2 * place(j * 16)];
  }
};

// Element i of the sub-block, for odd jobs.
__device__ __forceinline__ uint16_t& element(Tile& tile, uint32_t i) {
  return reinterpret_cast<uint16_t*>(&tile)[place(i / 8) * 8 + i % 8];
}

__device__ __forceinline__ uint32_t select(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

// Transposes 4 x 4 bits in every nibble: bit k of nibble i of the p-th result is bit p of nibble i of the k-th word.
__device__ __forceinline__ void transpose_nibbles(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab0 = select(0x55555555, a, b << 1), ab1 = select(0x55555555, a >> 1, b);
  const uint32_t cd0 = select(0x55555555, c, d << 1), cd1 = select(0x55555555, c >> 1, d);
  a = select(0x33333333, ab0, cd0 << 2);
  b = select(0x33333333, ab1, cd1 << 2);
  c = select(0x33333333, ab0 >> 2, cd0);
  d = select(0x33333333, ab1 >> 2, cd1);
}

__device__ __forceinline__ uint32_t inclusive_sum(uint32_t value, uint32_t lane) {
#pragma unroll
  for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
#ifdef __CUDACC__
    // The shuffle itself says which lanes have somebody to add, which CUDA's own functions do not tell.
    asm volatile(
        "{ .reg .u32 other; .reg .pred there; shfl.sync.up.b32 other|there, %0, %1, 0, -1; @there add.u32 %0, %0, "
        "other; }"
        : "+r"(value)
        : "r"(distance));
#else
    const uint32_t other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += other;
#endif
  }
  return value;
}

// PRMT as it is: CUDA's own function clears the bits of a selector that choose sign copies, which ours never sets.
__device__ __forceinline__ uint32_t choose_bytes(uint32_t first, uint32_t second, uint32_t selector) {
#ifdef __CUDACC__
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(first), "r"(second), "r"(selector));
  return result;
#else
  return __byte_perm(first, second, selector);
#endif
}

// Takes the highest of the bits that are set, and says which it was.
__device__ __forceinline__ uint32_t take_highest(uint32_t& bits) {
  const uint32_t i = 31 - __clz(bits);
  bits ^= 1u << i;
  return i;
}

__device__ __forceinline__ bool is_aligned(const void* pointer, uint32_t alignment) {
  return (reinterpret_cast<uintptr_t>(pointer) & (alignment - 1)) == 0;
}

// The pool: one sequence of bytes, of which the first are in the static part.
template <class Byte>
struct Pool {
  Byte* inlined;
  uint64_t inline_bytes;
  Byte* beyond;
  __device__ __forceinline__ Byte& operator[](uint64_t i) const {
    return i < inline_bytes ? inlined[i] : beyond[i - inline_bytes];
  }
};

// A message, and what its kernels would else work out in every thread.
template <class Message>
struct Placed : Message {
  uint32_t chunks;
  uint32_t full_chunks;                // those that are coded and have all their elements come first
  decltype(Message::statics) bodies;   // of chunk 0
  decltype(Message::statics) inlined;  // the inline pool
};

template <class Message>
Placed<Message> placed(const Message& message) {
  Placed<Message> result = {};
  static_cast<Message&>(result) = message;
  result.chunks = static_cast<uint32_t>(chunk_count(message.elements));  // a grid's size, checked before
  result.full_chunks = message.plain ? 0 : static_cast<uint32_t>(message.elements / kChunkElements);
  result.bodies = message.statics + body_offset(message.elements, 0);
  result.inlined = message.statics + pool_offset(message.elements);
  return result;
}

template <class Byte, class Message>
__device__ __forceinline__ Pool<Byte> pool_of(const Message& message) {
  return {message.inlined, message.inline_bytes, message.pool};
}

// By all threads of a block; both are aligned as uint16_t.
__device__ __forceinline__ void copy_bytes(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  uint32_t done = 0;  // in units of two bytes
  if (is_aligned(to, 16) && is_aligned(from, 16)) {
    for (uint32_t i = threadIdx.x; i < bytes / 16; i += kThreads) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
    done = bytes / 16 * 8;
  }
  for (uint32_t i = done + threadIdx.x; i < bytes / 2; i += kThreads) {
    reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(from)[i];
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Encoding

struct ChunkWindow {
  uint32_t top;
  bool zeros;  // Mode::kWindowAndZero
};

struct EncodeBatch {
  Placed<Outgoing> messages[kBatch];
  uint64_t* sums;  // null: no checksums
};

// What the first warp finds out for a block.
enum class Outcome : uint32_t { kUsual, kBeyond, kRaw, kUnfit };  // usual: all escapes are listed, and inline

struct EncodeShared {
  Tile tiles[kWarps];
  uint32_t bins[8 + 256];           // of a sample, behind eight empty ones
  uint4 counts[256];                // the same, by four groups of lanes, so that equal exponents meet less often
  uint8_t listed[kWarps][kListed];  // exponents that are escapes
  uint32_t escapes[kWarps];         // of each sub-block, and
  uint32_t before[kWarps];          // of those before it
  uint8_t* escapes_at;              // where they go, if all find room in the inline pool
  Outcome outcome;
  uint32_t best;
  uint64_t pool_offset;
  uint64_t low_offset;
  uint32_t low_unit;
};

// Message headers and the padding of chunk header tables. One block a message; before encode_chunks.
template <DType dtype>
__global__ void __launch_bounds__(kThreads) begin_messages(const __grid_constant__ EncodeBatch batch) {
  const Placed<Outgoing>& message = batch.messages[blockIdx.x];
  if (threadIdx.x == 0) {
    MessageHeader header = {};
    header.magic = kMagic;
    header.version = kVersion;
    header.dtype = dtype;
    header.flags = static_cast<uint8_t>((message.plain ? kPlain : 0) | (batch.sums != nullptr ? kChecksum : 0));
    header.elements = message.elements;
    header.inline_bytes = message.plain ? 0 : message.inline_bytes;
    header.scale = message.scale;
    *reinterpret_cast<MessageHeader*>(message.statics) = header;
  }
  if (message.elements == 0) return;
  const uint64_t begin = message.plain ? sizeof(MessageHeader) : chunk_header_offset(message.chunks);
  const uint64_t end = message.plain ? kAlignment : body_offset(message.elements, 0);
  for (uint64_t i = begin + threadIdx.x; i < end; i += kThreads) message.statics[i] = 0;
}

__device__ __forceinline__ MessageHeader* header_of(uint8_t* statics) {
  return reinterpret_cast<MessageHeader*>(statics);
}

__device__ __forceinline__ uint64_t take(uint64_t& total, uint64_t count) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(&total), static_cast<unsigned long long>(count));
}

// Fills a tile with the first `count` of a sub-block's values; of fp32, with their upper halves, and `low` with the
// lower ones: low[j] holds those of elements 4 (32 j + lane) and after. What is behind `count` is set by pad_tile.
template <DType dtype>
__device__ __forceinline__ void fill_tile(Tile& tile, const uint8_t* values, uint32_t count, uint32_t lane,
                                          const Places& places, uint2 (&low)[kLaneGranules * 2]) {
  if (count == kSubBlockElements && is_aligned(values, 16)) {
    if constexpr (dtype == DType::kBFloat16) {
#pragma unroll
      for (uint32_t j = 0; j < kLaneGranules; j++) {
        __pipeline_memcpy_async(&places.granule(j), values + (j * kLanes + lane) * 16, 16);
      }
      __pipeline_commit();
      __pipeline_wait_prior(0);
    } else {
#pragma unroll
      for (uint32_t j = 0; j < kLaneGranules * 2; j++) {
        const uint4 bits = __ldg(reinterpret_cast<const uint4*>(values) + j * kLanes + lane);
        places.quad(j) = make_uint2(__byte_perm(bits.x, bits.y, 0x7632), __byte_perm(bits.z, bits.w, 0x7632));
        low[j] = make_uint2(__byte_perm(bits.x, bits.y, 0x5410), __byte_perm(bits.z, bits.w, 0x5410));
      }
    }
  } else {  // cold: begin
    for (uint32_t j = 0; j < kLaneGranules * 2; j++) {
      uint32_t halves[4] = {};
      for (uint32_t k = 0; k < 4; k++) {
        const uint32_t i = (j * kLanes + lane) * 4 + k;
        if (i >= count) break;
        if constexpr (dtype == DType::kBFloat16) {
          element(tile, i) = reinterpret_cast<const uint16_t*>(values)[i];
        } else {
          const uint32_t bits = reinterpret_cast<const uint32_t*>(values)[i];
          element(tile, i) = static_cast<uint16_t>(bits >> 16);
          halves[k] = bits & 0xffff;
        }
      }
      low[j] = make_uint2(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
    }
  }  // cold: end
}

__device__ __forceinline__ void pad_tile(Tile& tile, uint32_t count, uint16_t pattern, uint32_t lane) {
  for (uint32_t i = count + lane; i < kSubBlockElements; i += kLanes) element(tile, i) = pattern;
}

// The window and mode that leave the fewest exponents of a sample uncoded: the choice of best_window in window.h, on
// one group of 64 elements in every eight. By all threads of a block; `count` elements of this warp's tile are values.
__device__ __forceinline__ ChunkWindow sample_window(EncodeShared& shared, uint32_t count, uint32_t warp,
                                                     uint32_t lane) {
  const uint32_t t = threadIdx.x;
  shared.counts[t] = make_uint4(0, 0, 0, 0);
  if (t < 8) shared.bins[t] = 0;
  if (t == 0) shared.best = 0;
  __syncthreads();
#pragma unroll
  for (uint32_t group = 0; group < 2; group++) {
    const uint32_t first = group * 512 + lane * 2;
    const uint32_t pair = reinterpret_cast<const uint32_t*>(&shared.tiles[warp].granules[place(first / 8)])[lane % 4];
    uint32_t* counts = reinterpret_cast<uint32_t*>(shared.counts) + lane % 4;
    if (first < count) atomicAdd(counts + (pair >> 7 & 0xff) * 4, 1u);
    if (first + 1 < count) atomicAdd(counts + (pair >> 23 & 0xff) * 4, 1u);
  }
  __syncthreads();
  const uint4 four = shared.counts[t];
  shared.bins[8 + t] = four.x + four.y + four.z + four.w;
  __syncthreads();
  // The most covered first, then a plain window before one with zeros, then the lower top.
  uint32_t covered = 0;
#pragma unroll
  for (uint32_t k = 0; k < 6; k++) covered += shared.bins[8 + t - k];
  const uint32_t seven = covered + shared.bins[8 + t - 6], zeros = covered + shared.bins[8];
  const uint32_t key = max(seven << 9 | 0x100, zeros << 9) | (0xff - t);
  const uint32_t best = __reduce_max_sync(kAllLanes, t < 6 ? 0u : key);
  if (lane == 0) atomicMax(&shared.best, best);
  __syncthreads();
  const uint32_t found = shared.best;
  return {0xff - (found & 0xff), (found & 0x100) == 0};
}

// Codes 7 minus the code of 32 exponents, of words as they come from a tile, rotated left by one: exponents are in
// bytes 1 and 3. words[k]: bit p of nibble 2b+h is bit p of that of element 8b+4h+k; where an escape's is not 7 itself,
// bit 3 says so.
__device__ __forceinline__ void code_words(const uint32_t (&pairs)[4][4], uint32_t top, uint32_t (&words)[4]) {
  uint32_t codes[8];
  const uint32_t addend = ((6 - top) & 0xff) * 0x01000100;
#pragma unroll
  for (uint32_t q = 0; q < 4; q++) {
    uint32_t c[4];
#pragma unroll
    for (uint32_t b = 0; b < 4; b++) {
#if ZIPCCL_ADD_MIN
      c[b] = __viaddmin_u16x2(pairs[b][q], addend, 0x07000700);
#else
      // The lower half's carry meets the cleared lower byte of the upper half, where it ends.
      c[b] = (pairs[b][q] & 0xff00ff00) + addend;
#endif
    }
    const uint32_t even = __byte_perm(c[0], c[1], 0x7351), odd = __byte_perm(c[2], c[3], 0x7351);
    codes[2 * q] = __byte_perm(even, odd, 0x5410);
    codes[2 * q + 1] = __byte_perm(even, odd, 0x7632);
  }
#pragma unroll
  for (uint32_t k = 0; k < 4; k++) {
    const uint32_t first = codes[k], second = codes[4 + k];
#if ZIPCCL_ADD_MIN
    words[k] = first + (second << 4);
#else
    const uint32_t first_far = ((first & 0x7f7f7f7f) + 0x79797979) | first;  // bit 7 of each byte: is it 7 or more?
    const uint32_t second_far = ((second & 0x7f7f7f7f) + 0x79797979) | second;
    words[k] =
        (first & 0x07070707) | (first_far >> 4 & 0x08080808) | select(0x80808080, second_far, second << 4 & 0x70707070);
#endif
  }
}

// Exchanges the exponents 0 and top - 6 in rotated words: then a window with zeros is a window of seven.
__device__ __forceinline__ void exchange_zeros(uint32_t (&pairs)[4][4], uint32_t lowest) {
  const uint32_t both = lowest << 24 | lowest << 8;
#pragma unroll
  for (uint32_t b = 0; b < 4; b++) {
#pragma unroll
    for (uint32_t q = 0; q < 4; q++) {
      const uint32_t exponents = pairs[b][q] & 0xff00ff00;
      pairs[b][q] ^= (__vcmpeq2(exponents, 0) | __vcmpeq2(exponents, both)) & both;
    }
  }
}

// Escapes that are many or go beyond the inline pool, and the exponents of raw chunks.
__device__ void store_rare_escapes(EncodeShared& shared, const Placed<Outgoing>& message, uint8_t* body,
                                   uint32_t elements) {  // cold: begin
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t padded = padded_elements(elements), start = warp * kSubBlockElements;
  if (start >= padded) return;
  const Places places(shared.tiles[warp], lane);
  const auto pool = pool_of<uint8_t>(message);
  Tile& tile = shared.tiles[warp];
  if (shared.outcome == Outcome::kBeyond) {
    uint32_t coded = 0;  // the lane's own planes
    for (uint32_t p = 0; p < kPlanes; p++) {
      coded |= reinterpret_cast<const uint32_t*>(body + padded + p * (padded / 8))[threadIdx.x];
    }
    uint32_t escaped = ~coded;
    uint64_t i = shared.pool_offset + shared.before[warp] + inclusive_sum(__popc(escaped), lane);
    while (escaped != 0) {
      const uint32_t k = take_highest(escaped);
      pool[--i] = static_cast<uint8_t>(places.own_element(k) >> 7);
    }
    return;
  }
  const uint32_t slot = raw_slot_bytes(elements);
  for (uint32_t i = start + lane; i < min(start + kSubBlockElements, padded); i += kLanes) {
    const auto exponent = static_cast<uint8_t>(i < elements ? element(tile, i % kSubBlockElements) >> 7 : 0);
    if (i < slot) {
      body[padded + i] = exponent;
    } else if (i < elements) {
      pool[shared.pool_offset + i - slot] = exponent;
    }
  }
}  // cold: end

// `low_unit` of a chunk that has not been here before.
constexpr uint32_t kNotYet = kNoLow - 1;

// One chunk, by a block. `full`: it has all its elements, which the compiler should know. Unless the outcome is the
// usual one, store_rare_escapes has to follow, or, where the given window does not fit, all of it anew, sampled, with
// shared.low_unit.
template <DType dtype, bool sampled, bool full>
__device__ __forceinline__ Outcome encode_chunk(EncodeShared& shared, const Placed<Outgoing>& message, uint32_t chunk,
                                                const uint8_t* values, uint32_t chunk_elements, uint32_t low_unit) {
  const uint32_t elements = full ? kChunkElements : chunk_elements;
  const uint32_t padded = full ? kChunkElements : padded_elements(elements);
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const Places places(shared.tiles[warp], lane);
  const uint32_t start = warp * kSubBlockElements;
  const uint32_t count = full ? kSubBlockElements : elements <= start ? 0 : min(elements - start, kSubBlockElements);
  uint8_t* body = message.bodies + uint64_t{chunk} * kBodyStride;
  Tile& tile = shared.tiles[warp];
  uint2 low[kLaneGranules * 2];
  fill_tile<dtype>(shared.tiles[warp], values + start * element_bytes(dtype), count, lane, places, low);

  if constexpr (dtype == DType::kBFloat16) {
    low_unit = kNoLow;
  } else if (low_unit == kNotYet) {
    uint32_t any = 0;
#pragma unroll
    for (uint32_t j = 0; j < kLaneGranules * 2; j++) any |= low[j].x | low[j].y;
    low_unit = kNoLow;
    if (__syncthreads_or(any != 0)) {  // cold: begin
      const uint32_t slot = low_slot_bytes(elements);
      if (threadIdx.x == 0) shared.low_offset = take(header_of(message.statics)->low_bytes, slot);
      __syncthreads();
      uint8_t* lows = message.low + shared.low_offset;
#pragma unroll
      for (uint32_t j = 0; j < kLaneGranules * 2; j++) {
        // Also where the chunk has ended in the slot, as zeros.
        const uint32_t offset = start * 2 + (j * kLanes + lane) * 8;
        if (offset < slot) *reinterpret_cast<uint2*>(lows + offset) = low[j];
      }
      low_unit = static_cast<uint32_t>(shared.low_offset / kAlignment);
    }  // cold: end
  }

  __syncwarp();
  ChunkWindow window;
  if constexpr (sampled) {
    window = sample_window(shared, count, warp, lane);
  } else {
    const auto given = static_cast<uint32_t>(message.windows[chunk]);
    window = {given & 0xff, (given & 0x100) != 0};
  }
  if (count < kSubBlockElements) {  // cold: begin
    pad_tile(tile, count, static_cast<uint16_t>(window.top << 7), lane);
    __syncwarp();
  }  // cold: end
  uint32_t pairs[4][4];
#pragma unroll
  for (uint32_t b = 0; b < 4; b++) {
    const uint4 granule = places.own_granule(b);
    pairs[b][0] = __funnelshift_l(granule.x, granule.x, 1);
    pairs[b][1] = __funnelshift_l(granule.y, granule.y, 1);
    pairs[b][2] = __funnelshift_l(granule.z, granule.z, 1);
    pairs[b][3] = __funnelshift_l(granule.w, granule.w, 1);
  }
  const bool present = full || start < padded;
  if (present) {
    auto* sign_mantissas = reinterpret_cast<uint4*>(body + threadIdx.x * kLaneElements);
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
      const auto& first = pairs[2 * half];
      const auto& second = pairs[2 * half + 1];
      sign_mantissas[half] =
          make_uint4(__byte_perm(first[0], first[1], 0x6420), __byte_perm(first[2], first[3], 0x6420),
                     __byte_perm(second[0], second[1], 0x6420), __byte_perm(second[2], second[3], 0x6420));
    }
  }
  if (window.zeros) {  // cold: begin
    exchange_zeros(pairs, window.top - 6u);
  }  // cold: end
  uint32_t planes[4];
  code_words(pairs, window.top, planes);
  transpose_nibbles(planes[0], planes[1], planes[2], planes[3]);
#if ZIPCCL_ADD_MIN
  uint32_t escaped = planes[0] & planes[1] & planes[2];
#else
  uint32_t escaped = planes[3];
#pragma unroll
  for (uint32_t p = 0; p < kPlanes; p++) planes[p] |= escaped;
#endif
  if (present) {
#pragma unroll
    for (uint32_t p = 0; p < kPlanes; p++) {
      reinterpret_cast<uint32_t*>(body + padded + p * (padded / 8))[threadIdx.x] = ~planes[p];
    }
  } else {
    escaped = 0;
  }
  const uint32_t sum = inclusive_sum(__popc(escaped), lane);
  const uint32_t of_warp = __shfl_sync(kAllLanes, sum, kLanes - 1);
  if (lane == 0) shared.escapes[warp] = of_warp;
  if (of_warp <= kListed) {
    uint8_t* listed = shared.listed[warp] + sum;
#pragma unroll 1
    while (escaped != 0) {  // loop: 3.0
      const uint32_t i = take_highest(escaped);
      *--listed = static_cast<uint8_t>(places.own_element(i) >> 7);
    }  // loop: end
  }
  __syncthreads();
  if (warp == 0) {  // loop: 0.125
    const uint32_t of_block = lane < kSubBlocks ? shared.escapes[lane] : 0;
    const uint32_t end = inclusive_sum(of_block, lane);
    uint32_t total = __shfl_sync(kAllLanes, end, kLanes - 1);
    if (lane < kSubBlocks) shared.before[lane] = end - of_block;
    const bool unfit = !sampled && total > elements / 8;
    const bool listed = __all_sync(kAllLanes, of_block <= kListed);
    const bool raw = total > raw_pool_bytes(elements);
    if (raw) total = raw_pool_bytes(elements);
    if (lane == 0) {
      shared.outcome = Outcome::kUnfit;
      shared.low_unit = low_unit;
      if (!unfit) {
        const uint64_t begin = take(header_of(message.statics)->pool_bytes, total);
        shared.pool_offset = begin;
        shared.escapes_at = message.inlined + begin;
        shared.outcome = raw                                               ? Outcome::kRaw
                         : listed && begin + total <= message.inline_bytes ? Outcome::kUsual
                                                                           : Outcome::kBeyond;
        auto* header = reinterpret_cast<ChunkHeader*>(message.statics + chunk_header_offset(chunk));
        // A ChunkHeader's first half, without going through memory.
        const Mode mode = raw ? Mode::kRaw : window.zeros ? Mode::kWindowAndZero : Mode::kWindow;
        const uint32_t top = raw ? 0 : window.top;
        *reinterpret_cast<uint4*>(header) =
            make_uint4(elements | top << 16 | static_cast<uint32_t>(mode) << 24, low_unit, static_cast<uint32_t>(begin),
                       static_cast<uint32_t>(begin >> 32));
      }
    }
    if (lane < kSubBlocks && !unfit) {
      auto* header = reinterpret_cast<ChunkHeader*>(message.statics + chunk_header_offset(chunk));
      header->escape_end[lane] = static_cast<uint16_t>(!raw ? end : lane == kSubBlocks - 1 ? total : 0);
    }
  }  // loop: end
  __syncthreads();
  const Outcome outcome = shared.outcome;
  if (outcome != Outcome::kUsual) return outcome;  // cold
  uint8_t* target = shared.escapes_at + shared.before[warp];
#pragma unroll 1
  for (uint32_t i = lane; i < of_warp; i += kLanes) {  // loop: 1.1
    target[i] = shared.listed[warp][i];
  }
  return Outcome::kUsual;
}

// The first attempt at a short chunk whose window is given.
template <DType dtype>
__device__ ZIPCCL_NOINLINE void encode_short_chunk(EncodeShared& shared, const Placed<Outgoing>& message,
                                                   uint32_t chunk) {  // cold: begin
  const auto* values = static_cast<const uint8_t*>(message.values);
  values += uint64_t{chunk} * (kChunkElements * element_bytes(dtype));
  encode_chunk<dtype, false, false>(shared, message, chunk, values, chunk_elements(message.elements, chunk), kNotYet);
}  // cold: end

// What is left to do of a chunk after the first attempt, or all of it where there was none.
template <DType dtype, bool sampled>
__device__ ZIPCCL_NOINLINE void encode_rare_chunk(EncodeShared& shared, const Placed<Outgoing>& message, uint32_t chunk,
                                                  bool attempted) {  // cold: begin
  const uint64_t offset = uint64_t{chunk} * (kChunkElements * element_bytes(dtype));
  const uint8_t* values = static_cast<const uint8_t*>(message.values) + offset;
  const uint32_t elements = chunk_elements(message.elements, chunk);
  if (message.plain) {
    copy_bytes(message.statics + kAlignment + offset, values, elements * element_bytes(dtype));
    return;
  }
  Outcome outcome = Outcome::kUnfit;
  uint32_t low_unit = kNotYet;
  if (!attempted && !sampled && message.windows[chunk] >= 0) {
    encode_short_chunk<dtype>(shared, message, chunk);
    attempted = true;
  }
  if (attempted) {
    outcome = shared.outcome;
    low_unit = shared.low_unit;
    __syncthreads();  // as in reduce_chunks, for registers
  }
  if (outcome == Outcome::kUnfit) {
    outcome = encode_chunk<dtype, true, false>(shared, message, chunk, values, elements, low_unit);
  }
  if (outcome != Outcome::kUsual) {
    store_rare_escapes(shared, message, message.bodies + uint64_t{chunk} * kBodyStride, elements);
  }
}  // cold: end

// Blocks (chunk, message).
template <DType dtype, bool sampled>
__global__ void __launch_bounds__(kThreads) encode_chunks(const __grid_constant__ EncodeBatch batch) {
  ZIPCCL_SHARED(EncodeShared, shared);
  const Placed<Outgoing>& message = batch.messages[blockIdx.y];
  const uint32_t chunk = blockIdx.x;
  if (chunk < message.full_chunks && (sampled || message.windows[chunk] >= 0)) {
    const auto* values = static_cast<const uint8_t*>(message.values);
    values += uint64_t{chunk} * (kChunkElements * element_bytes(dtype));
    const Outcome outcome = encode_chunk<dtype, sampled, true>(shared, message, chunk, values, kChunkElements, kNotYet);
    if (outcome == Outcome::kUsual) return;
    encode_rare_chunk<dtype, sampled>(shared, message, chunk, true);  // cold
    return;
  }
  if (chunk < message.chunks) encode_rare_chunk<dtype, sampled>(shared, message, chunk, false);  // cold
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding

struct DecodeBatch {
  Placed<Incoming> messages[kBatch];
  Findings* findings;
  uint32_t first;  // index of messages[0] among all
};

// Usual: escapes are few enough to be listed, and inline.
enum class Verdict : uint32_t { kUsual, kBeyond, kRaw, kPlainValues, kDeferred, kFaulty };

// What a block needs to know of a chunk, all of it checked.
struct Plan {
  Verdict verdict;
  uint32_t upper, lower;  // exponents of the codes 0 .. 3 and 4 .. 7, a byte each
  float scale;
  const uint8_t* escapes;  // of kUsual, where they are
  const uint8_t* low;      // null: all zero
  uint64_t pool_offset;
  uint2 escapes_of[kSubBlocks];  // x: how many there are in the sub-block; y: before it
};

struct DecodeShared {
  Tile tiles[kWarps];
  Plan plan;
  uint16_t listed[kWarps][kListed];  // where in the tile escapes go
};

// The first words of a plan, in registers.
struct PlanHead {
  Verdict verdict;
  uint32_t upper, lower;
  float scale;

  __device__ __forceinline__ explicit PlanHead(const Plan& plan) {
    const uint4 words = *reinterpret_cast<const uint4*>(&plan);
    verdict = static_cast<Verdict>(words.x);
    upper = words.y;
    lower = words.z;
    scale = __uint_as_float(words.w);
  }
};

__device__ ZIPCCL_NOINLINE void found(Findings* findings, Fault fault, uint32_t message, uint64_t chunk) {
  if (atomicCAS(&findings->fault, 0u, static_cast<uint32_t>(fault)) == 0) {
    findings->message = message;
    findings->chunk = chunk;
  }
}

// Whether a header is of the message that was announced, and possible.
template <DType dtype>
__device__ __forceinline__ Fault check_header(const MessageHeader& header, const Placed<Incoming>& message) {
  const bool plain = message.plain != 0;
  Fault fault = Fault::kNone;
  if (header.pool_bytes > (plain ? 0 : pool_bound(message.elements)) ||
      header.low_bytes > (plain ? 0 : low_bound(message.elements, dtype)) || header.low_bytes % kAlignment != 0) {
    fault = Fault::kSizes;
  }
  if (header.inline_bytes != (plain ? 0 : message.inline_bytes)) fault = Fault::kOtherInline;
  if (header.elements != message.elements) fault = Fault::kOtherCount;
  if (header.dtype != dtype) fault = Fault::kOtherDType;
  if (header.magic != kMagic || header.version != kVersion || (header.flags & ~(kPlain | kChecksum)) != 0 ||
      ((header.flags & kPlain) != 0) != plain || header.reserved0 != 0 || header.reserved1 != 0 ||
      ((header.flags & kChecksum) == 0 && header.checksum != 0)) {
    fault = Fault::kNoMessage;
  }
  return fault;
}

// The same of a chunk's header. Notes the escapes of each sub-block.
template <DType dtype>
__device__ __forceinline__ Fault check_chunk(Plan& plan, const ChunkHeader& own, const MessageHeader& header,
                                             uint32_t elements, bool& listed) {
  const uint32_t escapes = own.escape_end[kSubBlocks - 1];
  const uint32_t last = padded_elements(elements) / kSubBlockElements - 1;
  const bool raw = own.mode == Mode::kRaw;
  Fault fault = Fault::kNone;
  if (own.low != kNoLow && (dtype != DType::kFloat32 || uint64_t{own.low} * kAlignment >= header.low_bytes ||
                            low_slot_bytes(elements) > header.low_bytes - uint64_t{own.low} * kAlignment)) {
    fault = Fault::kLowRange;
  }
  if (own.pool_offset > header.pool_bytes || escapes > header.pool_bytes - own.pool_offset) fault = Fault::kPoolRange;
  bool sound = own.elements == elements && own.mode <= Mode::kRaw && escapes <= raw_pool_bytes(elements);
  if (raw) sound = sound && own.top == 0 && escapes == raw_pool_bytes(elements);
  uint32_t before = 0;
#pragma unroll
  for (uint32_t block = 0; block < kSubBlocks; block++) {
    const uint32_t end = own.escape_end[block];
    plan.escapes_of[block] = make_uint2(end - before, before);
    listed = listed && end - before <= kListed;
    const bool good = raw && block < kSubBlocks - 1 ? end == 0 : end >= before && (block < last || end == escapes);
    sound = sound && good;
    before = end;
  }
  return sound ? fault : Fault::kChunkHeader;
}

// By one thread of a block.
template <DType dtype>
__device__ __forceinline__ Verdict make_plan(Plan& plan, const Placed<Incoming>& message, uint32_t index,
                                             uint64_t chunk, Findings* findings) {
  const MessageHeader header = *reinterpret_cast<const MessageHeader*>(message.statics);
  Fault fault = check_header<dtype>(header, message);
  plan.scale = header.scale;
  if (fault == Fault::kNone &&
      ((header.pool_bytes > message.inline_bytes && header.pool_bytes - message.inline_bytes > message.pool_room) ||
       header.low_bytes > message.low_room)) {  // cold: begin
    atomicOr(&findings->deferred, 1u);
    return Verdict::kDeferred;
  }  // cold: end
  if (fault == Fault::kNone && message.sum != nullptr && (header.flags & kChecksum) != 0) {  // cold: begin
    if (header.checksum != *message.sum) fault = Fault::kChecksum;
  }  // cold: end
  if (fault == Fault::kNone && (message.plain || message.elements == 0)) return Verdict::kPlainValues;  // cold
  ChunkHeader own = {};
  bool listed = true;
  const uint32_t elements = chunk_elements(message.elements, chunk);
  if (fault == Fault::kNone) {
    own = *reinterpret_cast<const ChunkHeader*>(message.statics + chunk_header_offset(chunk));
    fault = check_chunk<dtype>(plan, own, header, elements, listed);
  }
  if (fault != Fault::kNone) {  // cold: begin
    found(findings, fault, index, chunk);
    return Verdict::kFaulty;
  }  // cold: end
  const uint32_t top = own.top;
  const uint32_t seventh = own.mode == Mode::kWindowAndZero ? 0 : top - 6;
  plan.upper = (top & 0xff) << 8 | ((top - 1) & 0xff) << 16 | (top - 2) << 24;
  plan.lower = ((top - 3) & 0xff) | ((top - 4) & 0xff) << 8 | ((top - 5) & 0xff) << 16 | seventh << 24;
  plan.low = own.low == kNoLow ? nullptr : message.low + uint64_t{own.low} * kAlignment;
  plan.pool_offset = own.pool_offset;
  plan.escapes = message.inlined + own.pool_offset;
  if (own.mode == Mode::kRaw) return Verdict::kRaw;
  const bool inlined = own.pool_offset + own.escape_end[kSubBlocks - 1] <= message.inline_bytes;
  return listed && inlined ? Verdict::kUsual : Verdict::kBeyond;
}

// A lane's part of a coded chunk as it comes from memory, at places that follow from the announced sizes alone.
struct Lanes {
  uint4 sign_mantissas[2];
  uint32_t planes[kPlanes];
};

template <bool full>
__device__ __forceinline__ Lanes load_lanes(const Placed<Incoming>& message, uint32_t chunk, uint32_t elements) {
  const uint32_t padded = full ? kChunkElements : padded_elements(elements);
  const uint8_t* body = message.bodies + uint64_t{chunk} * kBodyStride;
  Lanes lanes = {};
  if (full || threadIdx.x * kLaneElements < padded) {
    const auto* sign_mantissas = reinterpret_cast<const uint4*>(body + threadIdx.x * kLaneElements);
    lanes.sign_mantissas[0] = __ldg(sign_mantissas);
    lanes.sign_mantissas[1] = __ldg(sign_mantissas + 1);
#pragma unroll
    for (uint32_t p = 0; p < kPlanes; p++) {
      lanes.planes[p] = __ldg(reinterpret_cast<const uint32_t*>(body + padded + p * (padded / 8)) + threadIdx.x);
    }
  }
  return lanes;
}

// Puts a lane's values into the tile, as pairs that are still rotated left by one. Of its exponents, byte 2b+h of [k]
// and, for b of 2 and 3, of [4 + k] is that of element 8b+4h+k.
__device__ __forceinline__ void store_pairs(const Places& places, const uint4 (&sign_mantissas)[2],
                                            const uint32_t (&exponents)[8]) {
#pragma unroll
  for (uint32_t b = 0; b < 4; b++) {
    const uint4& bytes = sign_mantissas[b / 2];
    const uint32_t halves[2] = {b % 2 == 0 ? bytes.x : bytes.z, b % 2 == 0 ? bytes.y : bytes.w};
    uint32_t pairs[4];
#pragma unroll
    for (uint32_t q = 0; q < 4; q++) {
      const uint32_t* four = exponents + b / 2 * 4 + q % 2 * 2;
      const uint32_t both = __byte_perm(four[0], four[1], b % 2 == 0 ? 0x5140 : 0x7362);  // h = 0, then h = 1
      const uint32_t order = q % 2 == 0 ? (q / 2 == 0 ? 0x5140 : 0x7160) : (q / 2 == 0 ? 0x5342 : 0x7362);
      pairs[q] = __byte_perm(halves[q / 2], both, order);
    }
    places.own_granule(b) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// What the codes of a lane's elements say: exponents as store_pairs takes them, and which elements are escapes.
__device__ __forceinline__ uint32_t decode_planes(const Lanes& lanes, uint32_t upper, uint32_t lower,
                                                  uint32_t (&exponents)[8]) {
  uint32_t words[4] = {lanes.planes[0], lanes.planes[1], lanes.planes[2], 0};
  const uint32_t escaped = ~(words[0] | words[1] | words[2]);
  transpose_nibbles(words[0], words[1], words[2], words[3]);
#pragma unroll
  for (uint32_t k = 0; k < 4; k++) {
    exponents[k] = choose_bytes(upper, lower, words[k]);
    exponents[4 + k] = choose_bytes(upper, lower, words[k] >> 16);
  }
  return escaped;
}

// decode_lanes for chunks that are raw, or whose escapes are many or go beyond the inline pool.
__device__ __forceinline__ bool decode_rare_lanes(DecodeShared& shared, const Placed<Incoming>& message, uint32_t chunk,
                                                  uint32_t elements) {  // cold: begin
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const Places places(shared.tiles[warp], lane);
  const Plan& plan = shared.plan;
  const auto pool = pool_of<const uint8_t>(message);
  const Lanes lanes = load_lanes<false>(message, chunk, elements);
  const uint32_t first = threadIdx.x * kLaneElements;
  uint32_t exponents[8] = {};
  if (plan.verdict == Verdict::kRaw) {
    const uint32_t padded = padded_elements(elements), slot = raw_slot_bytes(elements);
    const uint8_t* slots = message.bodies + uint64_t{chunk} * kBodyStride + padded;
#pragma unroll
    for (uint32_t i = 0; i < kLaneElements; i++) {
      uint32_t exponent = 0;
      if (first + i < slot) {
        exponent = slots[first + i];
      } else if (first + i < elements) {
        exponent = pool[plan.pool_offset + first + i - slot];
      }
      exponents[i % 4 + i / 16 * 4] |= exponent << i / 4 % 4 * 8;
    }
    store_pairs(places, lanes.sign_mantissas, exponents);
    return true;
  }
  uint32_t escaped = decode_planes(lanes, plan.upper, plan.lower, exponents);
  if (warp * kSubBlockElements >= elements) escaped = 0;
  const uint32_t sum = inclusive_sum(__popc(escaped), lane);
  if (__shfl_sync(kAllLanes, sum, kLanes - 1) != plan.escapes_of[warp].x) return false;
  store_pairs(places, lanes.sign_mantissas, exponents);
  uint64_t i = plan.pool_offset + plan.escapes_of[warp].y + sum;
  while (escaped != 0) {
    const uint32_t k = take_highest(escaped);
    reinterpret_cast<uint8_t*>(&places.own_element(k))[1] = pool[--i];
  }
  return true;
}  // cold: end

// Puts a sub-block's values into its tile, as store_pairs does; before they are read, the warp must synchronise. False
// if the codes do not match the count of escapes, on all lanes.
template <bool full>
__device__ __forceinline__ bool decode_lanes(DecodeShared& shared, const PlanHead& head, const Places& places,
                                             const Lanes& lanes, uint32_t elements, uint32_t warp, uint32_t lane) {
  uint32_t exponents[8];
  uint32_t escaped = decode_planes(lanes, head.upper, head.lower, exponents);
  if (!full && warp * kSubBlockElements >= elements) escaped = 0;
  const uint32_t sum = inclusive_sum(__popc(escaped), lane);
  const uint2 of_warp = shared.plan.escapes_of[warp];
  if (__shfl_sync(kAllLanes, sum, kLanes - 1) != of_warp.x) return false;
  store_pairs(places, lanes.sign_mantissas, exponents);
  uint16_t* end = shared.listed[warp] + sum;
  auto* tile = reinterpret_cast<uint8_t*>(&shared.tiles[warp]);
  const uint32_t own = static_cast<uint32_t>(places.owned - tile) + 1;
#pragma unroll 1
  while (escaped != 0) {  // loop: 3.0
    const uint32_t i = take_highest(escaped);
    *--end = static_cast<uint16_t>(own + 2 * i);
  }  // loop: end
  __syncwarp();
  const uint8_t* escapes = shared.plan.escapes + of_warp.y;
#pragma unroll 1
  for (uint32_t i = lane; i < of_warp.x; i += kLanes) {  // loop: 1.1
    tile[shared.listed[warp][i]] = escapes[i];
  }
  return true;
}

__device__ __forceinline__ uint32_t unrotated(uint32_t pair) { return __funnelshift_r(pair, pair, 1); }

__device__ __forceinline__ uint4 widen(uint2 upper, uint2 lower) {
  return make_uint4(__byte_perm(lower.x, upper.x, 0x5410), __byte_perm(lower.x, upper.x, 0x7632),
                    __byte_perm(lower.y, upper.y, 0x5410), __byte_perm(lower.y, upper.y, 0x7632));
}

// Four neighbouring fp32 values, the j-th that a lane moves, of a tile as decode_lanes leaves it. `count`: of values.
template <DType dtype>
__device__ __forceinline__ uint4 four_values(const Places& places, const uint8_t* low, uint32_t j, uint32_t lane,
                                             uint32_t count) {
  const uint2 pairs = places.quad(j);
  uint2 lower = make_uint2(0, 0);
  if constexpr (dtype == DType::kFloat32) {
    const uint32_t q = j * kLanes + lane;
    if (low != nullptr && 4 * q < count) lower = __ldg(reinterpret_cast<const uint2*>(low) + q);
  }
  return widen(make_uint2(unrotated(pairs.x), unrotated(pairs.y)), lower);
}

// Writes the first `count` of a tile's values.
template <DType dtype>
__device__ __forceinline__ void empty_tile(Tile& tile, const Places& places, const uint8_t* low, uint8_t* output,
                                           uint32_t count, uint32_t lane) {
  if (count == kSubBlockElements && is_aligned(output, 16)) {
    if constexpr (dtype == DType::kBFloat16) {
#pragma unroll
      for (uint32_t j = 0; j < kLaneGranules; j++) {
        const uint4 pairs = places.granule(j);
        reinterpret_cast<uint4*>(output)[j * kLanes + lane] =
            make_uint4(unrotated(pairs.x), unrotated(pairs.y), unrotated(pairs.z), unrotated(pairs.w));
      }
    } else {
#pragma unroll
      for (uint32_t j = 0; j < kLaneGranules * 2; j++) {
        reinterpret_cast<uint4*>(output)[j * kLanes + lane] = four_values<dtype>(places, low, j, lane, count);
      }
    }
    return;
  }
  // cold: begin
  for (uint32_t i = lane; i < count; i += kLanes) {
    const uint32_t pair = unrotated(element(tile, i & ~1u) | uint32_t{element(tile, i | 1)} << 16);
    const auto value = static_cast<uint16_t>(i % 2 == 0 ? pair : pair >> 16);
    if constexpr (dtype == DType::kBFloat16) {
      reinterpret_cast<uint16_t*>(output)[i] = value;
    } else {
      const uint32_t lower = low == nullptr ? 0 : reinterpret_cast<const uint16_t*>(low)[i];
      reinterpret_cast<uint32_t*>(output)[i] = uint32_t{value} << 16 | lower;
    }
  }
}  // cold: end

// The rest of decode_chunk, for what decode_rare_lanes decodes.
template <DType dtype>
__device__ ZIPCCL_NOINLINE void decode_rare_chunk(DecodeShared& shared, const DecodeBatch& batch, uint32_t chunk,
                                                  uint32_t elements) {  // cold: begin
  const Placed<Incoming>& message = batch.messages[blockIdx.y];
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint32_t start = warp * kSubBlockElements;
  const Plan& plan = shared.plan;
  if (!decode_rare_lanes(shared, message, chunk, elements)) {
    if (lane == 0) found(batch.findings, Fault::kCodes, batch.first + blockIdx.y, chunk);
    return;
  }
  __syncwarp();
  if (start >= elements) return;
  const uint64_t offset = uint64_t{chunk} * kChunkElements + start;
  empty_tile<dtype>(shared.tiles[warp], Places(shared.tiles[warp], lane),
                    plan.low == nullptr ? nullptr : plan.low + start * 2,
                    static_cast<uint8_t*>(message.output) + offset * element_bytes(dtype),
                    min(elements - start, kSubBlockElements), lane);
}  // cold: end

template <DType dtype, bool full>
__device__ __forceinline__ void decode_chunk(DecodeShared& shared, const DecodeBatch& batch, uint32_t chunk,
                                             uint32_t chunk_elements) {
  const Placed<Incoming>& message = batch.messages[blockIdx.y];
  const uint32_t elements = full ? kChunkElements : chunk_elements;
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const Lanes lanes = load_lanes<full>(message, chunk, elements);
  if (threadIdx.x == 0) {  // loop: 0.125
    shared.plan.verdict = make_plan<dtype>(shared.plan, message, batch.first + blockIdx.y, chunk, batch.findings);
  }  // loop: end
  __syncthreads();
  const PlanHead head(shared.plan);
  if (head.verdict != Verdict::kUsual) {  // cold: begin
    if (head.verdict < Verdict::kPlainValues) decode_rare_chunk<dtype>(shared, batch, chunk, elements);
    return;
  }  // cold: end
  const Places places(shared.tiles[warp], lane);
  const uint32_t start = warp * kSubBlockElements;
  if (!decode_lanes<full>(shared, head, places, lanes, elements, warp, lane)) {  // cold: begin
    if (lane == 0) found(batch.findings, Fault::kCodes, batch.first + blockIdx.y, chunk);
    return;
  }  // cold: end
  __syncwarp();
  if (!full && start >= elements) return;
  const uint32_t count = full ? kSubBlockElements : min(elements - start, kSubBlockElements);
  const uint64_t offset = uint64_t{chunk} * kChunkElements + start;
  const uint8_t* low = shared.plan.low;
  empty_tile<dtype>(shared.tiles[warp], places, low == nullptr ? nullptr : low + start * 2,
                    static_cast<uint8_t*>(message.output) + offset * element_bytes(dtype), count, lane);
}

// The rare case, out of the way.
template <DType dtype>
__device__ ZIPCCL_NOINLINE void decode_short_chunk(DecodeShared& shared, const DecodeBatch& batch, uint32_t chunk,
                                                   uint32_t elements) {  // cold: begin
  decode_chunk<dtype, false>(shared, batch, chunk, elements);
}  // cold: end

// Blocks (chunk, message).
template <DType dtype>
__global__ void __launch_bounds__(kThreads) decode_chunks(const __grid_constant__ DecodeBatch batch) {
  ZIPCCL_SHARED(DecodeShared, shared);
  const Placed<Incoming>& message = batch.messages[blockIdx.y];
  const uint32_t chunk = blockIdx.x;
  if (chunk < message.full_chunks) {
    decode_chunk<dtype, true>(shared, batch, chunk, kChunkElements);
    return;
  }
  // cold: begin
  if (message.plain == 0 && chunk < message.chunks) {
    decode_short_chunk<dtype>(shared, batch, chunk, chunk_elements(message.elements, chunk));
    return;
  }
  // A message without chunks has a header to check all the same.
  if (chunk >= message.chunks && chunk != 0) return;
  if (threadIdx.x == 0) {
    shared.plan.verdict = make_plan<dtype>(shared.plan, message, batch.first + blockIdx.y, chunk, batch.findings);
  }
  __syncthreads();
  if (shared.plan.verdict != Verdict::kPlainValues || message.elements == 0) return;
  const uint64_t offset = uint64_t{chunk} * (kChunkElements * element_bytes(dtype));
  copy_bytes(static_cast<uint8_t*>(message.output) + offset, message.statics + kAlignment + offset,
             chunk_elements(message.elements, chunk) * element_bytes(dtype));
}  // cold: end

// ---------------------------------------------------------------------------------------------------------------------
// Reducing

struct ReduceBatch {
  Placed<Incoming> messages[kBatch];
  Findings* findings;
  Reducing reducing;
  uint32_t count;
  uint32_t first;     // index of messages[0] among all that are reduced
  uint32_t reported;  // what findings call messages[0]
  uint32_t last;      // whether messages[count - 1] is the last of them
};

// Two values to bf16, to nearest even, NaN to 0x7fc0.
__device__ __forceinline__ uint32_t rounded_pair(float first, float second) {
#ifdef __CUDACC__
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
  const auto round = [](float value) {
    const uint32_t bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  };
  uint32_t pair = (round(first) & 0xffff) | round(second) << 16;
#endif
  if (first != first || second != second) {  // cold: begin
    if (first != first) pair = (pair & 0xffff0000) | 0x7fc0;
    if (second != second) pair = (pair & 0xffff) | 0x7fc00000;
  }  // cold: end
  return pair;
}

// Four values from 4 q on of uncoded ones, of which there are `count`.
template <DType dtype>
__device__ __forceinline__ uint4 load_four(const uint8_t* values, uint32_t q, uint32_t count) {
  if (4 * q + 4 <= count && is_aligned(values, 4 * element_bytes(dtype))) {
    if constexpr (dtype == DType::kFloat32) return reinterpret_cast<const uint4*>(values)[q];
    return widen(reinterpret_cast<const uint2*>(values)[q], make_uint2(0, 0));
  }
  // cold: begin
  uint32_t bits[4] = {};
  for (uint32_t k = 0; k < 4 && 4 * q + k < count; k++) {
    if constexpr (dtype == DType::kFloat32) {
      bits[k] = reinterpret_cast<const uint32_t*>(values)[4 * q + k];
    } else {
      bits[k] = uint32_t{reinterpret_cast<const uint16_t*>(values)[4 * q + k]} << 16;
    }
  }
  return make_uint4(bits[0], bits[1], bits[2], bits[3]);
}  // cold: end

constexpr uint32_t kQuads = kLaneGranules * 2;  // of four elements: 32 j + lane is a lane's j-th

// The accumulators of a lane. A maximum is the minimum of values with the other sign: `flip` is their sign bit.
struct Accumulators {
  float values[kQuads][4];
  bool adds;
  uint32_t flip;

  __device__ __forceinline__ explicit Accumulators(Reduction reduction)
      : adds(reduction == Reduction::kSum), flip(reduction == Reduction::kMax ? 0x80000000 : 0) {
    // What takes on any first value unchanged; adding to -0 does.
    const float neutral = __uint_as_float(adds ? 0x80000000 : 0x7f800000);
#pragma unroll
    for (uint32_t j = 0; j < kQuads; j++) {
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) values[j][k] = neutral;
    }
  }

  __device__ __forceinline__ void fold(uint32_t j, uint4 bits, float scale) {
    const uint32_t four[4] = {bits.x, bits.y, bits.z, bits.w};
    if (adds) {
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        values[j][k] = __fadd_rn(values[j][k], __fmul_rn(__uint_as_float(four[k]), scale));
      }
    } else {  // cold: begin
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        const float value = __uint_as_float(__float_as_uint(__fmul_rn(__uint_as_float(four[k]), scale)) ^ flip);
        if (value < values[j][k] || value != value) values[j][k] = value;
      }
    }  // cold: end
  }
};

template <DType dtype, DType output_dtype>
__global__ void __launch_bounds__(kThreads, 2) reduce_chunks(const __grid_constant__ ReduceBatch batch) {
  ZIPCCL_SHARED(DecodeShared, shared);
  const uint32_t chunk = blockIdx.x;
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const Reducing& reducing = batch.reducing;
  const uint32_t elements = chunk_elements(reducing.elements, chunk);
  const uint32_t start = warp * kSubBlockElements;
  const uint32_t count = elements <= start ? 0 : min(elements - start, kSubBlockElements);
  const uint64_t offset = (uint64_t{chunk} * kChunkElements + start) * element_bytes(dtype);
  // A message that the launch before could not decode: it has left no accumulators.
  const bool follows = batch.first != 0 || reducing.after_findings;
  if (follows && (batch.findings->deferred | batch.findings->fault) != 0) return;  // cold
  float* spilled = reducing.accumulator + uint64_t{chunk} * kChunkElements + start;
  const Places places(shared.tiles[warp], lane);
  Accumulators accumulators(reducing.reduction);
  if (batch.first != 0) {  // cold: begin
#pragma unroll
    for (uint32_t j = 0; j < kQuads; j++) {
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        const uint32_t i = 4 * (j * kLanes + lane) + k;
        if (i < count) accumulators.values[j][k] = spilled[i];
      }
    }
  }  // cold: end
#pragma unroll 1
  for (uint32_t m = 0; m < batch.count; m++) {  // loop: 1
    const Placed<Incoming>& message = batch.messages[m];
    const uint8_t* values = static_cast<const uint8_t*>(message.values) + offset;
    float scale = message.scale;
    if (message.values == nullptr) {
      Lanes lanes = {};
      if (message.plain == 0) lanes = load_lanes<false>(message, chunk, elements);
      if (threadIdx.x == 0) {  // loop: 0.125
        shared.plan.verdict = make_plan<dtype>(shared.plan, message, batch.reported + m, chunk, batch.findings);
      }  // loop: end
      __syncthreads();
      const Plan& plan = shared.plan;
      const PlanHead head(plan);
      scale = head.scale;
      if (head.verdict < Verdict::kPlainValues) {
        const uint8_t* low = plan.low == nullptr ? nullptr : plan.low + start * 2;
        bool sound;
        if (head.verdict == Verdict::kUsual) {
          sound = decode_lanes<false>(shared, head, places, lanes, elements, warp, lane);
        } else {  // cold: begin
          sound = decode_rare_lanes(shared, message, chunk, elements);
        }  // cold: end
        // The next message's plan takes this one's place.
        if (__syncthreads_or(!sound)) {  // cold: begin
          if (!sound && lane == 0) found(batch.findings, Fault::kCodes, batch.reported + m, chunk);
          return;
        }  // cold: end
#pragma unroll
        for (uint32_t j = 0; j < kQuads; j++) {
          accumulators.fold(j, four_values<dtype>(places, low, j, lane, count), scale);
        }
        // The next message's barrier would do; this one keeps the compiler from mixing both, which takes registers.
        __syncwarp();
        continue;
      }
      // cold: begin
      if (head.verdict != Verdict::kPlainValues) return;
      __syncthreads();  // as above
      values = message.statics + kAlignment + offset;
      // cold: end
    }
    // cold: begin
#pragma unroll
    for (uint32_t j = 0; j < kQuads; j++) {
      const uint32_t q = j * kLanes + lane;
      if (4 * q < count) accumulators.fold(j, load_four<dtype>(values, q, count), scale);
    }
    // cold: end
  }  // loop: end
  if (!batch.last) {  // cold: begin
#pragma unroll
    for (uint32_t j = 0; j < kQuads; j++) {
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        const uint32_t i = 4 * (j * kLanes + lane) + k;
        if (i < count) spilled[i] = accumulators.values[j][k];
      }
    }
    return;
  }  // cold: end
  // A power of two divides as its inverse multiplies. Signs that were flipped come back.
  const uint32_t divisor = __float_as_uint(reducing.divisor);
  float factor = 1.0f;
  if ((divisor & 0x007fffff) == 0) {
    factor = __uint_as_float((0x7f000000 - divisor) ^ accumulators.flip);
  } else {  // cold: begin
#pragma unroll
    for (uint32_t j = 0; j < kQuads; j++) {
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        accumulators.values[j][k] = __fdiv_rn(accumulators.values[j][k], __uint_as_float(divisor ^ accumulators.flip));
      }
    }
  }  // cold: end
  uint8_t* output =
      static_cast<uint8_t*>(reducing.output) + (uint64_t{chunk} * kChunkElements + start) * element_bytes(output_dtype);
  const bool aligned = count == kSubBlockElements && is_aligned(output, 4 * element_bytes(output_dtype));
#pragma unroll
  for (uint32_t j = 0; j < kQuads; j++) {
    const uint32_t q = j * kLanes + lane;
    float four[4];
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) four[k] = __fmul_rn(accumulators.values[j][k], factor);
    uint32_t bits[4];
    if constexpr (output_dtype == DType::kFloat32) {
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) bits[k] = __float_as_uint(four[k]);
      if (aligned) reinterpret_cast<uint4*>(output)[q] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
    } else {
      bits[0] = rounded_pair(four[0], four[1]);
      bits[1] = rounded_pair(four[2], four[3]);
      if (aligned) reinterpret_cast<uint2*>(output)[q] = make_uint2(bits[0], bits[1]);
    }
    if (!aligned) {  // cold: begin
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        if (4 * q + k >= count) break;
        if constexpr (output_dtype == DType::kFloat32) {
          reinterpret_cast<uint32_t*>(output)[4 * q + k] = bits[k];
        } else {
          reinterpret_cast<uint16_t*>(output)[4 * q + k] = static_cast<uint16_t>(bits[k / 2] >> k % 2 * 16);
        }
      }
    }  // cold: end
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Around them

struct SumBatch {
  Placed<Incoming> messages[kBatch];
  uint64_t* sums;
};

// The sum of a message's 64-bit words, the header's checksum taken as zero. Blocks (x, message).
template <DType dtype>
__global__ void __launch_bounds__(kThreads) sum_words(const __grid_constant__ SumBatch batch) {
  const Placed<Incoming>& message = batch.messages[blockIdx.y];
  const auto& header = *reinterpret_cast<const MessageHeader*>(message.statics);
  const uint64_t first = uint64_t{blockIdx.x} * kThreads + threadIdx.x, step = uint64_t{gridDim.x} * kThreads;
  uint64_t sum = 0;
  const auto add = [&](const uint8_t* words, uint64_t bytes) {
    for (uint64_t i = first; i < bytes / 8; i += step) sum += reinterpret_cast<const uint64_t*>(words)[i];
    if (first == 0) {
      for (uint64_t i = bytes / 8 * 8; i < bytes; i++) sum += uint64_t{words[i]} << i % 8 * 8;
    }
  };
  constexpr uint64_t kBefore = offsetof(MessageHeader, checksum);
  add(message.statics, kBefore);
  add(message.statics + kBefore + 8, sizeof(MessageHeader) - kBefore - 8);
  // Sizes that the message announces are believed only as far as there are bytes; decoding refuses it where not.
  if (message.elements != 0 && message.plain) {
    add(message.statics + kAlignment, message.elements * element_bytes(dtype));
  } else if (message.elements != 0) {
    add(message.statics + sizeof(MessageHeader), pool_offset(message.elements) - sizeof(MessageHeader));
    const auto pool = pool_of<const uint8_t>(message);
    const uint64_t room = message.inline_bytes + message.pool_room;
    const uint64_t pool_bytes = header.pool_bytes < room ? header.pool_bytes : room;
    for (uint64_t i = first; i < pool_bytes; i += step) sum += uint64_t{pool[i]} << i % 8 * 8;
    add(message.low, header.low_bytes < message.low_room ? header.low_bytes : message.low_room);
  }
#pragma unroll
  for (uint32_t distance = kLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_down_sync(kAllLanes, sum, distance);
  }
  if (threadIdx.x % kLanes == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(batch.sums + blockIdx.y), static_cast<unsigned long long>(sum));
  }
}

struct StoreSumsBatch {
  uint8_t* statics[kBatch];
  const uint64_t* sums;
};

// Checksums into the headers of encoded messages; one thread a message.
__global__ void store_sums(const __grid_constant__ StoreSumsBatch batch, uint32_t count) {
  if (threadIdx.x < count) header_of(batch.statics[threadIdx.x])->checksum = batch.sums[threadIdx.x];
}

struct SettleBatch {
  const MessageHeader* outgoing[kBatch];
  const MessageHeader* incoming[kBatch];
  uint32_t outgoing_count;
  uint32_t incoming_count;
  Sizes* outgoing_sizes;
  Sizes* incoming_sizes;
  Settling settling;
  uint32_t last;  // of the launches for one call
};

// One warp.
__global__ void settle_messages(const __grid_constant__ SettleBatch batch) {
  const uint32_t lane = threadIdx.x;
  bool open = false;
  const auto look = [&](const MessageHeader* const* headers, uint32_t count, Sizes* sizes) {
    if (lane >= count) return;
    const MessageHeader& header = *headers[lane];
    sizes[lane] = {header.pool_bytes, header.low_bytes};
    open = open || header.pool_bytes > header.inline_bytes || header.low_bytes != 0;
  };
  look(batch.outgoing, batch.outgoing_count, batch.outgoing_sizes);
  look(batch.incoming, batch.incoming_count, batch.incoming_sizes);
  open = __any_sync(kAllLanes, open);
  if (lane != 0) return;
  const Settling& settling = batch.settling;
  if (open) settling.report->open = 1;
  if (!batch.last) return;
  settling.report->findings = *settling.findings;
  if (settling.findings->fault != 0 || settling.findings->deferred != 0) settling.report->open = 1;
  __threadfence_system();
  if (settling.report->open == 0) *static_cast<volatile uint32_t*>(settling.flag) = settling.value;
}

}  // namespace zipccl::cuda
