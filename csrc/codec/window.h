// sigma -> window, and sample -> window.
//
// For values of N(0, sigma^2) the probability of exponent k is 2 (Phi(2^(k+1)/sigma) - Phi(2^k/sigma)). Seven
// neighbouring exponents that end at `top` stop being the best choice when bin top+1 outweighs bin top-6, which
// happens at sigma = 2^(top+1) / 2.43. So the best window ends at the exponent field of the fp32 number 2.43 sigma.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "format.h"

namespace zipccl {

struct Window {
  uint8_t top = 0;
  Mode mode = Mode::kWindow;
};

// Highest exponent field of the window for N(0, sigma^2); sigma is finite and not negative.
inline uint8_t window_top(float sigma) {
  const float scaled = 2.43f * sigma;
  uint32_t bits;
  std::memcpy(&bits, &scaled, sizeof bits);
  const uint32_t top = bits >> 23;
  return static_cast<uint8_t>(top < 6 ? 6 : top);  // there are no exponents below 0
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
