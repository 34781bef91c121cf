// AVX-512 in plain C++, for processors without it: SIMDe, and the instructions that it lacks.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>

#include <cstdint>
#include <cstring>

namespace zipccl_emulated {

inline __m512i maskz_compress_epi8(uint64_t mask, __m512i a) {
  uint8_t in[64], out[64] = {};
  std::memcpy(in, &a, 64);
  for (int i = 0, n = 0; i < 64; i++) {
    if (mask >> i & 1) out[n++] = in[i];
  }
  std::memcpy(&a, out, 64);
  return a;
}

inline __m512i mask_expand_epi8(__m512i source, uint64_t mask, __m512i a) {
  uint8_t in[64], out[64];
  std::memcpy(in, &a, 64);
  std::memcpy(out, &source, 64);
  for (int i = 0, n = 0; i < 64; i++) {
    if (mask >> i & 1) out[i] = in[n++];
  }
  std::memcpy(&a, out, 64);
  return a;
}

}  // namespace zipccl_emulated

#define _mm512_maskz_compress_epi8 zipccl_emulated::maskz_compress_epi8
#define _mm512_mask_expand_epi8 zipccl_emulated::mask_expand_epi8
#ifndef _mm512_testn_epi8_mask
#define _mm512_testn_epi8_mask(a, b) (~_mm512_test_epi8_mask(a, b))
#endif
#ifndef _mm512_stream_si512
#define _mm512_stream_si512(at, value) _mm512_store_si512(at, value)
#endif
