// The coder for every processor: plain C++ on 64-bit words and loops that compilers vectorise.
#include <cstring>

#include "coder.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("O3,fp-contract=off")
#endif

#include "elementwise.h"

namespace zipccl {
namespace {

constexpr uint64_t kOnes = 0x0101010101010101;

// Bit 0 of eight bytes as the bits of one byte: the product moves bit 8k to bit 56+k.
inline uint8_t gather_bits(uint64_t bytes) {
  return static_cast<uint8_t>(((bytes & kOnes) * 0x0102040810204080) >> 56);
}

// The inverse, for each byte: its bit k as byte k.
struct ScatteredBits {
  uint64_t bytes[256];

  constexpr ScatteredBits() : bytes() {
    for (int byte = 0; byte < 256; byte++) {
      for (int k = 0; k < 8; k++) bytes[byte] |= static_cast<uint64_t>(byte >> k & 1) << 8 * k;
    }
  }
};
constexpr ScatteredBits kScattered;

// The code of an exponent.
template <Mode mode>
inline uint8_t code_of(uint8_t exponent, uint8_t top) {
  const uint8_t distance = static_cast<uint8_t>(top - exponent);
  const uint8_t other = mode == Mode::kWindowAndZero && exponent == 0 ? 7 : 0;
  return distance < (mode == Mode::kWindow ? 7 : 6) ? static_cast<uint8_t>(distance + 1) : other;
}

// The exponent of a code other than 0.
template <Mode mode>
inline uint8_t exponent_of(uint8_t code, uint8_t top) {
  return mode == Mode::kWindowAndZero && code == 7 ? 0 : static_cast<uint8_t>(top + 1 - code);
}

template <Mode mode, bool>
void encode_mode(const uint16_t* values, uint32_t elements, uint8_t top, uint8_t* body, uint8_t* escapes,
                 uint16_t* escape_end) {
  uint8_t* planes = body + elements;
  uint8_t* escape = escapes;
  for (uint32_t start = 0; start < elements; start += kSubBlockElements) {
    uint8_t exponents[kSubBlockElements];
    uint8_t codes[kSubBlockElements];
    split(values + start, kSubBlockElements, body + start, exponents);
    for (uint32_t i = 0; i < kSubBlockElements; i++) codes[i] = code_of<mode>(exponents[i], top);
    for (uint32_t i = 0; i < kSubBlockElements; i += 8) {
      const uint64_t eight = load<uint64_t>(codes + i, 0);
      uint8_t coded = 0;
      for (uint32_t p = 0; p < kPlanes; p++) {
        const uint8_t bits = gather_bits(eight >> p);
        planes[(p * elements + start + i) / 8] = bits;
        coded |= bits;
      }
      for (uint32_t escaped = coded ^ 0xff; escaped != 0; escaped &= escaped - 1) {
        *escape++ = exponents[i + static_cast<uint32_t>(__builtin_ctz(escaped))];
      }
    }
    escape_end[start / kSubBlockElements] = static_cast<uint16_t>(escape - escapes);
  }
}

template <Mode mode, bool>
bool decode_mode(const uint8_t* body, uint32_t elements, uint8_t top, const uint8_t* escapes,
                 const uint16_t* escape_end, uint16_t* values) {
  const uint8_t* planes = body + elements;
  const uint8_t* escape = escapes;
  for (uint32_t start = 0; start < elements; start += kSubBlockElements) {
    uint8_t exponents[kSubBlockElements];
    uint8_t codes[kSubBlockElements];
    uint8_t coded[kSubBlockElements / 8];
    for (uint32_t i = 0; i < kSubBlockElements / 8; i++) {
      const uint8_t* plane = planes + start / 8 + i;
      const uint8_t bits0 = plane[0], bits1 = plane[elements / 8], bits2 = plane[elements / 4];
      store(codes, i, kScattered.bytes[bits0] | kScattered.bytes[bits1] << 1 | kScattered.bytes[bits2] << 2);
      coded[i] = bits0 | bits1 | bits2;
    }
    for (uint32_t i = 0; i < kSubBlockElements; i++) exponents[i] = exponent_of<mode>(codes[i], top);
    for (uint32_t i = 0; i < kSubBlockElements / 8; i++) {
      for (uint32_t escaped = coded[i] ^ 0xffu; escaped != 0; escaped &= escaped - 1) {
        exponents[8 * i + static_cast<uint32_t>(__builtin_ctz(escaped))] = *escape++;
      }
    }
    if (escape - escapes != escape_end[start / kSubBlockElements]) return false;
    merge(body + start, exponents, kSubBlockElements, values + start);
  }
  return true;
}

void finish_streaming() {}

}  // namespace
}  // namespace zipccl

#include "table.h"

namespace zipccl {

const Coder kPortableCoder = make_coder("portable");

}  // namespace zipccl
