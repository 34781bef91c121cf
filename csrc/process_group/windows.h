// What is known of values before they are sent: code windows from the standard deviations of a model's layers.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <utility>
#include <vector>

namespace zipccl {

// Of the values of one tensor.
struct KnownWindows {
  std::vector<int16_t> windows;                          // EncodeOptions::windows; a single one is for all chunks
  std::shared_ptr<const std::vector<uint32_t>> escapes;  // Call::escapes
};

// The windows for a run of `elements` values each of layers with this sigma; where it is 0, it is unknown.
std::vector<int16_t> windows_of_layers(const std::vector<std::pair<uint64_t, double>>& layers);

// plan() (codec.h) for a dense bf16 or fp32 tensor. On other devices than the processor, PyTorch's operators count
// there, and only chunks whose window does not fit come here; `by_operators`: so also on the processor, for tests.
std::vector<uint32_t> plan_tensor(const at::Tensor& values, std::vector<int16_t>& windows, bool by_operators = false);

// What is known of the values of this thread's next calls, until it says otherwise; null: nothing. Returns what was.
std::shared_ptr<const KnownWindows> set_known_windows(std::shared_ptr<const KnownWindows> known);

// A layer's values in memory.
struct LayerMemory {
  uintptr_t address = 0;
  uint64_t bytes = 0;
  double sigma = 0;
};
// Replaces what `owner` said before. From any thread.
void set_layers(uint64_t owner, std::vector<LayerMemory> layers);

// For every chunk of a dense tensor, as far as this thread or its memory's owner know; null: nothing is known.
std::shared_ptr<const KnownWindows> known_windows(const at::Tensor& tensor);

}  // namespace zipccl
