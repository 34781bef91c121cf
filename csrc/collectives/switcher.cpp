#include "collectives/switcher.h"

#include <algorithm>

namespace zipccl {
namespace {

constexpr uint64_t kLeastBytes = 1 << 10;
constexpr uint64_t kFirstBytes = 256 << 10;  // of a kind: short on any link, long enough to tell how fast it is
constexpr uint64_t kStep = 4;                // from one size of the grid to the next
constexpr double kLongestSeconds = 1.2;      // of one run while measuring; longer calls are extrapolated
// How much faster than the native one another route must be: less is not to be told apart, as calls that are measured
// one behind the other may find threads awake that else have to wake up.
constexpr double kMargin = 0.95;
constexpr double kLeastGain = 20e-6;
constexpr double kChange = 1.5;

uint64_t grid_above(uint64_t bytes) {
  uint64_t size = kLeastBytes;
  while (size < bytes) size *= kStep;
  return size;
}

double slowest(const RouteSeconds& seconds) { return *std::max_element(seconds.begin(), seconds.end()); }

}  // namespace

std::optional<uint64_t> Switcher::next(const CallKind& kind, uint64_t bytes) const {
  const auto found = curves_.find(kind);
  uint64_t above = grid_above(bytes);
  if (found == curves_.end()) return std::min(above, kFirstBytes);
  const Curve& curve = found->second;
  const auto known = [&](uint64_t size) { return curve.count(size) != 0; };
  const auto too_long = [&](uint64_t size) {
    auto nearest = curve.upper_bound(size);
    if (nearest != curve.begin()) --nearest;
    const double ratio = static_cast<double>(size) / static_cast<double>(nearest->first);
    return slowest(nearest->second.seconds) * ratio > kLongestSeconds;
  };
  while (above > kFirstBytes && !known(above) && too_long(above)) above /= kStep;
  if (above != bytes && above > kLeastBytes && !known(above / kStep)) return above / kStep;
  if (!known(above)) return above;
  return std::nullopt;
}

RouteSeconds Switcher::predict(const CallKind& kind, uint64_t bytes, RouteSeconds Measured::* figure) const {
  const Curve& curve = curves_.at(kind);
  auto upper = curve.lower_bound(bytes);
  if (upper != curve.end() && upper->first == bytes) return upper->second.*figure;
  if (upper == curve.end()) --upper;
  auto lower = upper == curve.begin() ? upper : std::prev(upper);
  if (lower == upper && curve.size() > 1) ++upper;
  RouteSeconds seconds;
  const auto at = static_cast<double>(bytes), from = static_cast<double>(lower->first);
  for (int route = 0; route < kRoutes; route++) {
    const double low = (lower->second.*figure)[route], high = (upper->second.*figure)[route];
    // Beyond all that was measured, a call is not faster for being longer, nor a byte slower for being shorter.
    const double slope = std::max((high - low) / std::max(static_cast<double>(upper->first) - from, 1.0), 0.0);
    seconds[route] = low < 0          ? low
                     : lower == upper ? low * at / from
                                      : std::max(low + slope * (at - from), low * std::min(at / from, 1.0));
  }
  return seconds;
}

Choice Switcher::choose(const CallKind& kind, uint64_t bytes, bool native) const {
  Choice choice;
  choice.predicted = predict(kind, bytes);
  constexpr int kOwn = static_cast<int>(Route::kNative);
  if (!native) choice.predicted[kOwn] = -1;
  int fastest = -1;
  for (int route = 0; route < kRoutes; route++) {
    if (route == kOwn || choice.predicted[route] < 0) continue;
    if (fastest < 0 || choice.predicted[route] < choice.predicted[fastest]) fastest = route;
  }
  const double own = choice.predicted[kOwn];
  if (own >= 0) {
    const bool faster = fastest >= 0 && choice.predicted[fastest] < std::min(kMargin * own, own - kLeastGain) &&
                        predict(kind, bytes, &Measured::high)[fastest] < predict(kind, bytes, &Measured::low)[kOwn];
    if (!faster) fastest = kOwn;
  }
  choice.route = static_cast<Route>(fastest);
  return choice;
}

uint64_t Switcher::probe(const CallKind& kind, uint64_t bytes) const {
  const Curve& curve = curves_.at(kind);
  const auto above = curve.upper_bound(bytes);
  return above == curve.begin() ? above->first : std::prev(above)->first;
}

bool Switcher::changed(double measured, double expected) {
  return measured > kChange * expected || expected > kChange * measured;
}

}  // namespace zipccl
