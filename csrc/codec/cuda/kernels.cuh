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
// Comments of the form "hot: ..." and "cold: ..." tell benchmarks/sass.py what belongs to the usual path.
#pragma once

#ifdef __CUDACC__
#include <cuda_pipeline_primitives.h>
#define ZIPCCL_SHARED(Type, name)                                 \
  extern __shared__ __align__(128) unsigned char zipccl_shared[]; \
  Type& name = *reinterpret_cast<Type*>(zipccl_shared)
#define ZIPCCL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)
#else
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

struct Tile {
  uint4 granules[kGranules];
};

// Where granule g is in the tile: so that both ways to walk through it find all banks of shared memory.
__device__ __forceinline__ uint32_t place(uint32_t g) { return g ^ (g >> 3 & 7); }
// The same for element i of a lane's 32, in 2-byte units from the tile's start.
__device__ __forceinline__ uint32_t place_of_element(uint32_t lane, uint32_t i) {
  return (lane * kLaneElements + i) ^ ((lane >> 1 & 7) << 3);
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
    const uint32_t other = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

__device__ __forceinline__ bool is_aligned(const void* pointer, uint32_t alignment) {
  return (reinterpret_cast<uintptr_t>(pointer) & (alignment - 1)) == 0;
}

__device__ __forceinline__ uint16_t* elements_of(Tile& tile) { return reinterpret_cast<uint16_t*>(&tile); }

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

// ---------------------------------------------------------------------------------------------------------------------
// Encoding

struct EncodeBatch {
  Outgoing messages[kBatch];
  uint64_t* sums;  // null: no checksums
};

struct EncodeShared {
  Tile tiles[kWarps];
  uint32_t bins[8 + 256];           // of a sample, behind eight empty ones
  uint4 counts[256];                // the same, by four groups of lanes, so that equal exponents meet less often
  uint32_t escapes[kWarps];         // of each sub-block
  uint16_t escape_end[kSubBlocks];  // 16-byte aligned, as all before it
  uint64_t pool_offset;
  uint64_t low_offset;
  uint32_t best;
};

// Message headers and the padding of chunk header tables. One block a message; before encode_chunks.
template <DType dtype>
__global__ void __launch_bounds__(kThreads) begin_messages(const __grid_constant__ EncodeBatch batch) {
  const Outgoing& message = batch.messages[blockIdx.x];
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
  const uint64_t begin = message.plain ? sizeof(MessageHeader) : chunk_header_offset(chunk_count(message.elements));
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
                                          uint2 (&low)[kLaneGranules * 2]) {
  if (count == kSubBlockElements && is_aligned(values, 16)) {
    if constexpr (dtype == DType::kBFloat16) {
      const auto* granules = reinterpret_cast<const uint4*>(values);
#pragma unroll
      for (uint32_t j = 0; j < kLaneGranules; j++) {
        const uint32_t g = j * kLanes + lane;
        __pipeline_memcpy_async(&tile.granules[place(g)], granules + g, 16);
      }
      __pipeline_commit();
      __pipeline_wait_prior(0);
    } else {
      const auto* quads = reinterpret_cast<const uint4*>(values);
#pragma unroll
      for (uint32_t j = 0; j < kLaneGranules * 2; j++) {
        const uint32_t q = j * kLanes + lane;
        const uint4 bits = __ldg(quads + q);
        auto* half = reinterpret_cast<uint2*>(&tile.granules[place(q / 2)]) + (q & 1);
        *half = make_uint2(__byte_perm(bits.x, bits.y, 0x7632), __byte_perm(bits.z, bits.w, 0x7632));
        low[j] = make_uint2(__byte_perm(bits.x, bits.y, 0x5410), __byte_perm(bits.z, bits.w, 0x5410));
      }
    }
  } else {  // cold: begin
    for (uint32_t j = 0; j < kLaneGranules * 2; j++) {
      uint32_t halves[4] = {};
      for (uint32_t k = 0; k < 4; k++) {
        const uint32_t i = (j * kLanes + lane) * 4 + k;
        if (i >= count) break;
        uint32_t high;
        if constexpr (dtype == DType::kBFloat16) {
          high = reinterpret_cast<const uint16_t*>(values)[i];
        } else {
          const uint32_t bits = reinterpret_cast<const uint32_t*>(values)[i];
          high = bits >> 16;
          halves[k] = bits & 0xffff;
        }
        elements_of(tile)[place(i / 8) * 8 + i % 8] = static_cast<uint16_t>(high);
      }
      low[j] = make_uint2(halves[0] | halves[1] << 16, halves[2] | halves[3] << 16);
    }
  }  // cold: end
}

__device__ __forceinline__ void pad_tile(Tile& tile, uint32_t count, uint16_t pattern, uint32_t lane) {
  for (uint32_t i = count + lane; i < kSubBlockElements; i += kLanes) {
    elements_of(tile)[place(i / 8) * 8 + i % 8] = pattern;
  }
}

// The window and mode that leave the fewest exponents of a sample uncoded: the choice of best_window in window.h, on
// one group of 64 elements in every eight. By all threads of a block; `count` elements of this warp's tile are values.
__device__ __forceinline__ Window sample_window(EncodeShared& shared, uint32_t count, uint32_t warp, uint32_t lane) {
  const uint32_t t = threadIdx.x;
  shared.counts[t] = make_uint4(0, 0, 0, 0);
  if (t < 8) shared.bins[t] = 0;
  if (t == 0) shared.best = 0;
  __syncthreads();
#pragma unroll
  for (uint32_t group = 0; group < 2; group++) {
    const uint32_t first = group * 512 + lane * 2;
    const auto* words = reinterpret_cast<const uint32_t*>(&shared.tiles[warp].granules[place(first / 8)]);
    const uint32_t pair = words[lane & 3];
    const uint32_t copy = lane & 3;
    if (first < count) atomicAdd(reinterpret_cast<uint32_t*>(&shared.counts[pair >> 7 & 0xff]) + copy, 1u);
    if (first + 1 < count) atomicAdd(reinterpret_cast<uint32_t*>(&shared.counts[pair >> 23 & 0xff]) + copy, 1u);
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
  return {static_cast<uint8_t>(0xff - (found & 0xff)), (found & 0x100) != 0 ? Mode::kWindow : Mode::kWindowAndZero};
}

// Codes 7 minus the code of 32 exponents, of words as they come from a tile, rotated left by one: exponents are in
// bytes 1 and 3. words[k]: bit p of nibble 2b+h is bit p of that of element 8b+4h+k; where an escape's is not 7 itself,
// bit 3 says so.
__device__ __forceinline__ void code_words(const uint32_t (&pairs)[4][4], Window window, uint32_t (&words)[4]) {
  const uint32_t lowest = static_cast<uint32_t>(window.top) - 6;
  uint32_t codes[8];
  const uint32_t minus_lowest = ((0u - lowest) & 0xff) << 8;
  const uint32_t addend = minus_lowest << 16 | minus_lowest;
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
    const uint32_t first_far = (first & 0x7f7f7f7f) + 0x79797979 | first;  // bit 7 of each byte: is it 7 or more?
    const uint32_t second_far = (second & 0x7f7f7f7f) + 0x79797979 | second;
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

template <DType dtype, bool sampled>
__global__ void __launch_bounds__(kThreads) encode_chunks(const __grid_constant__ EncodeBatch batch) {
  ZIPCCL_SHARED(EncodeShared, shared);
  const Outgoing& message = batch.messages[blockIdx.y];
  const uint64_t chunk = blockIdx.x;
  const uint64_t left = message.elements - chunk * kChunkElements;
  if (chunk >= chunk_count(message.elements)) return;
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const uint8_t* values = static_cast<const uint8_t*>(message.values) + chunk * kChunkElements * element_bytes(dtype);
  if (message.plain) {  // cold: begin
    const uint64_t bytes = (left < kChunkElements ? left : kChunkElements) * element_bytes(dtype);
    uint8_t* output = message.statics + kAlignment + chunk * kChunkElements * element_bytes(dtype);
    if (is_aligned(values, 16)) {
      for (uint64_t i = threadIdx.x; i < bytes / 16; i += kThreads) {
        reinterpret_cast<uint4*>(output)[i] = reinterpret_cast<const uint4*>(values)[i];
      }
    }
    for (uint64_t i = (is_aligned(values, 16) ? bytes / 16 * 8 : 0) + threadIdx.x; i < bytes / 2; i += kThreads) {
      reinterpret_cast<uint16_t*>(output)[i] = reinterpret_cast<const uint16_t*>(values)[i];
    }
    return;
  }  // cold: end

  const uint32_t elements = left < kChunkElements ? static_cast<uint32_t>(left) : kChunkElements;
  const uint32_t padded = padded_elements(elements);
  const uint32_t start = warp * kSubBlockElements;
  const uint32_t count = elements <= start ? 0 : min(elements - start, kSubBlockElements);
  uint8_t* body = message.statics + body_offset(message.elements, chunk);
  Tile& tile = shared.tiles[warp];
  uint2 low[kLaneGranules * 2];
  fill_tile<dtype>(tile, values + start * element_bytes(dtype), count, lane, low);

  uint32_t low_unit = kNoLow;
  if constexpr (dtype == DType::kFloat32) {
    uint32_t any = 0;
#pragma unroll
    for (uint32_t j = 0; j < kLaneGranules * 2; j++) any |= low[j].x | low[j].y;
    if (__syncthreads_or(any != 0)) {  // cold: begin
      const uint32_t slot = low_slot_bytes(elements);
      if (threadIdx.x == 0) shared.low_offset = take(header_of(message.statics)->low_bytes, slot);
      __syncthreads();
      uint8_t* lows = message.low + shared.low_offset;
      for (uint32_t j = 0; j < kLaneGranules * 2; j++) {
        // Also where the chunk has ended in the slot, as zeros.
        const uint32_t at = start * 2 + (j * kLanes + lane) * 8;
        if (at < slot) *reinterpret_cast<uint2*>(lows + at) = low[j];
      }
      low_unit = static_cast<uint32_t>(shared.low_offset / kAlignment);
    }  // cold: end
  }

  const int16_t given = message.tops == nullptr ? int16_t{-1} : message.tops[chunk];
  Window window = {static_cast<uint8_t>(given), Mode::kWindow};
  __syncwarp();
  bool was_sampled = sampled || given < 0;
  if constexpr (sampled) {
    window = sample_window(shared, count, warp, lane);
  } else if (given < 0) {  // cold: begin
    window = sample_window(shared, count, warp, lane);
  }  // cold: end

  uint32_t escaped, rank, total, before;
  while (true) {
    if (count < kSubBlockElements) {  // cold: begin
      pad_tile(tile, count, static_cast<uint16_t>(window.top << 7), lane);
      __syncwarp();
    }  // cold: end
    uint32_t pairs[4][4];
#pragma unroll
    for (uint32_t b = 0; b < 4; b++) {
      const uint4 granule = tile.granules[place(lane * kLaneGranules + b)];
      pairs[b][0] = __funnelshift_l(granule.x, granule.x, 1);
      pairs[b][1] = __funnelshift_l(granule.y, granule.y, 1);
      pairs[b][2] = __funnelshift_l(granule.z, granule.z, 1);
      pairs[b][3] = __funnelshift_l(granule.w, granule.w, 1);
    }
    const bool present = start < padded;
    if (present) {
      auto* sign_mantissas = reinterpret_cast<uint4*>(body + start + lane * kLaneElements);
#pragma unroll
      for (uint32_t half = 0; half < 2; half++) {
        const auto& first = pairs[2 * half];
        const auto& second = pairs[2 * half + 1];
        sign_mantissas[half] =
            make_uint4(__byte_perm(first[0], first[1], 0x6420), __byte_perm(first[2], first[3], 0x6420),
                       __byte_perm(second[0], second[1], 0x6420), __byte_perm(second[2], second[3], 0x6420));
      }
    }
    if (window.mode == Mode::kWindowAndZero) {  // cold: begin
      exchange_zeros(pairs, window.top - 6u);
    }  // cold: end
    uint32_t planes[4];
    code_words(pairs, window, planes);
    transpose_nibbles(planes[0], planes[1], planes[2], planes[3]);
#if ZIPCCL_ADD_MIN
    escaped = planes[0] & planes[1] & planes[2];
#else
    // A code of 7 - 7 that is no escape does not exist, and an escape's bits may be any.
    escaped = planes[3];
#endif
    if (present) {
#pragma unroll
      for (uint32_t p = 0; p < kPlanes; p++) {
        auto* plane = reinterpret_cast<uint32_t*>(body + padded + p * (padded / 8) + start / 8);
        plane[lane] = ~(planes[p] | escaped);
      }
    } else {
      escaped = 0;
    }
    const uint32_t own = __popc(escaped), sum = inclusive_sum(own, lane);
    if (lane == kLanes - 1) shared.escapes[warp] = sum;
    __syncthreads();
    const uint32_t of_warp = lane < kWarps ? shared.escapes[lane] : 0;
    total = __reduce_add_sync(kAllLanes, of_warp);
    before = __reduce_add_sync(kAllLanes, lane < warp ? of_warp : 0);
    rank = before + sum - own;
    if (was_sampled || total <= elements / 8) break;
    // cold: begin
    // The given window does not fit.
    was_sampled = true;
    window = sample_window(shared, count, warp, lane);
  }  // cold: end

  const Pool<uint8_t> pool = {message.statics + pool_offset(message.elements), message.inline_bytes, message.pool};
  const bool raw = total > raw_pool_bytes(elements);
  if (raw) total = raw_pool_bytes(elements);
  if (threadIdx.x == 0) shared.pool_offset = take(header_of(message.statics)->pool_bytes, total);
  if (lane == 0) {
    const uint32_t end = raw ? (warp == kWarps - 1 ? total : 0) : before + shared.escapes[warp];
    shared.escape_end[warp] = static_cast<uint16_t>(end);
  }
  __syncthreads();
  const uint64_t pool_begin = shared.pool_offset;
  if (threadIdx.x == 0) {  // loop: 0.125
    ChunkHeader header;
    header.elements = static_cast<uint16_t>(elements);
    header.top = raw ? 0 : window.top;
    header.mode = raw ? Mode::kRaw : window.mode;
    header.low = low_unit;
    header.pool_offset = pool_begin;
    auto* target = reinterpret_cast<uint4*>(message.statics + chunk_header_offset(chunk));
    target[0] = *reinterpret_cast<const uint4*>(&header);
    target[1] = *reinterpret_cast<const uint4*>(shared.escape_end);
  }  // loop: end
  if (raw) {  // cold: begin
    const uint32_t slot = raw_slot_bytes(elements);
    for (uint32_t i = start + lane; i < min(start + kSubBlockElements, padded); i += kLanes) {
      const uint32_t value = elements_of(tile)[place(i % kSubBlockElements / 8) * 8 + i % 8];
      const auto exponent = static_cast<uint8_t>(i < elements ? value >> 7 : 0);
      if (i < slot) {
        body[padded + i] = exponent;
      } else if (i < elements) {
        pool[pool_begin + i - slot] = exponent;
      }
    }
    return;
  }  // cold: end
  uint64_t at = pool_begin + rank;
  if (pool_begin + total <= message.inline_bytes) {
    uint8_t* target = pool.inlined + at;
    while (escaped != 0) {  // loop: 3.0
      const uint32_t i = __ffs(escaped) - 1;
      escaped &= escaped - 1;
      *target++ = static_cast<uint8_t>(elements_of(tile)[place_of_element(lane, i)] >> 7);
    }  // loop: end
  } else {  // cold: begin
    while (escaped != 0) {
      const uint32_t i = __ffs(escaped) - 1;
      escaped &= escaped - 1;
      pool[at++] = static_cast<uint8_t>(elements_of(tile)[place_of_element(lane, i)] >> 7);
    }
  }  // cold: end
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding

struct DecodeBatch {
  Incoming messages[kBatch];
  Findings* findings;
  uint32_t first;  // index of messages[0] among all
};

enum class Verdict : uint32_t { kCoded, kPlainValues, kDeferred, kFaulty };

// What a block needs to know of a chunk, all of it checked.
struct Plan {
  Verdict verdict;
  uint32_t top;
  Mode mode;
  float scale;
  uint64_t pool_offset;
  const uint8_t* low;  // null: all zero
  uint16_t escape_end[kSubBlocks];
};

struct DecodeShared {
  Tile tiles[kWarps];
  Plan plan;
};

__device__ __forceinline__ Verdict found(Findings* findings, Fault fault, uint32_t message, uint64_t chunk) {
  if (atomicCAS(&findings->fault, 0u, static_cast<uint32_t>(fault)) == 0) {
    findings->message = message;
    findings->chunk = chunk;
  }
  return Verdict::kFaulty;
}

// By one thread of a block.
template <DType dtype>
__device__ __forceinline__ Verdict make_plan(Plan& plan, const Incoming& message, uint32_t index, uint64_t chunk,
                                             Findings* findings) {
  const MessageHeader header = *reinterpret_cast<const MessageHeader*>(message.statics);
  const auto fail = [&](Fault fault) { return found(findings, fault, index, chunk); };
  if (header.magic != kMagic || header.version != kVersion || (header.flags & ~(kPlain | kChecksum)) != 0 ||
      ((header.flags & kPlain) != 0) != (message.plain != 0) || header.reserved0 != 0 || header.reserved1 != 0 ||
      ((header.flags & kChecksum) == 0 && header.checksum != 0)) {
    return fail(Fault::kNoMessage);
  }
  if (header.dtype != dtype) return fail(Fault::kOtherDType);
  if (header.elements != message.elements) return fail(Fault::kOtherCount);
  if (header.inline_bytes != (message.plain ? 0 : message.inline_bytes)) return fail(Fault::kOtherInline);
  if (header.pool_bytes > (message.plain ? 0 : pool_bound(message.elements)) ||
      header.low_bytes > (message.plain ? 0 : low_bound(message.elements, dtype)) ||
      header.low_bytes % kAlignment != 0) {
    return fail(Fault::kSizes);
  }
  plan.scale = header.scale;
  if ((header.pool_bytes > message.inline_bytes && header.pool_bytes - message.inline_bytes > message.pool_room) ||
      header.low_bytes > message.low_room) {
    atomicOr(&findings->deferred, 1u);
    return Verdict::kDeferred;
  }
  if (message.sum != nullptr && (header.flags & kChecksum) != 0 && header.checksum != *message.sum) {
    return fail(Fault::kChecksum);
  }
  if (message.plain || message.elements == 0) return Verdict::kPlainValues;

  const ChunkHeader own = *reinterpret_cast<const ChunkHeader*>(message.statics + chunk_header_offset(chunk));
  const uint32_t elements = chunk_elements(message.elements, chunk);
  const uint32_t escapes = own.escape_end[kSubBlocks - 1];
  bool sound = own.elements == elements && own.mode <= Mode::kRaw && escapes <= raw_pool_bytes(elements);
  const uint32_t last = padded_elements(elements) / kSubBlockElements - 1;
  for (uint32_t block = 0; block < kSubBlocks - 1; block++) {
    const uint32_t end = own.escape_end[block];
    sound = sound && (own.mode == Mode::kRaw ? end == 0 : end <= own.escape_end[block + 1]);
    if (own.mode != Mode::kRaw && block >= last) sound = sound && end == escapes;
  }
  if (own.mode == Mode::kRaw) sound = sound && own.top == 0 && escapes == raw_pool_bytes(elements);
  if (!sound) return fail(Fault::kChunkHeader);
  if (own.pool_offset > header.pool_bytes || escapes > header.pool_bytes - own.pool_offset) {
    return fail(Fault::kPoolRange);
  }
  plan.low = nullptr;
  if (own.low != kNoLow) {
    const uint64_t offset = uint64_t{own.low} * kAlignment;
    if (dtype != DType::kFloat32 || offset >= header.low_bytes ||
        low_slot_bytes(elements) > header.low_bytes - offset) {
      return fail(Fault::kLowRange);
    }
    plan.low = message.low + offset;
  }
  plan.top = own.top;
  plan.mode = own.mode;
  plan.pool_offset = own.pool_offset;
  for (uint32_t block = 0; block < kSubBlocks; block++) plan.escape_end[block] = own.escape_end[block];
  return Verdict::kCoded;
}

// A lane's part of a coded chunk as it comes from memory, at places that follow from the announced sizes alone.
struct Lanes {
  uint4 sign_mantissas[2];
  uint32_t planes[kPlanes];
};

__device__ __forceinline__ Lanes load_lanes(const Incoming& message, uint64_t chunk, uint32_t warp, uint32_t lane) {
  const uint32_t padded = padded_elements(chunk_elements(message.elements, chunk));
  const uint32_t start = warp * kSubBlockElements;
  const uint8_t* body = message.statics + body_offset(message.elements, chunk);
  Lanes lanes = {};
  if (start < padded) {
    const auto* sign_mantissas = reinterpret_cast<const uint4*>(body + start + lane * kLaneElements);
    lanes.sign_mantissas[0] = __ldg(sign_mantissas);
    lanes.sign_mantissas[1] = __ldg(sign_mantissas + 1);
#pragma unroll
    for (uint32_t p = 0; p < kPlanes; p++) {
      lanes.planes[p] = __ldg(reinterpret_cast<const uint32_t*>(body + padded + p * (padded / 8) + start / 8) + lane);
    }
  }
  return lanes;
}

// Puts a sub-block's values into its tile, as pairs that are still rotated left by one. False if the codes do not match
// the count of escapes, on all lanes.
__device__ __forceinline__ bool decode_lanes(Tile& tile, const Lanes& lanes, const Plan& plan, const Incoming& message,
                                             uint64_t chunk, uint32_t warp, uint32_t lane) {
  const Pool<const uint8_t> pool = {message.statics + pool_offset(message.elements), message.inline_bytes,
                                    message.pool};
  uint32_t words[4] = {lanes.planes[0], lanes.planes[1], lanes.planes[2], 0};
  uint32_t exponents[8];  // bytes 2b+h of [k] and, for b of 2 and 3, [4 + k]: that of element 8b+4h+k
  uint32_t escaped = 0, rank = 0;
  bool raw = plan.mode == Mode::kRaw;
  if (raw) {  // cold: begin
    const uint32_t elements = chunk_elements(message.elements, chunk);
    const uint32_t padded = padded_elements(elements), slot = raw_slot_bytes(elements);
    const uint8_t* slots = message.statics + body_offset(message.elements, chunk) + padded;
    for (uint32_t k = 0; k < 8; k++) exponents[k] = 0;
    const uint32_t first = warp * kSubBlockElements + lane * kLaneElements;
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
  } else {  // cold: end
    escaped = ~(words[0] | words[1] | words[2]);
    if (warp * kSubBlockElements >= chunk_elements(message.elements, chunk)) escaped = 0;
    const uint32_t own = __popc(escaped), sum = inclusive_sum(own, lane);
    const uint32_t before = warp == 0 ? 0 : plan.escape_end[warp - 1];
    if (__shfl_sync(kAllLanes, sum, kLanes - 1) != plan.escape_end[warp] - before) return false;
    rank = before + sum - own;
    transpose_nibbles(words[0], words[1], words[2], words[3]);
    // Codes 0 .. 3 and 4 .. 7 to exponents; what 0 gives is patched.
    const uint32_t top = plan.top;
    const uint32_t seventh = plan.mode == Mode::kWindowAndZero ? 0 : top - 6;
    const uint32_t upper = (top & 0xff) << 8 | ((top - 1) & 0xff) << 16 | (top - 2) << 24;
    const uint32_t lower = ((top - 3) & 0xff) | ((top - 4) & 0xff) << 8 | ((top - 5) & 0xff) << 16 | seventh << 24;
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
      exponents[k] = __byte_perm(upper, lower, words[k]);
      exponents[4 + k] = __byte_perm(upper, lower, words[k] >> 16);
    }
  }
#pragma unroll
  for (uint32_t b = 0; b < 4; b++) {
    const uint4& bytes = lanes.sign_mantissas[b / 2];
    const uint32_t sign_mantissas[2] = {b % 2 == 0 ? bytes.x : bytes.z, b % 2 == 0 ? bytes.y : bytes.w};
    uint32_t pairs[4];
#pragma unroll
    for (uint32_t q = 0; q < 4; q++) {
      const uint32_t* four = exponents + b / 2 * 4 + q % 2 * 2;
      const uint32_t both = __byte_perm(four[0], four[1], b % 2 == 0 ? 0x5140 : 0x7362);  // h = 0, then h = 1
      const uint32_t order = q % 2 == 0 ? (q / 2 == 0 ? 0x5140 : 0x7160) : (q / 2 == 0 ? 0x5342 : 0x7362);
      pairs[q] = __byte_perm(sign_mantissas[q / 2], both, order);
    }
    tile.granules[place(lane * kLaneGranules + b)] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  if (!raw) {
    const uint64_t at = plan.pool_offset + rank;
    auto* bytes = reinterpret_cast<uint8_t*>(&tile) + 1;
    if (plan.pool_offset + plan.escape_end[kSubBlocks - 1] <= message.inline_bytes) {
      const uint8_t* escapes = pool.inlined + at;
      while (escaped != 0) {  // loop: 3.0
        const uint32_t i = __ffs(escaped) - 1;
        escaped &= escaped - 1;
        bytes[place_of_element(lane, i) * 2] = *escapes++;
      }  // loop: end
    } else {  // cold: begin
      for (uint64_t j = at; escaped != 0; j++) {
        const uint32_t i = __ffs(escaped) - 1;
        escaped &= escaped - 1;
        bytes[place_of_element(lane, i) * 2] = pool[j];
      }
    }  // cold: end
  }
  return true;
}

__device__ __forceinline__ uint32_t unrotated(uint32_t pair) { return __funnelshift_r(pair, pair, 1); }

// The values of four neighbouring elements, from 4 q on, of a tile as decode_lanes leaves it.
__device__ __forceinline__ uint2 upper_halves(const Tile& tile, uint32_t q) {
  const uint2 pairs = *(reinterpret_cast<const uint2*>(&tile.granules[place(q / 2)]) + (q & 1));
  return make_uint2(unrotated(pairs.x), unrotated(pairs.y));
}

__device__ __forceinline__ uint4 widen(uint2 upper, uint2 lower) {
  return make_uint4(__byte_perm(lower.x, upper.x, 0x5410), __byte_perm(lower.x, upper.x, 0x7632),
                    __byte_perm(lower.y, upper.y, 0x5410), __byte_perm(lower.y, upper.y, 0x7632));
}

// Writes the first `count` of a tile's values.
template <DType dtype>
__device__ __forceinline__ void empty_tile(const Tile& tile, const uint8_t* low, uint8_t* output, uint32_t count,
                                           uint32_t lane) {
  const bool aligned = count == kSubBlockElements && is_aligned(output, 16);
  if constexpr (dtype == DType::kBFloat16) {
    if (aligned) {
#pragma unroll
      for (uint32_t j = 0; j < kLaneGranules; j++) {
        const uint32_t g = j * kLanes + lane;
        const uint4 pairs = tile.granules[place(g)];
        reinterpret_cast<uint4*>(output)[g] =
            make_uint4(unrotated(pairs.x), unrotated(pairs.y), unrotated(pairs.z), unrotated(pairs.w));
      }
    } else {  // cold: begin
      for (uint32_t i = lane; i < count; i += kLanes) {
        const uint2 four = upper_halves(tile, i / 4);
        const uint32_t pair = i % 4 < 2 ? four.x : four.y;
        reinterpret_cast<uint16_t*>(output)[i] = static_cast<uint16_t>(i % 2 == 0 ? pair : pair >> 16);
      }
    }  // cold: end
  } else {
#pragma unroll
    for (uint32_t j = 0; j < kLaneGranules * 2; j++) {
      const uint32_t q = j * kLanes + lane;
      if (4 * q >= count) break;
      const uint2 lower = low == nullptr ? make_uint2(0, 0) : __ldg(reinterpret_cast<const uint2*>(low) + q);
      const uint4 four = widen(upper_halves(tile, q), lower);
      if (aligned) {
        reinterpret_cast<uint4*>(output)[q] = four;
      } else {  // cold: begin
        const uint32_t bits[4] = {four.x, four.y, four.z, four.w};
        for (uint32_t k = 0; k < 4 && 4 * q + k < count; k++) reinterpret_cast<uint32_t*>(output)[4 * q + k] = bits[k];
      }  // cold: end
    }
  }
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads) decode_chunks(const __grid_constant__ DecodeBatch batch) {
  ZIPCCL_SHARED(DecodeShared, shared);
  const Incoming& message = batch.messages[blockIdx.y];
  const uint64_t chunk = blockIdx.x;
  // A message without chunks has a header to check all the same.
  if (chunk >= chunk_count(message.elements) && chunk != 0) return;
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  Lanes lanes = {};
  if (message.plain == 0 && message.elements != 0) lanes = load_lanes(message, chunk, warp, lane);
  if (threadIdx.x == 0) {  // loop: 0.125
    shared.plan.verdict = make_plan<dtype>(shared.plan, message, batch.first + blockIdx.y, chunk, batch.findings);
  }  // loop: end
  __syncthreads();
  if (message.elements == 0) return;
  const Plan& plan = shared.plan;
  uint8_t* output = static_cast<uint8_t*>(message.output) + chunk * kChunkElements * element_bytes(dtype);
  const uint32_t elements = chunk_elements(message.elements, chunk);
  if (plan.verdict != Verdict::kCoded) {  // cold: begin
    if (plan.verdict != Verdict::kPlainValues) return;
    const uint8_t* values = message.statics + kAlignment + chunk * kChunkElements * element_bytes(dtype);
    const uint32_t bytes = elements * element_bytes(dtype);
    uint32_t done = 0;
    if (is_aligned(output, 16)) {
      for (uint32_t i = threadIdx.x; i < bytes / 16; i += kThreads) {
        reinterpret_cast<uint4*>(output)[i] = reinterpret_cast<const uint4*>(values)[i];
      }
      done = bytes / 16 * 8;
    }
    for (uint32_t i = done + threadIdx.x; i < bytes / 2; i += kThreads) {
      reinterpret_cast<uint16_t*>(output)[i] = reinterpret_cast<const uint16_t*>(values)[i];
    }
    return;
  }  // cold: end
  const uint32_t start = warp * kSubBlockElements;
  Tile& tile = shared.tiles[warp];
  if (!decode_lanes(tile, lanes, plan, message, chunk, warp, lane)) {  // cold: begin
    if (lane == 0) found(batch.findings, Fault::kCodes, batch.first + blockIdx.y, chunk);
    return;
  }  // cold: end
  __syncwarp();
  if (start >= elements) return;
  empty_tile<dtype>(tile, plan.low == nullptr ? nullptr : plan.low + start * 2, output + start * element_bytes(dtype),
                    min(elements - start, kSubBlockElements), lane);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reducing

struct ReduceBatch {
  Incoming messages[kBatch];
  Findings* findings;
  Reducing reducing;
  uint32_t count;
  uint32_t first;  // index of messages[0] among all that are reduced
  uint32_t last;   // whether messages[count - 1] is the last of them
};

__device__ __forceinline__ float reduced(Reduction reduction, float accumulator, float value) {
  switch (reduction) {
    case Reduction::kSum:
      return __fadd_rn(accumulator, value);
    case Reduction::kMin:
      return value < accumulator || value != value ? value : accumulator;
    case Reduction::kMax:
      return value > accumulator || value != value ? value : accumulator;
    default:
      return value;
  }
}

__device__ __forceinline__ uint32_t rounded_to_bfloat16(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Four values from 4 q on of uncoded ones, of which there are `count`.
template <DType dtype>
__device__ __forceinline__ uint4 load_four(const uint8_t* values, uint32_t q, uint32_t count) {
  if (4 * q + 4 <= count && is_aligned(values, 4 * element_bytes(dtype))) {
    if constexpr (dtype == DType::kFloat32) return reinterpret_cast<const uint4*>(values)[q];
    return widen(reinterpret_cast<const uint2*>(values)[q], make_uint2(0, 0));
  }
  uint32_t bits[4] = {};
  for (uint32_t k = 0; k < 4 && 4 * q + k < count; k++) {
    if constexpr (dtype == DType::kFloat32) {
      bits[k] = reinterpret_cast<const uint32_t*>(values)[4 * q + k];
    } else {
      bits[k] = uint32_t{reinterpret_cast<const uint16_t*>(values)[4 * q + k]} << 16;
    }
  }
  return make_uint4(bits[0], bits[1], bits[2], bits[3]);
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads) reduce_chunks(const __grid_constant__ ReduceBatch batch) {
  ZIPCCL_SHARED(DecodeShared, shared);
  constexpr uint32_t kQuads = kLaneGranules * 2;  // of four elements: 32 j + lane is this lane's j-th
  const uint64_t chunk = blockIdx.x;
  const uint32_t warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const Reducing& reducing = batch.reducing;
  const uint32_t elements = chunk_elements(reducing.elements, chunk);
  const uint32_t start = warp * kSubBlockElements;
  const uint32_t count = elements <= start ? 0 : min(elements - start, kSubBlockElements);
  const uint64_t offset = (chunk * kChunkElements + start) * element_bytes(dtype);
  // A message that the launch before could not decode: it has left no accumulators.
  if (batch.first != 0 && (batch.findings->deferred | batch.findings->fault) != 0) return;
  float* spilled = batch.first == 0 && batch.last ? nullptr : reducing.accumulator + chunk * kChunkElements + start;
  Tile& tile = shared.tiles[warp];
  float accumulators[kQuads][4];
  if (batch.first != 0) {  // cold: begin
#pragma unroll
    for (uint32_t j = 0; j < kQuads; j++) {
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        const uint32_t i = 4 * (j * kLanes + lane) + k;
        accumulators[j][k] = i < count ? spilled[i] : 0;
      }
    }
  }  // cold: end
  for (uint32_t m = 0; m < batch.count; m++) {
    const Incoming& message = batch.messages[m];
    const Reduction reduction = batch.first + m == 0 ? Reduction::kStore : reducing.reduction;
    const uint8_t* values = static_cast<const uint8_t*>(message.values) + offset;
    const uint8_t* low = nullptr;
    float scale = message.scale;
    bool coded = false;
    if (message.values == nullptr) {
      Lanes lanes = {};
      if (message.plain == 0) lanes = load_lanes(message, chunk, warp, lane);
      if (threadIdx.x == 0) {  // loop: 0.125
        shared.plan.verdict = make_plan<dtype>(shared.plan, message, batch.first + m, chunk, batch.findings);
      }  // loop: end
      __syncthreads();
      const Plan& plan = shared.plan;
      const Verdict verdict = plan.verdict;
      if (verdict == Verdict::kDeferred || verdict == Verdict::kFaulty) return;
      scale = plan.scale;
      coded = verdict == Verdict::kCoded;
      bool sound = true;
      if (coded) {
        low = plan.low == nullptr ? nullptr : plan.low + start * 2;
        sound = decode_lanes(tile, lanes, plan, message, chunk, warp, lane);
      } else {
        values = message.statics + kAlignment + offset;
      }
      // The next message's plan takes this one's place.
      if (__syncthreads_or(!sound)) {  // cold: begin
        if (!sound && lane == 0) found(batch.findings, Fault::kCodes, batch.first + m, chunk);
        return;
      }  // cold: end
    }
#pragma unroll
    for (uint32_t j = 0; j < kQuads; j++) {
      const uint32_t q = j * kLanes + lane;
      uint4 bits = make_uint4(0, 0, 0, 0);
      if (coded) {
        uint2 lower = make_uint2(0, 0);
        if (low != nullptr && 4 * q < count) lower = __ldg(reinterpret_cast<const uint2*>(low) + q);
        bits = widen(upper_halves(tile, q), lower);
      } else if (4 * q < count) {
        bits = load_four<dtype>(values, q, count);
      }
      const uint32_t four[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        const float value = __fmul_rn(__uint_as_float(four[k]), scale);
        accumulators[j][k] = reduced(reduction, accumulators[j][k], value);
      }
    }
    // Before the next message's decoding takes the tile.
    __syncwarp();
  }
  if (!batch.last) {  // cold: begin
#pragma unroll
    for (uint32_t j = 0; j < kQuads; j++) {
#pragma unroll
      for (uint32_t k = 0; k < 4; k++) {
        const uint32_t i = 4 * (j * kLanes + lane) + k;
        if (i < count) spilled[i] = accumulators[j][k];
      }
    }
    return;
  }  // cold: end
  // A power of two divides as its inverse multiplies.
  const float divisor = reducing.divisor;
  const bool power = (__float_as_uint(divisor) & 0x007fffff) == 0;
  const float inverse = __fdiv_rn(1.0f, divisor);
  uint8_t* output = static_cast<uint8_t*>(reducing.output) + offset;
  const bool aligned = is_aligned(output, 4 * element_bytes(dtype));
#pragma unroll
  for (uint32_t j = 0; j < kQuads; j++) {
    const uint32_t q = j * kLanes + lane;
    if (4 * q >= count) break;
    uint32_t bits[4];
#pragma unroll
    for (uint32_t k = 0; k < 4; k++) {
      const float accumulator = accumulators[j][k];
      const float quotient = power ? __fmul_rn(accumulator, inverse) : __fdiv_rn(accumulator, divisor);
      bits[k] = dtype == DType::kFloat32 ? __float_as_uint(quotient) : rounded_to_bfloat16(quotient);
    }
    if (aligned && 4 * q + 4 <= count) {
      if constexpr (dtype == DType::kFloat32) {
        reinterpret_cast<uint4*>(output)[q] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
      } else {
        reinterpret_cast<uint2*>(output)[q] = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
      }
    } else {  // cold: begin
      for (uint32_t k = 0; k < 4 && 4 * q + k < count; k++) {
        if constexpr (dtype == DType::kFloat32) {
          reinterpret_cast<uint32_t*>(output)[4 * q + k] = bits[k];
        } else {
          reinterpret_cast<uint16_t*>(output)[4 * q + k] = static_cast<uint16_t>(bits[k]);
        }
      }
    }  // cold: end
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Around them

struct SumBatch {
  Incoming messages[kBatch];
  uint64_t* sums;
};

// The sum of a message's 64-bit words, the header's checksum taken as zero. Blocks (x, message).
template <DType dtype>
__global__ void __launch_bounds__(kThreads) sum_words(const __grid_constant__ SumBatch batch) {
  const Incoming& message = batch.messages[blockIdx.y];
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
    const Pool<const uint8_t> pool = {message.statics + pool_offset(message.elements), message.inline_bytes,
                                      message.pool};
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
