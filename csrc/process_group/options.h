// What a user can choose for a group; zipccl/options.py documents each for users.
#pragma once

#include <iomanip>
#include <limits>
#include <sstream>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives/exchange.h"

namespace zipccl {

enum class RouteMode { kAuto, kZip, kRaw, kNative };
constexpr const char* kRouteModes[] = {"auto", "zip", "raw", "native"};

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

  RouteMode mode = RouteMode::kAuto;
  ExchangeOptions exchange;
  // Of calls on CUDA tensors: kernels and links want longer segments.
  uint64_t cuda_segment_bytes = 64 << 20;
  // CUDA tensors go over Gloo, through processor memory, rather than over NCCL.
  bool cuda_over_gloo = false;

  // Everything that all ranks of a group must have in common, for the agreement when it is made.
  std::string describe() const {
    std::ostringstream text;
    text << std::setprecision(std::numeric_limits<double>::max_digits10) << "wire format " << kVersion << ", mode='"
         << kRouteModes[static_cast<int>(mode)] << "', min_bytes=" << exchange.min_bytes
         << ", segment_bytes=" << exchange.segment_bytes << ", inline_fraction=" << exchange.inline_fraction
         << ", checksum=" << (exchange.checksum ? "True" : "False") << ", cuda_segment_bytes=" << cuda_segment_bytes
         << ", cuda_over='" << (cuda_over_gloo ? "gloo" : "nccl") << "'";
    return text.str();
  }
};

}  // namespace zipccl
