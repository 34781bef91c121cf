// The coder for AVX-512 with VBMI and VBMI2 (Ice Lake, Zen 4 and later). Nothing here needs compiler flags: the target
// is set below, after the standard headers, so that no inline function of theirs is compiled for a processor that the
// program may not run on.
//
// What limits encoding of cached data is the store streams, not the arithmetic: hence the prefetches for writing.
#if defined(__x86_64__)

#if defined(ZIPCCL_AVX512_HEADER)  // a test's emulation of the instructions
#include ZIPCCL_AVX512_HEADER
#else
#include <immintrin.h>
#endif

#include <cstring>

#include "coder.h"

#if defined(ZIPCCL_AVX512_HEADER)
#elif defined(__clang__)
#pragma clang attribute push(                                                                           \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,popcnt,prfchw"))), \
    apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarms in GCC's own immintrin.h
#pragma GCC push_options
#pragma GCC optimize("O3,fp-contract=off")
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,popcnt,prfchw")
#endif

#include "elementwise.h"

namespace zipccl {
namespace {

constexpr uint32_t kGroup = 64;        // elements of one register of bytes, and of one 64-bit word of each plane
constexpr uint32_t kWriteAhead = 512;  // elements between a store and the prefetch of its successor
constexpr uint32_t kReadAhead = 1024;  // the same for loads
constexpr uint32_t kPlaneBytes = kSubBlockElements / 8;
constexpr uint64_t kOddBytes = 0xaaaaaaaaaaaaaaaa;

// 64 values are two registers of pairs, `a` rotated left by 1 bit: bytes s0 e0 s1 e1, and `b` rotated left by 25 bits:
// e0 s1 e1 s0. Blending odd bytes of one with even bytes of the other gives all exponents in one register and all
// sign-mantissas in another, in an order that one byte permutation undoes. These are the permutations and inverses.
struct Permutations {
  alignas(64) uint8_t gather_exponents[64];
  alignas(64) uint8_t gather_sign_mantissas[64];
  alignas(64) uint8_t scatter_exponents[64];
  alignas(64) uint8_t scatter_sign_mantissas[64];

  constexpr Permutations()
      : gather_exponents(), gather_sign_mantissas(), scatter_exponents(), scatter_sign_mantissas() {
    for (int i = 0; i < 32; i++) {
      gather_exponents[i] = static_cast<uint8_t>(2 * i + 1);
      gather_sign_mantissas[i] = static_cast<uint8_t>(2 * i);
      gather_exponents[32 + i] = static_cast<uint8_t>(2 * i);
      gather_sign_mantissas[32 + i] = static_cast<uint8_t>(i / 2 * 4 + (i % 2 == 0 ? 3 : 1));
    }
    for (int i = 0; i < 64; i++) {
      scatter_exponents[gather_exponents[i]] = static_cast<uint8_t>(i);
      scatter_sign_mantissas[gather_sign_mantissas[i]] = static_cast<uint8_t>(i);
    }
  }
};
constexpr Permutations kPermutations;

template <bool streaming>
inline void store_register(void* at, __m512i value) {
  if (streaming) {
    _mm512_stream_si512(static_cast<__m512i*>(at), value);
  } else {
    _mm512_storeu_si512(at, value);
  }
}

template <Mode mode, bool streaming>
void encode_mode(const uint16_t* values, uint32_t elements, uint8_t top, uint8_t* body, uint8_t* escapes,
                 uint16_t* escape_end) {
  const __m512i gather_exponents = _mm512_load_si512(kPermutations.gather_exponents);
  const __m512i gather_sign_mantissas = _mm512_load_si512(kPermutations.gather_sign_mantissas);
  const __m512i seventh = _mm512_set1_epi8(static_cast<char>(top - 6));
  const __m512i seven = _mm512_set1_epi8(7);
  const __m512i bits[kPlanes] = {_mm512_set1_epi8(1), _mm512_set1_epi8(2), _mm512_set1_epi8(4)};
  alignas(64) uint8_t gathered[kPlanes][kPlaneBytes];  // streaming: whole cache lines of planes
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
      const uint16_t* x = values + start + i;
      uint8_t* sign_mantissas = body + start + i;
      if (streaming) {
        __builtin_prefetch(x + kReadAhead);
        __builtin_prefetch(x + kReadAhead + 32);
      } else {
        __builtin_prefetch(sign_mantissas + kWriteAhead, 1);
      }
      const __m512i a = _mm512_rol_epi32(_mm512_loadu_si512(x), 1);
      const __m512i b = _mm512_rol_epi32(_mm512_loadu_si512(x + 32), 25);
      const __m512i e = _mm512_permutexvar_epi8(gather_exponents, _mm512_mask_blend_epi8(kOddBytes, b, a));
      const __m512i s = _mm512_permutexvar_epi8(gather_sign_mantissas, _mm512_mask_blend_epi8(kOddBytes, a, b));
      store_register<streaming>(sign_mantissas, s);

      // 7 - code, where 7 stands for an escape.
      __m512i complement = _mm512_min_epu8(_mm512_sub_epi8(e, seventh), seven);
      if (mode == Mode::kWindowAndZero) {
        // The seventh exponent gives up its code, and 0 takes it unless it is itself one of the six.
        const __mmask64 outside = _mm512_cmpeq_epi8_mask(complement, seven) | _mm512_testn_epi8_mask(complement, seven);
        complement = _mm512_mask_blend_epi8(outside, complement, seven);
        complement = _mm512_maskz_mov_epi8(~(outside & _mm512_testn_epi8_mask(e, e)), complement);
      }
      for (uint32_t p = 0; p < kPlanes; p++) {
        store<uint64_t>(plane[p] + i / 8, 0, _mm512_testn_epi8_mask(complement, bits[p]));
      }

      // The register form of compress, then a store of what is nearly always enough: the memory form is far slower.
      const __mmask64 escaped = _mm512_cmpeq_epi8_mask(complement, seven);
      const __m512i compressed = _mm512_maskz_compress_epi8(escaped, e);
      const uint32_t count = static_cast<uint32_t>(__builtin_popcountll(escaped));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(escape), _mm512_castsi512_si128(compressed));
      if (__builtin_expect(count > 16, 0)) _mm512_storeu_si512(escape, compressed);
      escape += count;
    }
    if (streaming) {
      for (uint32_t p = 0; p < kPlanes; p++) {
        for (uint32_t i = 0; i < kPlaneBytes; i += 64) {
          store_register<true>(body + elements + (p * elements + start) / 8 + i, _mm512_load_si512(gathered[p] + i));
        }
      }
    }
    escape_end[start / kSubBlockElements] = static_cast<uint16_t>(escape - escapes);
  }
}

