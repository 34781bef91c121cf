// What CUDA kernels include instead of nvcc's built-ins when a host compiler builds them, for tests without a GPU.
// Every CUDA thread runs as a fiber; simt.cpp schedules them and says what a kernel does wrong, with file and line.
//
// A thread gives way only where it waits, in __nanosleep and now and then in atomics: a loop that polls by plain or
// volatile loads needs __nanosleep. Not emulated: inline PTX, mbarriers, clusters, weak memory, time.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
// A static variable would be one for all blocks, and out of the sanitizers' sight.
#define __shared__ _Pragma("GCC error \"use ZIPCCL_SHARED: only dynamic shared memory is emulated\"")
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))

// Where the kernel calls an intrinsic; last parameters of each one that can wait or fail.
#define SIMT_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace simt {

struct ThreadContext {
  uint3 thread_index, block_index;
  dim3 block_dim, grid_dim;
  unsigned linear, lane, warp;
};

// Of the thread that runs now; null outside of kernels.
extern __thread ThreadContext* context;

// Global memory in which the race build looks for races, byte by byte. Memory from cudaMalloc is tracked already.
void track(const void* data, size_t bytes, const char* name);
void untrack(const void* data);

enum class Collective { kSync, kBallot, kShuffle, kAdd, kMin, kMax, kAnd, kOr, kXor, kMatch };
enum class Reduction { kNone, kCount, kOr, kAnd };

void* shared_memory(size_t bytes, size_t alignment, SIMT_HERE);
int barrier(Reduction reduction, bool predicate, const char* file, int line);
uint64_t collective(Collective op, unsigned mask, uint64_t value, unsigned source_lane, const char* file, int line);
void spin(const char* file, int line);
void fence();
// Before an atomic access by `code`: tells the race detector, and may let other threads run first.
void before_atomic(const void* address, size_t bytes, void* code);
void async_copy(void* to, const void* from, size_t bytes, size_t zero_fill, const char* file, int line);
void async_commit();
void async_wait(size_t prior);

// Enqueues; runs when the emulated device gets to it (runtime.cpp).
void launch(const void* function, const char* name, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            std::function<void()> body);

template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), const char* name, dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "kernel parameters are copied as bytes");
  static_assert((size_t(0) + ... + sizeof(Parameters)) <= 4096, "kernel parameters take up to 4 KiB");
  std::tuple<std::remove_const_t<Parameters>...> copy(static_cast<Parameters>(std::forward<Arguments>(arguments))...);
  launch(reinterpret_cast<const void*>(kernel), name, grid, block, shared_bytes, stream,
         [kernel, copy] { std::apply(kernel, copy); });
}

template <class T>
struct Identity {
  using type = T;
};
template <class T>
using Same = typename Identity<T>::type;  // a parameter that takes no part in deduction

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
inline uint64_t widen(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warp collectives exchange 4 or 8 bytes");
  uint64_t wide = 0;
  std::memcpy(&wide, &value, sizeof value);
  return wide;
}

template <class T>
inline T narrow(uint64_t wide) {
  T value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

template <class T>
inline auto shuffle(unsigned mask, T value, unsigned source, const char* file, int line) {
  using Promoted = decltype(+value);
  return narrow<Promoted>(collective(Collective::kShuffle, mask, widen<Promoted>(value), source, file, line));
}

// Signed numbers compare like unsigned ones with the sign bit flipped.
template <class T>
inline T reduce_order(Collective op, unsigned mask, T value, const char* file, int line) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>);
  const unsigned flip = std::is_signed_v<T> ? 0x80000000u : 0;
  return static_cast<T>(unsigned(collective(op, mask, unsigned(value) ^ flip, 0, file, line)) ^ flip);
}

// Not instrumented: the detector hears of atomic accesses from before_atomic alone.
template <class T, class Change>
__attribute__((no_sanitize("thread"), noinline)) T atomic_update(T* address, Change change) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long> ||
                    std::is_same_v<T, float> || std::is_same_v<T, double>,
                "CUDA has no atomics for this type");
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  before_atomic(address, sizeof(T), __builtin_return_address(0));
  Word* word = reinterpret_cast<Word*>(address);
  Word old = __atomic_load_n(word, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(word, &old, bits<Word>(static_cast<T>(change(bits<T>(old)))), false,
                                      __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return bits<T>(old);
}

template <class Lane, class Result>
inline unsigned per_lane(unsigned a, unsigned b, Result result) {
  unsigned out = 0;
  for (unsigned shift = 0; shift < 32; shift += 8 * sizeof(Lane)) {
    out |= unsigned(Lane(result(Lane(a >> shift), Lane(b >> shift)))) << shift;
  }
  return out;
}

}  // namespace simt

