// Small kernels with bugs to order, for test_simt.py: does the emulator run the right ones and catch the others?
#pragma once

#include "simt.h"

namespace selftest {

enum class Bug : int {
  kNone,
  kNoBarrierBeforeRead,
  kNoBarrierBeforeWrite,
  kNoWarpSync,
  kNoCopyWait,
  kNoBarrierAfterCopy,
  kTailOverRead,
  kSharedIndex,
  kMisalignedStore,
  kStoreBehindEnd,
  kDivergentBallot,
  kMaskWithoutCaller,
  kBarrierDivergence,
  kDeadlock,
  kFlagNeverSet,
  kEarlyFlag,
  kNoFence,
  kPlainCounter,
  kCopyInFlight,
  kTooLittleShared,
  kOverlappingMasks,
  kVoteForSync,
};

constexpr unsigned kThreads = 96, kWarps = kThreads / 32, kPerThread = 8, kTile = kThreads * kPerThread;
constexpr unsigned kFull = 0xffffffffu;

struct RotateShared {
  unsigned values[kThreads];
};

// Two rounds in which each thread reads what another one wrote.
__global__ void __launch_bounds__(kThreads) rotate(unsigned* __restrict__ out, Bug bug) {
  ZIPCCL_SHARED(RotateShared, shared);
  const unsigned t = threadIdx.x;
  unsigned sum = 0;
#pragma unroll
  for (unsigned round = 0; round < 2; ++round) {
    unsigned* slot = &shared.values[t];
    if (bug == Bug::kSharedIndex && t == kThreads - 1) ++slot;
    *slot = 1000 * round + t + blockIdx.x;
    if (bug != Bug::kNoBarrierBeforeRead) __syncthreads();
    sum += shared.values[(t + 33) % kThreads];
    if (bug != Bug::kNoBarrierBeforeWrite) __syncthreads();
  }
  out[blockIdx.x * kThreads + t] = sum;
}

// Lanes of a warp talk through shared memory.
__global__ void rotate_warp(unsigned* out, Bug bug) {
  ZIPCCL_SHARED(RotateShared, shared);
  const unsigned t = threadIdx.x, first = t & ~31u;
  shared.values[t] = 3 * t;
  if (bug == Bug::kVoteForSync) {
    __any_sync(kFull, 1);
  } else if (bug != Bug::kNoWarpSync) {
    __syncwarp();
  }
  out[t] = shared.values[first + (t + 1) % 32];
}

struct PipelineShared {
  uint4 tiles[2][kThreads];
};

__device__ __forceinline__ void stage(uint4* to, const uint16_t* in, size_t n, size_t tile, Bug bug) {
  const size_t first = tile * kTile + size_t(threadIdx.x) * kPerThread;
  if (first >= n) return;
  const size_t bytes = (n - first) * sizeof(uint16_t);
  const size_t zero_fill = bytes >= 16 || bug == Bug::kTailOverRead ? 0 : 16 - bytes;
  __pipeline_memcpy_async(to + threadIdx.x, in + first, 16, zero_fill);
}

// Copies by way of two tiles in shared memory; each thread takes elements that others have staged.
template <bool kInvert>
__global__ void __launch_bounds__(kThreads)
    pipeline(const uint16_t* __restrict__ in, size_t n, uint16_t* __restrict__ out, Bug bug) {
  ZIPCCL_SHARED(PipelineShared, shared);
  const size_t tiles = (n + kTile - 1) / kTile;
  size_t tile = blockIdx.x;
  int which = 0;
  if (tile < tiles) stage(shared.tiles[0], in, n, tile, bug);
  __pipeline_commit();
  for (; tile < tiles; tile += gridDim.x, which ^= 1) {
    if (tile + gridDim.x < tiles) stage(shared.tiles[which ^ 1], in, n, tile + gridDim.x, bug);
    __pipeline_commit();
    if (bug != Bug::kNoCopyWait) __pipeline_wait_prior(1);
    if (bug != Bug::kNoBarrierAfterCopy) __syncthreads();
    const uint16_t* staged = reinterpret_cast<const uint16_t*>(shared.tiles[which]);
    for (unsigned i = threadIdx.x; i < kTile && tile * kTile + i < n; i += kThreads) {
      const uint16_t value = staged[i];
      out[tile * kTile + i] = uint16_t(kInvert ? ~value : value);
    }
    __syncthreads();
  }
  if (bug != Bug::kCopyInFlight) __pipeline_wait_prior(0);
}

__global__ void leave_copy(const uint16_t* in) {
  ZIPCCL_SHARED(PipelineShared, shared);
  __pipeline_memcpy_async(shared.tiles[0] + threadIdx.x, in + threadIdx.x * 8, 16);
  __pipeline_commit();
}

__global__ void fill(uint16_t* out, size_t n, Bug bug) {
  const size_t first = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  const uint4 value = make_uint4(0x00010001u, 0x00010001u, 0x00010001u, 0x00010001u);
  if (first + 8 <= n || (first < n && bug == Bug::kStoreBehindEnd)) {
    uint16_t* to = out + first;
    if (bug == Bug::kMisalignedStore && first + 9 <= n) ++to;
    *reinterpret_cast<uint4*>(to) = value;
  } else {
    for (size_t i = first; i < n; ++i) out[i] = 1;
  }
}

__global__ void vote(unsigned* out, Bug bug) {
  const unsigned lane = threadIdx.x % 32;
  unsigned votes = 0;
  if (bug == Bug::kDivergentBallot) {
    if (lane % 3 == 0) votes = __ballot_sync(kFull, lane % 6 == 0);
    votes += __popc(__ballot_sync(kFull, 1)) - 32;
  } else if (bug == Bug::kMaskWithoutCaller) {
    votes = __ballot_sync(0x0000ffffu, lane % 6 == 0);
  } else if (bug == Bug::kOverlappingMasks) {
    votes = __ballot_sync(lane < 16 ? kFull : 0xffff0000u, lane % 6 == 0);
  } else {
    votes = __ballot_sync(kFull, lane % 3 == 0 && lane % 6 == 0);
  }
  if (bug == Bug::kBarrierDivergence) {
    if (threadIdx.x < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  } else if (bug != Bug::kDeadlock || threadIdx.x != 40) {
    __syncthreads();
  } else {
    __syncwarp();  // for lanes that are at the barrier
  }
  out[threadIdx.x] = votes;
}

struct Mail {
  unsigned data[kThreads], flag;
};

// Block 0 publishes, block 1 waits for it; the grid must fit on the device at once.
__global__ void publish(Mail* mail, unsigned* out, Bug bug) {
  const unsigned t = threadIdx.x;
  if (blockIdx.x == 0) {
    if (bug == Bug::kEarlyFlag && t == 0) atomicExch(&mail->flag, 1);
    __stcg(&mail->data[t], 7 * t);
    __syncthreads();
    if (bug != Bug::kNoFence) __threadfence();
    if (t == 0 && bug != Bug::kFlagNeverSet) atomicExch(&mail->flag, 1);
  } else {
    if (t == 0) {
      while (atomicAdd(&mail->flag, 0) == 0) __nanosleep(100);
      __threadfence();
    }
    __syncthreads();
    out[t] = __ldcg(&mail->data[t]);
  }
}

// Like `publish`, by a volatile flag, a store and a fence of each thread, and from block to block.
__global__ void chain(Mail* mail, unsigned* sum) {
  const unsigned t = threadIdx.x, block = blockIdx.x;
  unsigned before = 0;
  if (block > 0) {
    if (t == 0) {
      while (*const_cast<volatile unsigned*>(&mail[block - 1].flag) == 0) __nanosleep(20);
      __threadfence();
    }
    __syncthreads();
    before = mail[block - 1].data[t];
  }
  mail[block].data[t] = before + block + t;
  __syncthreads();
  if (t == 0) {
    __threadfence();
    *const_cast<volatile unsigned*>(&mail[block].flag) = 1;
  }
  if (block == gridDim.x - 1) sum[t] = mail[block].data[t];
}

__global__ void count(unsigned* counter, Bug bug) {
  const unsigned mine = __reduce_add_sync(kFull, 1u);
  if (threadIdx.x % 32 != 0) return;
  if (bug == Bug::kPlainCounter) {
    *counter += mine;
  } else {
    atomicAdd(counter, mine);
  }
}

struct Parameters {
  unsigned values[1000];
};

__global__ void sum_parameters(const __grid_constant__ Parameters parameters, unsigned* out) {
  unsigned sum = 0;
  for (unsigned i = threadIdx.x; i < 1000; i += blockDim.x) sum += parameters.values[i];
  atomicAdd(out, __reduce_add_sync(kFull, sum) * (threadIdx.x % 32 == 0));
}

__global__ void add(unsigned* data, size_t n, unsigned value) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) data[i] += value;
}

