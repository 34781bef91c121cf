// Which route a call takes: measured times of each, and a choice that is a pure function of them and of the call's
// size.
//
// Times are measured at sizes of a grid, as calls need them, and agreed by all ranks before they come here; so all
// ranks that make the same calls make the same choices.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/exchange.h"

namespace zipccl {

// Calls that one set of curves describes.
struct CallKind {
  Collective collective = {};
  DType dtype = {};
  bool cuda = false;
  bool operator<(const CallKind& other) const {
    return std::tie(collective, dtype, cuda) < std::tie(other.collective, other.dtype, other.cuda);
  }
};

// Seconds of a call by route; negative: the route is not there.
using RouteSeconds = std::array<double, kRoutes>;
constexpr RouteSeconds kNoSeconds = {-1, -1, -1, -1};

// What was measured at one size, and agreed: the slowest rank's figures.
struct Measured {
  RouteSeconds seconds = kNoSeconds;  // the median, and between what it would be if measured again
  RouteSeconds low = kNoSeconds;
  RouteSeconds high = kNoSeconds;
  // Of the coded exchange: bytes on the wire by raw bytes, and what one rank spent on the codec.
  double ratio = 1;
  double encode_seconds = 0;
  double decode_seconds = 0;
};

struct Choice {
  Route route = Route::kNative;
  RouteSeconds predicted = kNoSeconds;
};

class Switcher {
 public:
  // The next size to be measured before `bytes`, what a rank has for another, can be chosen for; none: all is known.
  std::optional<uint64_t> next(const CallKind& kind, uint64_t bytes) const;
  void add(const CallKind& kind, uint64_t bytes, const Measured& measured) { curves_[kind][bytes] = measured; }
  // Linear between the measured sizes, and beyond the largest two; next() has returned none.
  RouteSeconds predict(const CallKind& kind, uint64_t bytes,
                       RouteSeconds Measured::* figure = &Measured::seconds) const;
  // The fastest route; the native one, if there is, unless another is faster by a margin and beyond doubt.
  Choice choose(const CallKind& kind, uint64_t bytes, bool native) const;
  // The measured size, not above `bytes` if there is one, at which a change of the link is looked for.
  uint64_t probe(const CallKind& kind, uint64_t bytes) const;
  // Whether a call that takes `measured` says that the link, or the data, are no longer what they were.
  static bool changed(double measured, double expected);
  void forget() { curves_.clear(); }

  using Curve = std::map<uint64_t, Measured>;
  const std::map<CallKind, Curve>& curves() const { return curves_; }

 private:
  std::map<CallKind, Curve> curves_;
};

}  // namespace zipccl