#define threadIdx (simt::context->thread_index)
#define blockIdx (simt::context->block_index)
#define blockDim (simt::context->block_dim)
#define gridDim (simt::context->grid_dim)
#define warpSize 32

#define ZIPCCL_SHARED(Type, name) \
  simt::Same<Type>& name = *static_cast<simt::Same<Type>*>(simt::shared_memory(sizeof(Type), alignof(Type)))
#define ZIPCCL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  simt::launch_kernel(kernel, #kernel, (grid), (block), (shared_bytes), (stream), ##__VA_ARGS__)

// Barriers and fences.
inline void __syncthreads(SIMT_HERE) { simt::barrier(simt::Reduction::kNone, false, file, line); }
inline int __syncthreads_count(int predicate, SIMT_HERE) {
  return simt::barrier(simt::Reduction::kCount, predicate != 0, file, line);
}
inline int __syncthreads_or(int predicate, SIMT_HERE) {
  return simt::barrier(simt::Reduction::kOr, predicate != 0, file, line);
}
inline int __syncthreads_and(int predicate, SIMT_HERE) {
  return simt::barrier(simt::Reduction::kAnd, predicate != 0, file, line);
}
inline void __syncwarp(unsigned mask = ~0u, SIMT_HERE) {
  simt::collective(simt::Collective::kSync, mask, 0, 0, file, line);
}
inline void __threadfence_block() { simt::fence(); }
inline void __threadfence() { simt::fence(); }
inline void __threadfence_system() { simt::fence(); }
inline void __nanosleep(unsigned, SIMT_HERE) { simt::spin(file, line); }

// Warp votes, shuffles, reductions and matches.
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_HERE) {
  return unsigned(simt::collective(simt::Collective::kBallot, mask, predicate != 0, 0, file, line));
}
inline int __any_sync(unsigned mask, int predicate, SIMT_HERE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIMT_HERE) {
  return __ballot_sync(mask, !predicate, file, line) == 0;
}

template <class T>
inline auto __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_HERE) {
  const unsigned first = simt::context->lane & ~unsigned(width - 1);
  return simt::shuffle(mask, value, first | (unsigned(source) & unsigned(width - 1)), file, line);
}
template <class T>
inline auto __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_HERE) {
  const unsigned lane = simt::context->lane, in_segment = lane & unsigned(width - 1);
  return simt::shuffle(mask, value, delta > in_segment ? lane : lane - delta, file, line);
}
template <class T>
inline auto __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_HERE) {
  const unsigned lane = simt::context->lane, last = lane | unsigned(width - 1);
  return simt::shuffle(mask, value, delta > last - lane ? lane : lane + delta, file, line);
}
template <class T>
inline auto __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, SIMT_HERE) {
  const unsigned lane = simt::context->lane, source = lane ^ unsigned(lane_mask);
  return simt::shuffle(mask, value, source > (lane | unsigned(width - 1)) ? lane : source, file, line);
}

template <class T>
inline T __reduce_add_sync(unsigned mask, T value, SIMT_HERE) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>);
  return T(simt::collective(simt::Collective::kAdd, mask, unsigned(value), 0, file, line));
}
template <class T>
inline T __reduce_min_sync(unsigned mask, T value, SIMT_HERE) {
  return simt::reduce_order(simt::Collective::kMin, mask, value, file, line);
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T value, SIMT_HERE) {
  return simt::reduce_order(simt::Collective::kMax, mask, value, file, line);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, SIMT_HERE) {
  return unsigned(simt::collective(simt::Collective::kAnd, mask, value, 0, file, line));
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, SIMT_HERE) {
  return unsigned(simt::collective(simt::Collective::kOr, mask, value, 0, file, line));
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value, SIMT_HERE) {
  return unsigned(simt::collective(simt::Collective::kXor, mask, value, 0, file, line));
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, SIMT_HERE) {
  return unsigned(simt::collective(simt::Collective::kMatch, mask, simt::widen(value), 0, file, line));
}

// Atomics. Same<T>: atomicAdd(unsigned*, 1) is fine in CUDA.
#define SIMT_ATOMIC(name, expression)                                              \
  template <class T>                                                               \
  inline T name(T* address, simt::Same<T> value) {                                 \
    return simt::atomic_update(address, [value](T old) { return T(expression); }); \
  }                                                                                \
  template <class T>                                                               \
  inline T name##_system(T* address, simt::Same<T> value) {                        \
    return name(address, value);                                                   \
  }                                                                                \
  template <class T>                                                               \
  inline T name##_block(T* address, simt::Same<T> value) {                         \
    return name(address, value);                                                   \
  }
