// The coder for AVX2. Nothing here needs compiler flags: the target is set below, after the standard headers, so that
// no inline function of theirs is compiled for a processor that the program may not run on.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "coder.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,popcnt,prfchw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC optimize("O3,fp-contract=off")
#pragma GCC target("avx2,bmi,popcnt,prfchw")
#endif

#include "elementwise.h"

namespace zipccl {
namespace {

constexpr uint32_t kGroup = 64;        // elements that share one 64-bit word of each plane
constexpr uint32_t kWriteAhead = 512;  // bytes between a store and the prefetch of its successor
constexpr uint32_t kReadAhead = 1024;
constexpr uint32_t kPlaneBytes = kSubBlockElements / 8;

// 16 bytes of two places as the two lanes of one register: pack and unpack then keep the order of the elements.
inline __m256i load_lanes(const void* low, const void* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(low))),
                                 _mm_loadu_si128(static_cast<const __m128i*>(high)), 1);
}

template <bool streaming>
inline void store_half(uint16_t* at, __m128i half) {
  if (streaming) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(at), half);
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), half);
  }
}

// 7 - code of 32 exponents, where 7 stands for an escape. `lowest` is the seventh exponent of the window.
template <Mode mode>
inline __m256i complement_of_codes(__m256i exponents, __m256i lowest) {
  const __m256i seven = _mm256_set1_epi8(7);
  const __m256i codes = _mm256_min_epu8(_mm256_sub_epi8(exponents, lowest), seven);
  if (mode == Mode::kWindow) return codes;
  // The seventh exponent gives up its code, and 0 takes it unless it is itself one of the six.
  const __m256i zero = _mm256_setzero_si256();
  const __m256i seventh = _mm256_cmpeq_epi8(codes, zero);
  const __m256i outside = _mm256_or_si256(seventh, _mm256_cmpeq_epi8(codes, seven));
  const __m256i escaped_or_zero = _mm256_andnot_si256(_mm256_cmpeq_epi8(exponents, zero), seven);
  return _mm256_blendv_epi8(codes, escaped_or_zero, outside);
}

// The bytes of `exponents` that `escaped` selects, appended to `escape`. Four steps run unconditionally, as few words
// have more, which keeps the branch predictable; they read at most index 64 and write 4 bytes too many.
inline uint8_t* append_escapes(const uint8_t* exponents, uint64_t escaped, uint8_t* escape) {
  const int count = static_cast<int>(_mm_popcnt_u64(escaped));
  for (int k = 0; k < 4; k++) {
    escape[k] = exponents[_tzcnt_u64(escaped)];
    escaped = _blsr_u64(escaped);
  }
  for (int k = 4; k < count; k++) {
    escape[k] = exponents[_tzcnt_u64(escaped)];
    escaped = _blsr_u64(escaped);
  }
  return escape + count;
}

// The inverse; writes exponents[64], which the next group overwrites.
inline const uint8_t* patch_escapes(uint8_t* exponents, uint64_t escaped, const uint8_t* escape) {
  const int count = static_cast<int>(_mm_popcnt_u64(escaped));
  for (int k = 0; k < 4; k++) {
    exponents[_tzcnt_u64(escaped)] = escape[k];
    escaped = _blsr_u64(escaped);
  }
  for (int k = 4; k < count; k++) {
    exponents[_tzcnt_u64(escaped)] = escape[k];
    escaped = _blsr_u64(escaped);
  }
  return escape + count;
}

template <Mode mode, bool streaming>
void encode_mode(const uint16_t* values, uint32_t elements, uint8_t top, uint8_t* body, uint8_t* escapes,
                 uint16_t* escape_end) {
  const __m256i lowest = _mm256_set1_epi8(static_cast<char>(top - 6));
  // Within a lane: even bytes (sign-mantissas) to the lower half, odd bytes (exponents) to the upper half.
  const __m256i halves = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,  //
                                          0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  alignas(32) uint8_t exponents[kGroup + 32] = {};
  alignas(32) uint8_t gathered[kPlanes][kPlaneBytes];  // streaming: whole cache lines of planes
  uint8_t* escape = escapes;
  for (uint32_t start = 0; start < elements; start += kSubBlockElements) {
    uint8_t* plane[kPlanes];
    for (uint32_t p = 0; p < kPlanes; p++) {
      plane[p] = streaming ? gathered[p] : body + elements + (p * elements + start) / 8;
      if (!streaming) {
        __builtin_prefetch(plane[p] + kPlaneBytes, 1);
        __builtin_prefetch(plane[p] + kPlaneBytes + 64, 1);
      }
    }
    for (uint32_t i = 0; i < kSubBlockElements; i += kGroup) {
      const uint16_t* group = values + start + i;
      uint8_t* sign_mantissas = body + start + i;
      if (streaming) {
        __builtin_prefetch(reinterpret_cast<const uint8_t*>(group) + kReadAhead);
        __builtin_prefetch(reinterpret_cast<const uint8_t*>(group) + kReadAhead + 64);
      } else {
        __builtin_prefetch(sign_mantissas + kWriteAhead, 1);
      }
      uint64_t words[kPlanes] = {};
      for (uint32_t half = 0; half < 2; half++) {
        const uint16_t* x = group + 32 * half;
        __m256i a = load_lanes(x, x + 16);
        __m256i b = load_lanes(x + 8, x + 24);
        a = _mm256_or_si256(_mm256_add_epi32(a, a), _mm256_srli_epi32(a, 31));
        b = _mm256_or_si256(_mm256_add_epi32(b, b), _mm256_srli_epi32(b, 31));
        a = _mm256_shuffle_epi8(a, halves);
        b = _mm256_shuffle_epi8(b, halves);
        const __m256i s = _mm256_unpacklo_epi64(a, b);
        const __m256i e = _mm256_unpackhi_epi64(a, b);
        __m256i* s_at = reinterpret_cast<__m256i*>(sign_mantissas + 32 * half);
        if (streaming) {
          _mm256_stream_si256(s_at, s);
        } else {
          _mm256_storeu_si256(s_at, s);
        }
        _mm256_store_si256(reinterpret_cast<__m256i*>(exponents + 32 * half), e);
        const __m256i codes = complement_of_codes<mode>(e, lowest);
        for (uint32_t p = 0; p < kPlanes; p++) {
          const int bits = _mm256_movemask_epi8(_mm256_slli_epi16(codes, static_cast<int>(7 - p)));
          words[p] |= uint64_t{static_cast<uint32_t>(bits)} << 32 * half;
        }
      }
      for (uint32_t p = 0; p < kPlanes; p++) store(plane[p] + i / 8, 0, ~words[p]);
      escape = append_escapes(exponents, words[0] & words[1] & words[2], escape);
    }
    if (streaming) {
      for (uint32_t p = 0; p < kPlanes; p++) {
        for (uint32_t i = 0; i < kPlaneBytes; i += 32) {
          _mm256_stream_si256(reinterpret_cast<__m256i*>(body + elements + (p * elements + start) / 8 + i),
                              _mm256_load_si256(reinterpret_cast<const __m256i*>(gathered[p] + i)));
        }
      }
    }
    escape_end[start / kSubBlockElements] = static_cast<uint16_t>(escape - escapes);
  }
}

