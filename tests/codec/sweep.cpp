// Chunk functions against the format's definition, element by element: every pattern under every window.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/coder.h"

using namespace zipccl;

namespace {

uint8_t code_of(uint8_t exponent, Window window) {
  const uint8_t distance = static_cast<uint8_t>(window.top - exponent);
  if (window.mode == Mode::kWindow) return distance < 7 ? static_cast<uint8_t>(distance + 1) : 0;
  if (distance < 6) return static_cast<uint8_t>(distance + 1);
  return exponent == 0 ? 7 : 0;
}

struct Chunk {
  alignas(64) uint8_t body[kBodyStride];
  uint8_t escapes[kEscapeRoom];
  uint16_t escape_end[kSubBlocks];
};

void encode_by_definition(const uint16_t* values, uint32_t elements, Window window, Chunk& chunk) {
  std::memset(&chunk, 0, sizeof chunk);
  uint16_t escapes = 0;
  for (uint32_t i = 0; i < elements; i++) {
    const uint16_t value = values[i], partner = values[i ^ 1];
    const uint8_t exponent = static_cast<uint8_t>(value >> 7);
    const uint8_t code = code_of(exponent, window);
    chunk.body[i] = static_cast<uint8_t>((value & 0x7f) << 1 | partner >> 15);
    for (uint32_t p = 0; p < kPlanes; p++) {
      chunk.body[elements + p * elements / 8 + i / 8] |= static_cast<uint8_t>((code >> p & 1) << i % 8);
    }
    if (code == 0) chunk.escapes[escapes++] = exponent;
    chunk.escape_end[i / kSubBlockElements] = escapes;
  }
}

}  // namespace

// The number of chunks that come out wrong.
extern "C" int sweep(const char* name, int streaming) {
  const Coder* coder = &kPortableCoder;
#if defined(__x86_64__)
  if (name == std::string("avx2")) coder = &kAvx2Coder;
  if (name == std::string("avx512")) coder = &kAvx512Coder;
#endif
  std::vector<uint16_t> patterns(65536);
  for (uint32_t i = 0; i < 65536; i++) patterns[i] = static_cast<uint16_t>(i);
  std::mt19937 random(1);
  static Chunk wanted, got;
  alignas(64) static uint16_t values[kChunkElements], back[kChunkElements];
  int wrong = 0;
  for (Mode mode : {Mode::kWindow, Mode::kWindowAndZero}) {
    for (int top = 0; top < 256; top++) {
      const Window window = {static_cast<uint8_t>(top), mode};
      if (top % 16 == 0) std::shuffle(patterns.begin(), patterns.end(), random);
      uint32_t elements = kChunkElements;
      for (uint32_t start = 0; start < 65536; start += elements) {
        // Also shorter chunks, in which planes lie elsewhere.
        elements = std::min<uint32_t>(65536 - start, kSubBlockElements * (1 + (start / 1024 + top) % 8));
        std::copy_n(patterns.begin() + start, elements, values);
        if (start % 3 == 0) {  // mostly coded, as in practice
          for (uint32_t i = 0; i < elements; i++) {
            if (random() % 32 == 0) continue;
            const int exponent = (top - values[i] % 7) & 0xff;
            values[i] = static_cast<uint16_t>((values[i] & 0x807f) | exponent << 7);
          }
        }
        encode_by_definition(values, elements, window, wanted);
        std::memset(&got, 0, sizeof got);
        (streaming ? coder->encode_streaming : coder->encode)(values, elements, window, got.body, got.escapes,
                                                              got.escape_end);
        coder->finish_streaming();
        const uint16_t escapes = wanted.escape_end[elements / kSubBlockElements - 1];
        const bool same = std::memcmp(wanted.body, got.body, body_bytes(elements)) == 0 &&
                          std::memcmp(wanted.escapes, got.escapes, escapes) == 0 &&
                          std::memcmp(wanted.escape_end, got.escape_end, sizeof got.escape_end) == 0;
        const auto decode = streaming ? coder->decode_streaming : coder->decode;
        const bool decoded = decode(wanted.body, elements, window, wanted.escapes, wanted.escape_end, back);
        coder->finish_streaming();
        const bool exact = decoded && std::memcmp(values, back, elements * sizeof(uint16_t)) == 0;
        // One escape too few or too many in any sub-block must be noticed.
        wanted.escape_end[top % (elements / kSubBlockElements)] ^= 1;
        const bool noticed = !decode(wanted.body, elements, window, wanted.escapes, wanted.escape_end, back);
        coder->finish_streaming();
        wrong += !(same && exact && noticed);
      }
    }
  }
  return wrong;
}
