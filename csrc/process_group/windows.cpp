#include "process_group/windows.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "codec/codec.h"
#include "process_group/tensor.h"

namespace zipccl {
namespace {

// A layer's part of a chunk.
struct Share {
  double elements;
  double sigma;
};

// That escapes the fewest values; negative where too much is unknown.
int16_t window_of_shares(const std::vector<Share>& shares) {
  double unknown = 0, all = 0;
  for (const auto& [elements, sigma] : shares) {
    all += elements;
    if (sigma <= 0) unknown += elements;
  }
  if (unknown * 16 > all) return -1;
  int best = -1;
  double fewest = 0;
  for (const Share& candidate : shares) {
    if (candidate.sigma <= 0) continue;
    const int top = window_top(static_cast<float>(candidate.sigma));
    double escapes = 0;
    for (const auto& [elements, sigma] : shares) {
      if (sigma > 0) escapes += elements * escape_rate(sigma, top);
    }
    if (best >= 0 && escapes >= fewest) continue;
    best = top;
    fewest = escapes;
  }
  return static_cast<int16_t>(best);
}

thread_local std::shared_ptr<const KnownWindows> known_to_thread;

std::mutex layers_mutex;
std::map<uint64_t, std::vector<LayerMemory>> layers_of_owners;  // each sorted by address

}  // namespace

std::vector<int16_t> windows_of_layers(const std::vector<std::pair<uint64_t, double>>& layers) {
  std::vector<int16_t> windows;
  std::vector<Share> shares;
  uint64_t room = kChunkElements;
  const auto end_chunk = [&] {
    windows.push_back(window_of_shares(shares));
    shares.clear();
    room = kChunkElements;
  };
  for (auto [elements, sigma] : layers) {
    while (elements != 0) {
      const uint64_t here = std::min(elements, room);
      shares.push_back({static_cast<double>(here), sigma});
      elements -= here;
      room -= here;
      if (room == 0) end_chunk();
    }
  }
  if (!shares.empty()) end_chunk();
  return windows;
}

std::vector<uint32_t> plan_tensor(const at::Tensor& values, std::vector<int16_t>& windows, bool by_operators) {
  const DType dtype = dtype_of(values);
  const auto elements = static_cast<uint64_t>(values.numel());
  TORCH_CHECK_VALUE(dtype != DType::kBytes && is_dense(values) && windows.size() == chunk_count(elements),
                    "zipccl: a plan is of a dense bf16 or fp32 tensor, and has one window a chunk");
  std::vector<uint32_t> escapes(windows.size());
  if (values.is_cpu() && !by_operators) {
    plan(values.const_data_ptr(), elements, dtype, windows.data(), escapes.data());
    return escapes;
  }
  at::Tensor upper = values.view({-1}).view(at::kShort);
  if (dtype == DType::kFloat32) upper = upper.view({-1, 2}).select(1, 1);
  const auto options = at::TensorOptions().dtype(at::kInt);
  at::Tensor given = at::empty({static_cast<int64_t>(windows.size())}, options);
  std::copy(windows.begin(), windows.end(), given.data_ptr<int>());
  const at::Tensor window = given.to(values.device()).repeat_interleave(kChunkElements).narrow(0, 0, upper.numel());
  const at::Tensor exponent = upper.to(at::kInt).bitwise_right_shift(7).bitwise_and(0xff);
  const at::Tensor zeros = window.ge(256);
  const at::Tensor below = window.sub(exponent).bitwise_and(0xff);
  at::Tensor escaped = below.ge(at::where(zeros, 6, 7)).logical_and(zeros.logical_and(exponent.eq(0)).logical_not());
  escaped = escaped.logical_or(window.lt(0)).to(at::kInt);
  escaped = at::constant_pad_nd(escaped, {0, static_cast<int64_t>(windows.size() * kChunkElements) - escaped.numel()});
  const at::Tensor counts = escaped.view({-1, kChunkElements}).sum(1, false, at::kInt).cpu();
  for (uint64_t chunk = 0; chunk < windows.size(); chunk++) {
    escapes[chunk] = static_cast<uint32_t>(counts.const_data_ptr<int>()[chunk]);
    const uint32_t count = chunk_elements(elements, chunk);
    if (escapes[chunk] <= count / 16) continue;
    const at::Tensor here = values.view({-1}).narrow(0, static_cast<int64_t>(chunk * kChunkElements), count).cpu();
    plan(here.const_data_ptr(), count, dtype, &windows[chunk], &escapes[chunk]);
  }
  return escapes;
}

std::shared_ptr<const KnownWindows> set_known_windows(std::shared_ptr<const KnownWindows> known) {
  std::swap(known, known_to_thread);
  return known;
}

void set_layers(uint64_t owner, std::vector<LayerMemory> layers) {
  std::sort(layers.begin(), layers.end(), [](const auto& a, const auto& b) { return a.address < b.address; });
  std::lock_guard<std::mutex> lock(layers_mutex);
  layers_of_owners.erase(owner);
  if (!layers.empty()) layers_of_owners[owner] = std::move(layers);
}

std::shared_ptr<const KnownWindows> known_windows(const at::Tensor& tensor) {
  const uint64_t chunks = chunk_count(tensor.numel());
  if (chunks == 0) return nullptr;
  if (known_to_thread) {
    const auto& known = *known_to_thread;
    if (known.windows.size() == chunks && (known.escapes == nullptr || known.escapes->size() == chunks)) {
      return known_to_thread;
    }
    if (known.windows.size() != 1) return nullptr;  // of other values than these
    auto all = std::make_shared<KnownWindows>();
    all->windows.assign(chunks, known.windows[0]);
    return all;
  }
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t end = begin + tensor.nbytes();
  std::vector<std::pair<uint64_t, double>> runs;
  {
    std::lock_guard<std::mutex> lock(layers_mutex);
    for (const auto& [owner, layers] : layers_of_owners) {
      auto layer = std::upper_bound(layers.begin(), layers.end(), begin,
                                    [](uintptr_t at, const LayerMemory& one) { return at < one.address + one.bytes; });
      if (layer == layers.end() || layer->address >= end) continue;
      uintptr_t at = begin;
      const auto run_to = [&](uintptr_t to, double sigma) {
        to = std::min(to, end);
        if (to > at) runs.emplace_back((to - at) / tensor.element_size(), sigma);
        at = std::max(at, to);
      };
      for (; layer != layers.end() && layer->address < end; ++layer) {
        run_to(layer->address, 0);
        run_to(layer->address + layer->bytes, layer->sigma);
      }
      run_to(end, 0);
      break;
    }
  }
  if (runs.empty()) return nullptr;
  auto known = std::make_shared<KnownWindows>();
  known->windows = windows_of_layers(runs);
  return known->windows.size() == chunks ? known : nullptr;
}

}  // namespace zipccl