// The bits of `half` of a 64-bit word, which `word` repeats, as 32 bytes of 0 or -1.
inline __m256i scatter_bits(__m256i word, uint32_t half) {
  constexpr long long kOnes = 0x0101010101010101;
  const __m256i source = half == 0 ? _mm256_setr_epi64x(0, kOnes, 2 * kOnes, 3 * kOnes)
                                   : _mm256_setr_epi64x(4 * kOnes, 5 * kOnes, 6 * kOnes, 7 * kOnes);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(word, source), bit), bit);
}

template <Mode mode, bool streaming>
bool decode_mode(const uint8_t* body, uint32_t elements, uint8_t top, const uint8_t* escapes,
                 const uint16_t* escape_end, uint16_t* values) {
  const __m256i above = _mm256_set1_epi8(static_cast<char>(top + 1));
  alignas(32) uint8_t exponents[kSubBlockElements + 32];
  const uint8_t* escape = escapes;
  for (uint32_t start = 0; start < elements; start += kSubBlockElements) {
    for (uint32_t i = 0; i < kSubBlockElements; i += kGroup) {
      uint64_t coded = 0;
      __m256i words[kPlanes];
      for (uint32_t p = 0; p < kPlanes; p++) {
        const uint64_t word = load<uint64_t>(body + elements + (p * elements + start + i) / 8, 0);
        coded |= word;
        words[p] = _mm256_set1_epi64x(static_cast<long long>(word));
      }
      for (uint32_t half = 0; half < 2; half++) {
        __m256i negative = scatter_bits(words[2], half);  // ends as -code
        for (int p = 1; p >= 0; p--) {
          negative = _mm256_add_epi8(_mm256_add_epi8(negative, negative), scatter_bits(words[p], half));
        }
        __m256i e = _mm256_add_epi8(above, negative);
        if (mode == Mode::kWindowAndZero) {
          e = _mm256_andnot_si256(_mm256_cmpeq_epi8(negative, _mm256_set1_epi8(-7)), e);
        }
        _mm256_store_si256(reinterpret_cast<__m256i*>(exponents + i + 32 * half), e);
      }
      escape = patch_escapes(exponents + i, ~coded, escape);
    }
    if (escape - escapes != escape_end[start / kSubBlockElements]) return false;
    for (uint32_t i = 0; i < kSubBlockElements; i += 32) {
      const uint8_t* sign_mantissas = body + start + i;
      uint16_t* x = values + start + i;
      if (streaming) {
        __builtin_prefetch(sign_mantissas + kReadAhead);
      } else {
        __builtin_prefetch(reinterpret_cast<uint8_t*>(x) + kWriteAhead, 1);
      }
      const __m256i s = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sign_mantissas));
      const __m256i e = _mm256_load_si256(reinterpret_cast<const __m256i*>(exponents + i));
      __m256i a = _mm256_unpacklo_epi8(s, e);
      __m256i b = _mm256_unpackhi_epi8(s, e);
      a = _mm256_or_si256(_mm256_srli_epi32(a, 1), _mm256_slli_epi32(a, 31));
      b = _mm256_or_si256(_mm256_srli_epi32(b, 1), _mm256_slli_epi32(b, 31));
      store_half<streaming>(x, _mm256_castsi256_si128(a));
      store_half<streaming>(x + 8, _mm256_castsi256_si128(b));
      store_half<streaming>(x + 16, _mm256_extracti128_si256(a, 1));
      store_half<streaming>(x + 24, _mm256_extracti128_si256(b, 1));
    }
  }
  return true;
}

void finish_streaming() { _mm_sfence(); }

}  // namespace
}  // namespace zipccl

#include "table.h"

namespace zipccl {

const Coder kAvx2Coder = make_coder("avx2");

}  // namespace zipccl

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // defined(__x86_64__)
