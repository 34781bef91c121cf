// sigma -> window, and sample -> window.
//
// For values of N(0, sigma^2) the probability of exponent k is 2 (Phi(2^(k+1)/sigma) - Phi(2^k/sigma)). Seven
// neighbouring exponents that end at `top` stop being the best choice when bin top+1 outweighs bin top-6, which
// happens at sigma = 2^(top+1) / 2.43. So the best window ends at the exponent field of the fp32 number 2.43 sigma.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "format.h"

namespace zipccl {

struct Window {
  uint8_t top = 0;
  Mode mode = Mode::kWindow;
};

// A window as one number of EncodeOptions::windows, and back. `kept`: however many values it escapes.
constexpr int kKeptWindow = 0x200;
inline int16_t given_window(Window window, bool kept = false) {
  return static_cast<int16_t>(window.top | static_cast<int>(window.mode) << 8 | (kept ? kKeptWindow : 0));
}
inline Window window_of(int16_t given) {
  return {static_cast<uint8_t>(given & 0xff), (given & 0x100) != 0 ? Mode::kWindowAndZero : Mode::kWindow};
}

// Highest exponent field of the window for N(0, sigma^2); sigma is finite and not negative.
inline uint8_t window_top(float sigma) {
  const float scaled = 2.43f * sigma;
  uint32_t bits;
  std::memcpy(&bits, &scaled, sizeof bits);
  const uint32_t top = bits >> 23;
  return static_cast<uint8_t>(top < 6 ? 6 : top);  // there are no exponents below 0
}

// The part of the values of N(0, sigma^2) whose exponents lie outside the window of 7 that ends at `top`.
inline double escape_rate(double sigma, int top) {
  const double scale = sigma * std::sqrt(2.0);
  return std::erfc(std::ldexp(1.0, top - 126) / scale) + (top > 6 ? std::erf(std::ldexp(1.0, top - 133) / scale) : 0.0);
}

// Counts of exponent fields in a sample of a chunk.
struct Histogram {
  uint32_t count[256] = {};
};

// The window and mode that leave the fewest of the counted exponents uncoded. Ties: a plain window before one with
// zeros, then the lower top, so that every coder picks the same.
inline Window best_window(const Histogram& histogram) {
  // The lowest window has 0 .. 6, or 1 .. 6 where 0 has its own code.
  int highest = 255, lowest = 6;
  while (highest > 6 && histogram.count[highest] == 0) highest--;
  uint32_t below = 0;
  for (int k = 1; k < 6; k++) below += histogram.count[k];
  while (below == 0 && lowest < highest && histogram.count[lowest] == 0) lowest++;
  Window best;
  bool found = false;
  uint32_t best_covered = 0;
  for (Mode mode : {Mode::kWindow, Mode::kWindowAndZero}) {
    const int length = mode == Mode::kWindow ? 7 : 6;
    const uint32_t zeros = mode == Mode::kWindow ? 0 : histogram.count[0];
    uint32_t covered = zeros;
    for (int k = lowest - length + 1; k <= lowest; k++) covered += histogram.count[k];
    for (int top = lowest; top <= highest; top++) {
      if (top > lowest) covered += histogram.count[top] - histogram.count[top - length];
      if (!found || covered > best_covered) {
        best = {static_cast<uint8_t>(top), mode};
        best_covered = covered;
        found = true;
      }
    }
  }
  return best;
}

}  // namespace zipccl
