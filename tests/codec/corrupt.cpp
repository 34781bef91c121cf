// Breaks messages in every way and decodes them, under AddressSanitizer and UndefinedBehaviorSanitizer: all ranges are
// separate heap blocks of exactly the length that the codec is told. A message must decode exactly or raise
// FormatError; without a checksum it may also decode to something else.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codec.h"

using namespace zipccl;

namespace {

using Bytes = std::vector<uint8_t>;

struct Case {
  DType dtype;
  uint64_t elements;
  std::string values;
  bool checksum;
  bool plain;
};

std::mt19937_64 generator(7);
uint64_t decoded_count = 0, refused_count = 0;

Bytes make_values(const Case& c) {
  Bytes bytes(c.elements * element_bytes(c.dtype));
  std::normal_distribution<float> normal(0, 0.02f);
  for (uint64_t i = 0; i < c.elements; i++) {
    float value = normal(generator);
    if (c.values == "relu" && value < 0) value = 0;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (c.values == "random") bits = static_cast<uint32_t>(generator());
    if (c.values == "bf16 in fp32") bits &= 0xffff0000;
    if (c.dtype == DType::kBFloat16) bits >>= 16;
    std::memcpy(bytes.data() + i * element_bytes(c.dtype), &bits, element_bytes(c.dtype));
  }
  return bytes;
}

struct Parts {
  Bytes statics, dynamic;
};

Parts make_message(const Case& c, const Bytes& values) {
  EncodeOptions options;
  options.checksum = c.checksum;
  options.plain = c.plain;
  options.scale = 0.5f;
  const uint64_t inline_bytes = c.elements / 48;  // too few: the pool straddles
  Parts parts;
  parts.statics.resize(c.plain ? plain_bytes(c.elements, c.dtype) : static_bytes(c.elements, inline_bytes));
  parts.dynamic.resize(c.plain ? 0 : dynamic_bound(c.elements, c.dtype, inline_bytes));
  const Encoded encoded =
      encode(values.data(), c.elements, c.dtype, options, inline_bytes, parts.statics.data(), parts.dynamic.data());
  parts.dynamic.resize(encoded.dynamic_bytes);
  parts.dynamic.shrink_to_fit();
  return parts;
}

// A heap block of exactly `size` bytes.
std::unique_ptr<uint8_t[]> block(uint64_t size) { return std::unique_ptr<uint8_t[]>(new uint8_t[size]); }

void check(const Case& c, const Bytes& values, const Parts& parts, const char* what, uint64_t where) {
  const Message message = {parts.statics.data(), parts.statics.size(), parts.dynamic.data(), parts.dynamic.size()};
  auto output = block(values.size());
  bool exact = false, refused = false;
  try {
    decode(message, c.elements, c.dtype, output.get());
    exact = std::equal(values.begin(), values.end(), output.get());
    decoded_count++;
  } catch (const FormatError&) {
    refused = true;
    refused_count++;
  }
  if (c.checksum && !exact && !refused) {
    std::printf("%s at %llu gave a wrong result: %llu elements of %s\n", what, static_cast<unsigned long long>(where),
                static_cast<unsigned long long>(c.elements), c.values.c_str());
    std::exit(1);
  }
  if (where % 8 == 0) {
    std::vector<float> accumulator(c.elements, 1.0f);
    try {
      accumulate(message, c.elements, c.dtype, Reduction::kSum, accumulator.data());
    } catch (const FormatError&) {
    }
  }
}

void flip_bytes(const Case& c, const Bytes& values, Parts& parts, uint64_t step, const std::vector<int>& flips) {
  for (Bytes* part : {&parts.statics, &parts.dynamic}) {
    for (uint64_t i = 0; i < part->size(); i += i < 256 ? 1 : step) {
      const uint8_t old = (*part)[i];
      for (int flip : flips) {
        (*part)[i] = static_cast<uint8_t>(old ^ flip);
        check(c, values, parts, "a flipped byte", i);
      }
      (*part)[i] = old;
    }
  }
}

void replace_fields(const Case& c, const Bytes& values, Parts& parts) {
  const uint64_t headers = c.plain ? sizeof(MessageHeader) : chunk_header_offset(chunk_count(c.elements));
  for (uint64_t size : {2, 4, 8}) {
    for (uint64_t at = 0; at + size <= headers; at += size) {
      uint64_t old = 0;
      std::memcpy(&old, parts.statics.data() + at, size);
      const uint64_t all = ~uint64_t{0};
      for (uint64_t value : {uint64_t{0}, uint64_t{1}, all, all - 1, all >> 1, uint64_t{1} << 31, uint64_t{1} << 63,
                             (uint64_t{1} << 61) - 1, old + 1, old - 1, old * 2, old + 128, old + 8192, generator()}) {
        std::memcpy(parts.statics.data() + at, &value, size);
        check(c, values, parts, "a replaced field", at);
      }
      std::memcpy(parts.statics.data() + at, &old, size);
    }
  }
}

void truncate(const Case& c, const Bytes& values, const Parts& parts) {
  const uint64_t lengths = parts.statics.size();
  for (uint64_t length = 0; length < lengths; length += length < 200 ? 1 : 97) {
    Parts shorter = {Bytes(parts.statics.begin(), parts.statics.begin() + static_cast<int64_t>(length)), parts.dynamic};
    check(c, values, shorter, "a shorter static part", length);
  }
  for (uint64_t length = 0; length < parts.dynamic.size(); length += length < 20 ? 1 : 97) {
    Parts shorter = {parts.statics, Bytes(parts.dynamic.begin(), parts.dynamic.begin() + static_cast<int64_t>(length))};
    check(c, values, shorter, "a shorter dynamic part", length);
  }
  Parts longer = parts;
  longer.statics.resize(longer.statics.size() + 1);
  check(c, values, longer, "a longer static part", 0);
}

// Several changes at once, which get past the first check more often.
void scramble(const Case& c, const Bytes& values, const Parts& parts) {
  for (int round = 0; round < 300; round++) {
    Parts broken = parts;
    for (int k = 0; k < 3; k++) {
      Bytes& part = broken.dynamic.empty() || generator() % 4 != 0 ? broken.statics : broken.dynamic;
      const uint64_t bound = generator() % 2 != 0 ? part.size() : std::min<uint64_t>(part.size(), 192);
      part[generator() % bound] = static_cast<uint8_t>(generator());
    }
    Case unchecked = c;
    unchecked.checksum = false;  // a sum of words does not promise to see several changes
    check(unchecked, values, broken, "changed bytes", 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; i++) {
    set_coder(argv[i]);
    for (bool checksum : {false, true}) {
      const Case cases[] = {
          {DType::kBFloat16, 0, "normal", checksum, false},    {DType::kBFloat16, 7, "random", checksum, false},
          {DType::kBFloat16, 1000, "normal", checksum, false}, {DType::kBFloat16, 1025, "relu", checksum, false},
          {DType::kBFloat16, 9000, "random", checksum, false}, {DType::kBFloat16, 16500, "normal", checksum, false},
          {DType::kFloat32, 700, "normal", checksum, false},   {DType::kFloat32, 8500, "bf16 in fp32", checksum, false},
          {DType::kFloat32, 8300, "random", checksum, false},  {DType::kBFloat16, 100, "normal", checksum, true},
          {DType::kFloat32, 33, "normal", checksum, true},
      };
      for (const Case& c : cases) {
        const Bytes values = make_values(c);
        Parts parts = make_message(c, values);
        const uint64_t before = refused_count;
        check(c, values, parts, "the whole message", 0);
        if (refused_count != before) return 1;
        // Every byte of the small messages; of the others, the headers and a sample. The checks of headers are the
        // same for all coders.
        const uint64_t step = c.elements <= 1025 ? 1 : 499;
        if (i == 1) {
          flip_bytes(c, values, parts, step, {0x01, 0x80, 0xff});
          replace_fields(c, values, parts);
          truncate(c, values, parts);
        } else {
          flip_bytes(c, values, parts, step, {0x10});
        }
        if (c.elements != 0) scramble(c, values, parts);
      }
    }
  }
  std::printf("%llu decoded, %llu refused\n", static_cast<unsigned long long>(decoded_count),
              static_cast<unsigned long long>(refused_count));
  return refused_count == 0;
}