// Waits for another kernel, of another stream, or for the host.
__global__ void wait_flag(unsigned* flag) {
  while (atomicAdd_system(flag, 0) == 0) __nanosleep(100);
}
__global__ void set_flag(unsigned* flag) { atomicExch_system(flag, 1); }

#define SELFTEST_EXPECT(condition) \
  if (!(condition)) atomicMin(failed_line, __LINE__)

// Every primitive against its meaning; reports the first line that is wrong.
__global__ void primitives(int* failed_line) {
  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z), lane = t % 32;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  SELFTEST_EXPECT(gridDim.x == 2 && gridDim.y == 3 && gridDim.z == 1 && blockIdx.x < 2 && blockIdx.y < 3);
  SELFTEST_EXPECT(__syncthreads_count(t % 5 == 0) == int((threads + 4) / 5));
  SELFTEST_EXPECT(__syncthreads_or(t == 7) && !__syncthreads_or(0));
  SELFTEST_EXPECT(__syncthreads_and(1) && !__syncthreads_and(t != 7));

  SELFTEST_EXPECT(__ballot_sync(kFull, lane % 2) == 0xaaaaaaaau);
  SELFTEST_EXPECT(__any_sync(kFull, lane == 3) && !__any_sync(kFull, 0));
  SELFTEST_EXPECT(__all_sync(kFull, 1) && !__all_sync(kFull, lane != 3));
  SELFTEST_EXPECT(__shfl_sync(kFull, lane * 2, 5) == 10 && __shfl_sync(kFull, int(lane), 35) == 3);
  SELFTEST_EXPECT(__shfl_sync(kFull, lane, 1, 8) == (lane & ~7u) + 1);
  SELFTEST_EXPECT(__shfl_up_sync(kFull, float(lane), 3) == float(lane < 3 ? lane : lane - 3));
  SELFTEST_EXPECT(__shfl_up_sync(kFull, lane, 3, 8) == (lane % 8 < 3 ? lane : lane - 3));
  SELFTEST_EXPECT(__shfl_down_sync(kFull, uint64_t(lane) << 40, 3) == uint64_t(lane > 28 ? lane : lane + 3) << 40);
  SELFTEST_EXPECT(__shfl_down_sync(kFull, lane, 9, 16) == (lane % 16 > 6 ? lane : lane + 9));
  SELFTEST_EXPECT(__shfl_xor_sync(kFull, -int(lane), 5) == -int(lane ^ 5));
  SELFTEST_EXPECT(__shfl_xor_sync(kFull, lane, 8, 8) == (lane >= 8 ? (lane ^ 8) < (lane | 7) ? lane ^ 8 : lane : lane));
  SELFTEST_EXPECT(__reduce_add_sync(kFull, lane) == 496 && __reduce_add_sync(kFull, -1) == -32);
  SELFTEST_EXPECT(__reduce_min_sync(kFull, int(lane) - 5) == -5 && __reduce_min_sync(kFull, lane - 5) == 0u);
  SELFTEST_EXPECT(__reduce_max_sync(kFull, int(lane) - 5) == 26 && __reduce_max_sync(kFull, lane - 5) == ~0u);
  SELFTEST_EXPECT(__reduce_or_sync(kFull, 1u << lane) == ~0u && __reduce_and_sync(kFull, ~(1u << lane)) == 0u);
  SELFTEST_EXPECT(__reduce_xor_sync(kFull, lane) == 0u);
  SELFTEST_EXPECT(__match_any_sync(kFull, lane / 8) == 0xffu << (lane & 24));
  if (lane < 8) {
    SELFTEST_EXPECT(__ballot_sync(0xff, 1) == 0xff);
  } else {
    SELFTEST_EXPECT(__reduce_add_sync(0xffffff00u, 1u) == 24);
  }
  __syncwarp();

  SELFTEST_EXPECT(__byte_perm(0x33221100u, 0x77665544u, 0x7250) == 0x77225500u);
  SELFTEST_EXPECT(__byte_perm(0x80221100u, 0x77665544u, 0xfb3b) == 0x00ff80ffu);
  SELFTEST_EXPECT(__funnelshift_l(0x80000001u, 2, 1) == 5 && __funnelshift_l(9, 7, 32) == 7);
  SELFTEST_EXPECT(__funnelshift_r(0x80000001u, 2, 1) == 0x40000000u && __funnelshift_r(0, 3, 33) == 0x80000000u);
  SELFTEST_EXPECT(__popc(0xf0f) == 8 && __popcll(~0ull) == 64 && __ffs(0) == 0 && __ffs(8) == 4);
  SELFTEST_EXPECT(__clz(0) == 32 && __clz(1) == 31 && __clz(-1) == 0 && __brev(0x80000001u) == 0x80000001u);
  SELFTEST_EXPECT(__brev(0x12345678u) == 0x1e6a2c48u && __umulhi(0x80000000u, 6) == 3);
  SELFTEST_EXPECT(__viaddmin_u16x2(0x0001fffeu, 0x00020001u, 0x00020003u) == 0x00020003u);
  SELFTEST_EXPECT(__vminu2(0x00050001u, 0x00040002u) == 0x00040001u);
  SELFTEST_EXPECT(__vcmpeq2(0x1234aba5u, 0x1234aba6u) == 0xffff0000u);
  SELFTEST_EXPECT(__vcmpeq4(0x1234aba5u, 0x1234aba6u) == 0xffffff00u);
  SELFTEST_EXPECT(__vsub4(0x00010203u, 0x01010101u) == 0xff000102u && __vadd4(0xff0102feu, 0x01010103u) == 0x00020301u);
  SELFTEST_EXPECT(__vminu4(0x80017f05u, 0x01020304u) == 0x01010304u);
  SELFTEST_EXPECT(min(-1, 3) == -1 && min(-1, 3u) == 3u && max(2.0f, 1.0f) == 2.0f && max(size_t(7), size_t(9)) == 9);
  SELFTEST_EXPECT(__fadd_rn(__fmul_rn(3, 4), __fsub_rn(1, 2)) == 11 && __fdiv_rn(1, 4) == 0.25f);
  SELFTEST_EXPECT(__float_as_uint(1.0f) == 0x3f800000u && __uint_as_float(0x40000000u) == 2 && __int_as_float(0) == 0);

  ZIPCCL_SHARED(RotateShared, shared);
  if (t < 16) shared.values[t] = t < 8 ? 100 : 0;
  __syncthreads();
  unsigned* v = shared.values;
  atomicAdd(v + 0, 2);
  atomicMax(v + 1, t + 90);
  atomicMin(v + 2, t + 50);
  atomicOr(v + 8, 1u << lane);
  atomicAnd(v + 3, ~4u);
  if (t == 5) atomicExch(v + 4, 17);
  if (atomicCAS(v + 5, 100, 101) == 100) atomicAdd(v + 9, 1);
  atomicAdd(reinterpret_cast<float*>(v + 10), 0.5f);
  atomicAdd(reinterpret_cast<unsigned long long*>(v + 12), 1ull << 33);
  __syncthreads();
  SELFTEST_EXPECT(v[0] == 100 + 2 * threads && v[1] == max(100, threads + 89) && v[2] == 50 && v[8] == ~0u);
  SELFTEST_EXPECT(v[3] == 96 && v[4] == 17 && v[5] == 101 && v[9] == 1);
  SELFTEST_EXPECT(__uint_as_float(v[10]) == 0.5f * float(threads) && v[13] == 2 * threads);
  const uint4 four = __ldg(reinterpret_cast<const uint4*>(v));
  SELFTEST_EXPECT(four.w == 96 && __ldcs(v + 4) == 17u && __ldcg(v + 5) == 101u);
}

}  // namespace selftest
