// What a user can choose for a group; zipccl/options.py documents each for users.
#pragma once

#include <iomanip>
#include <limits>
#include <sstream>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives/switcher.h"

namespace zipccl {

// What was measured at one size of one kind of call, by another group or an earlier program.
struct ProfilePoint {
  std::string layout;  // of the group's hosts
  CallKind kind;
  uint64_t bytes = 0;
  Measured measured;
};

// c10d looks `Options` up inside Backend subclasses, hence the name.
struct ZipCCLOptions final : c10d::Backend::Options {
  explicit ZipCCLOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("zipccl", timeout) {}
  ZipCCLOptions(const ZipCCLOptions&) = default;
#ifdef C10D_BACKEND_HAS_HOOKS
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<ZipCCLOptions>(*this);
  }
#endif

  std::optional<Route> mode;  // none: the switcher decides
  ExchangeOptions exchange;
  bool bf16_partial_sums = false;
  // Code windows that are known of the values (windows.h) are used; else samples choose them.
  bool use_known_windows = true;
  // What ranks on one host have in common; each rank's own affair.
  std::string host;
  std::vector<ProfilePoint> profile;
  // Of calls on CUDA tensors: kernels and links want longer segments.
  uint64_t cuda_segment_bytes = 64 << 20;
  // CUDA tensors go over Gloo, through processor memory, rather than over NCCL.
  bool cuda_over_gloo = false;

  // Everything that all ranks of a group must have in common, for the agreement when it is made.
  std::string describe() const {
    std::ostringstream text;
    text << std::setprecision(std::numeric_limits<double>::max_digits10) << "wire format " << kVersion << ", exchange "
         << kExchangeVersion << ", mode='" << (mode ? name(*mode) : "auto") << "', min_bytes=" << exchange.min_bytes
         << ", segment_bytes=" << exchange.segment_bytes << ", inline_fraction=" << exchange.inline_fraction
         << ", checksum=" << (exchange.checksum ? "True" : "False")
         << ", two_phase=" << (exchange.two_phase ? "True" : "False") << ", cuda_segment_bytes=" << cuda_segment_bytes
         << ", cuda_over='" << (cuda_over_gloo ? "gloo" : "nccl") << "', window='"
         << (use_known_windows ? "sigma" : "sample")
         << "', bf16_partial_sums=" << (bf16_partial_sums ? "True" : "False");
    if (!profile.empty()) text << ", profile=" << fingerprint();
    return text.str();
  }

 private:
  // Of the profile: FNV-1a of its figures.
  std::string fingerprint() const {
    uint64_t hash = 0xcbf29ce484222325;
    std::ostringstream all;
    all << std::hexfloat;
    for (const auto& [layout, kind, bytes, measured] : profile) {
      all << layout << ' ' << name(kind.collective) << ' ' << static_cast<int>(kind.dtype) << kind.cuda << ' ' << bytes;
      for (const auto* figures : {&measured.seconds, &measured.low, &measured.high}) {
        for (double value : *figures) all << ' ' << value;
      }
    }
    for (char byte : all.str()) hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001b3;
    std::ostringstream text;
    text << std::hex << hash;
    return text.str();
  }
};

}  // namespace zipccl