SIMT_ATOMIC(atomicAdd, old + value)
SIMT_ATOMIC(atomicSub, old - value)
SIMT_ATOMIC(atomicMax, old > value ? old : value)
SIMT_ATOMIC(atomicMin, old < value ? old : value)
SIMT_ATOMIC(atomicOr, old | value)
SIMT_ATOMIC(atomicAnd, old& value)
SIMT_ATOMIC(atomicXor, old ^ value)
SIMT_ATOMIC(atomicExch, ((void)old, value))
#undef SIMT_ATOMIC
template <class T>
inline T atomicCAS(T* address, simt::Same<T> compare, simt::Same<T> value) {
  return simt::atomic_update(address, [=](T old) { return old == compare ? value : old; });
}
template <class T>
inline T atomicCAS_system(T* address, simt::Same<T> compare, simt::Same<T> value) {
  return atomicCAS(address, compare, value);
}

// Asynchronous copies to shared memory, from <cuda_pipeline_primitives.h>.
__forceinline__ void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zero_fill = 0,
                                             SIMT_HERE) {
  if (zero_fill < bytes) {
    // The copy may happen much later: a source out of bounds must be reported here, in the kernel.
    const char* source = static_cast<const char*>(from);
    asm volatile("" ::"r"(source[0]), "r"(source[bytes - zero_fill - 1]));
  }
  simt::async_copy(to, from, bytes, zero_fill, file, line);
}
inline void __pipeline_commit() { simt::async_commit(); }
inline void __pipeline_wait_prior(size_t prior) { simt::async_wait(prior); }

// Loads and stores with cache hints.
#define SIMT_LOAD(name)                      \
  template <class T>                         \
  __forceinline__ T name(const T* address) { \
    return *address;                         \
  }
#define SIMT_STORE(name)                                       \
  template <class T>                                           \
  __forceinline__ void name(T* address, simt::Same<T> value) { \
    *address = value;                                          \
  }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldlu)
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
SIMT_STORE(__stwb)
SIMT_STORE(__stwt)
#undef SIMT_LOAD
#undef SIMT_STORE

// Integer intrinsics.
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned __brev(unsigned x) {
  x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
  x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
  x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(x);
}
// PTX prmt: bits 0-2 of each selector choose a byte, bit 3 takes eight copies of its sign instead.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  unsigned out = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned select = selector >> 4 * i;
    unsigned byte = unsigned(bytes >> 8 * (select & 7)) & 0xff;
    if (select & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= byte << 8 * i;
  }
  return out;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}

// Integers side by side in one word.
#define SIMT_LANES(name, Lane, expression)                                                           \
  inline unsigned name(unsigned a, unsigned b) {                                                     \
    return simt::per_lane<Lane>(a, b, [](Lane x, Lane y) { return static_cast<Lane>(expression); }); \
  }
SIMT_LANES(__vadd2, uint16_t, x + y)
SIMT_LANES(__vadd4, uint8_t, x + y)
SIMT_LANES(__vsub2, uint16_t, x - y)
SIMT_LANES(__vsub4, uint8_t, x - y)
SIMT_LANES(__vminu2, uint16_t, x < y ? x : y)
SIMT_LANES(__vminu4, uint8_t, x < y ? x : y)
SIMT_LANES(__vmaxu2, uint16_t, x > y ? x : y)
SIMT_LANES(__vmaxu4, uint8_t, x > y ? x : y)
SIMT_LANES(__vcmpeq2, uint16_t, x == y ? 0xffff : 0)
SIMT_LANES(__vcmpeq4, uint8_t, x == y ? 0xff : 0)
SIMT_LANES(__vcmpgeu2, uint16_t, x >= y ? 0xffff : 0)
SIMT_LANES(__vcmpgeu4, uint8_t, x >= y ? 0xff : 0)
SIMT_LANES(__vcmpgtu2, uint16_t, x > y ? 0xffff : 0)
SIMT_LANES(__vcmpgtu4, uint8_t, x > y ? 0xff : 0)
SIMT_LANES(__vcmpltu2, uint16_t, x < y ? 0xffff : 0)
SIMT_LANES(__vcmpltu4, uint8_t, x < y ? 0xff : 0)
#undef SIMT_LANES
inline unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned c) { return __vminu2(__vadd2(a, b), c); }
inline unsigned __viaddmax_u16x2(unsigned a, unsigned b, unsigned c) { return __vmaxu2(__vadd2(a, b), c); }

// Floats. emulator.py turns contraction off, so a product stays a product.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __uint_as_float(unsigned x) { return simt::bits<float>(x); }
inline float __int_as_float(int x) { return simt::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return simt::bits<unsigned>(x); }
inline int __float_as_int(float x) { return simt::bits<int>(x); }

template <class A, class B>
constexpr std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
constexpr std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>, std::common_type_t<A, B>> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  return T(a) > T(b) ? T(a) : T(b);
}