template <Mode mode, bool streaming>
bool decode_mode(const uint8_t* body, uint32_t elements, uint8_t top, const uint8_t* escapes,
                 const uint16_t* escape_end, uint16_t* values) {
  const __m512i scatter_exponents = _mm512_load_si512(kPermutations.scatter_exponents);
  const __m512i scatter_sign_mantissas = _mm512_load_si512(kPermutations.scatter_sign_mantissas);
  const __m512i above = _mm512_set1_epi8(static_cast<char>(top + 1));
  const __m512i one = _mm512_set1_epi8(1), two = _mm512_set1_epi8(2), four = _mm512_set1_epi8(4);
  const uint8_t* escape = escapes;
  for (uint32_t start = 0; start < elements; start += kSubBlockElements) {
    for (uint32_t i = 0; i < kSubBlockElements; i += kGroup) {
      const uint8_t* sign_mantissas = body + start + i;
      const uint8_t* plane = body + elements + (start + i) / 8;
      uint16_t* x = values + start + i;
      if (streaming) {
        __builtin_prefetch(sign_mantissas + kReadAhead);
      } else {
        __builtin_prefetch(x + kWriteAhead, 1);
        __builtin_prefetch(x + kWriteAhead + 32, 1);
      }
      const uint64_t word0 = load<uint64_t>(plane, 0);
      const uint64_t word1 = load<uint64_t>(plane + elements / 8, 0);
      const uint64_t word2 = load<uint64_t>(plane + elements / 4, 0);
      __m512i e = _mm512_mask_sub_epi8(above, word0, above, one);
      e = _mm512_mask_sub_epi8(e, word1, e, two);
      e = _mm512_mask_sub_epi8(e, word2, e, four);
      if (mode == Mode::kWindowAndZero) e = _mm512_maskz_mov_epi8(~(word0 & word1 & word2), e);
      const uint64_t escaped = ~(word0 | word1 | word2);
      e = _mm512_mask_expand_epi8(e, escaped, _mm512_loadu_si512(escape));
      escape += __builtin_popcountll(escaped);

      const __m512i s = _mm512_permutexvar_epi8(scatter_sign_mantissas, _mm512_loadu_si512(sign_mantissas));
      e = _mm512_permutexvar_epi8(scatter_exponents, e);
      store_register<streaming>(x, _mm512_ror_epi32(_mm512_mask_blend_epi8(kOddBytes, s, e), 1));
      store_register<streaming>(x + 32, _mm512_ror_epi32(_mm512_mask_blend_epi8(kOddBytes, e, s), 25));
    }
    if (escape - escapes != escape_end[start / kSubBlockElements]) return false;
  }
  return true;
}

void finish_streaming() { _mm_sfence(); }

}  // namespace
}  // namespace zipccl

#include "table.h"

namespace zipccl {

const Coder kAvx512Coder = make_coder("avx512");

}  // namespace zipccl

#if defined(ZIPCCL_AVX512_HEADER)
#elif defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // defined(__x86_64__)
