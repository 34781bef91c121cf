// The loops that a compiler vectorises well by itself, once for all instruction sets: each coder's file includes this
// under its own target options and gets its own copy. No include guard, no includes of its own.
//
// A product and the sum after it are rounded separately everywhere: no contraction to fused operations. GCC knows that
// only as an option, which the including file sets, because functions of different options are not inlined.
#if defined(__clang__)
#pragma clang fp contract(off)
#endif

namespace zipccl {
namespace {

template <class T>
inline T load(const uint8_t* bytes, uint64_t index) {
  T value;
  std::memcpy(&value, bytes + index * sizeof(T), sizeof(T));
  return value;
}

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
inline void store(uint8_t* bytes, uint64_t index, T value) {
  std::memcpy(bytes + index * sizeof(T), &value, sizeof(T));
}

// A pair of bf16, rotated left by one bit, has its exponents in bytes 1 and 3 and its sign-mantissas in 0 and 2.
inline void split(const uint16_t* __restrict values, uint32_t elements, uint8_t* __restrict sign_mantissas,
                  uint8_t* __restrict exponents) {
  const uint8_t* pairs = reinterpret_cast<const uint8_t*>(values);
  for (uint32_t i = 0; i < elements / 2; i++) {
    const uint32_t pair = load<uint32_t>(pairs, i);
    const uint32_t rotated = pair << 1 | pair >> 31;
    store(sign_mantissas, i, static_cast<uint16_t>((rotated & 0xff) | (rotated >> 8 & 0xff00)));
    store(exponents, i, static_cast<uint16_t>((rotated >> 8 & 0xff) | (rotated >> 16 & 0xff00)));
  }
}

inline void merge(const uint8_t* __restrict sign_mantissas, const uint8_t* __restrict exponents, uint32_t elements,
                  uint16_t* __restrict values) {
  uint8_t* pairs = reinterpret_cast<uint8_t*>(values);
  for (uint32_t i = 0; i < elements / 2; i++) {
    const uint32_t s = load<uint16_t>(sign_mantissas, i), e = load<uint16_t>(exponents, i);
    const uint32_t rotated = (s & 0xff) | (e & 0xff) << 8 | (s & 0xff00) << 8 | (e & 0xff00) << 16;
    store(pairs, i, rotated >> 1 | rotated << 31);
  }
}

inline bool narrow(const uint8_t* __restrict values, uint32_t elements, uint16_t* __restrict high,
                   uint8_t* __restrict low) {
  uint32_t any = 0;
  for (uint32_t i = 0; i < elements; i++) {
    const uint32_t bits = load<uint32_t>(values, i);
    high[i] = static_cast<uint16_t>(bits >> 16);
    store(low, i, static_cast<uint16_t>(bits));
    any |= bits << 16;
  }
  return any != 0;
}

inline void widen(const uint16_t* __restrict high, const uint8_t* __restrict low, uint32_t elements,
                  uint8_t* __restrict values) {
  if (low == nullptr) {
    for (uint32_t i = 0; i < elements; i++) store(values, i, uint32_t{high[i]} << 16);
  } else {
    for (uint32_t i = 0; i < elements; i++) store(values, i, uint32_t{high[i]} << 16 | load<uint16_t>(low, i));
  }
}

struct BFloat16Values {
  const uint8_t* values;
  float operator()(uint64_t i) const { return as_float(uint32_t{load<uint16_t>(values, i)} << 16); }
};

struct Float32Values {
  const uint8_t* values;
  float operator()(uint64_t i) const { return load<float>(values, i); }
};

template <class Values>
inline void accumulate(Values values, uint64_t elements, float scale, Reduction reduction,
                       float* __restrict accumulator) {
  switch (reduction) {
    case Reduction::kStore:
      for (uint64_t i = 0; i < elements; i++) accumulator[i] = values(i) * scale;
      break;
    case Reduction::kSum:
      for (uint64_t i = 0; i < elements; i++) accumulator[i] = accumulator[i] + values(i) * scale;
      break;
    case Reduction::kMin:
      for (uint64_t i = 0; i < elements; i++) {
        const float value = values(i) * scale, old = accumulator[i];
        accumulator[i] = ((value < old) | (value != value)) ? value : old;
      }
      break;
    case Reduction::kMax:
      for (uint64_t i = 0; i < elements; i++) {
        const float value = values(i) * scale, old = accumulator[i];
        accumulator[i] = ((value > old) | (value != value)) ? value : old;
      }
      break;
  }
}

inline void accumulate_bfloat16(const uint8_t* values, uint64_t elements, float scale, Reduction reduction,
                                float* accumulator) {
  accumulate(BFloat16Values{values}, elements, scale, reduction, accumulator);
}

inline void accumulate_float32(const uint8_t* values, uint64_t elements, float scale, Reduction reduction,
                               float* accumulator) {
  accumulate(Float32Values{values}, elements, scale, reduction, accumulator);
}

inline void finish_bfloat16(const float* __restrict accumulator, uint64_t elements, float divisor,
                            uint16_t* __restrict output) {
  for (uint64_t i = 0; i < elements; i++) {
    const float quotient = accumulator[i] / divisor;
    uint32_t bits;
    std::memcpy(&bits, &quotient, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
    output[i] = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
}

inline void finish_float32(const float* __restrict accumulator, uint64_t elements, float divisor,
                           float* __restrict output) {
  for (uint64_t i = 0; i < elements; i++) output[i] = accumulator[i] / divisor;
}

inline uint64_t sum_words(const uint8_t* bytes, uint64_t words) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < words; i++) sum += load<uint64_t>(bytes, i);
  return sum;
}

}  // namespace
}  // namespace zipccl
