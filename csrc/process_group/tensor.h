// Tensors as messages and jobs see them, and what is checked of them.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "codec/format.h"

namespace zipccl {

using Tensors = std::vector<at::Tensor>;

inline DType dtype_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 ? DType::kBFloat16
         : tensor.scalar_type() == at::kFloat  ? DType::kFloat32
                                               : DType::kBytes;
}

// Elements as a message counts them: bytes, where the dtype is not one that is coded.
inline uint64_t message_elements(const at::Tensor& tensor) {
  return dtype_of(tensor) == DType::kBytes ? tensor.nbytes() : tensor.numel();
}

// Whether the tensor's memory holds its values, one after the other.
inline bool is_dense(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

inline at::Tensor dense(const at::Tensor& tensor) { return tensor.contiguous().resolve_conj().resolve_neg(); }

inline bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* a_begin = static_cast<const char*>(a.const_data_ptr());
  const auto* b_begin = static_cast<const char*>(b.const_data_ptr());
  return a_begin < b_begin + b.nbytes() && b_begin < a_begin + a.nbytes();
}

// Where a job writes: the tensor itself, or a dense stand-in that is copied back.
class Target {
 public:
  explicit Target(const at::Tensor& tensor)
      : tensor_(tensor), dense_(is_dense(tensor) ? tensor : at::empty(tensor.sizes(), tensor.options())) {}
  const at::Tensor& dense() const { return dense_; }
  void copy_back() {
    if (!dense_.is_same(tensor_)) tensor_.copy_(dense_);
  }

 private:
  at::Tensor tensor_;
  at::Tensor dense_;
};

inline std::vector<Target> targets_of(const Tensors& tensors) { return {tensors.begin(), tensors.end()}; }

inline void check_same_dtype(const char* collective, const Tensors& tensors, const at::Tensor& like) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.scalar_type() == like.scalar_type(), "zipccl ", collective,
                      ": all tensors of a call have one dtype, got ", tensor.scalar_type(), " and ",
                      like.scalar_type());
  }
}

inline void check_contiguous(const char* collective, const at::Tensor& output) {
  TORCH_CHECK_VALUE(is_dense(output), "zipccl ", collective, ": the output tensor must be contiguous, its strides are ",
                    output.strides(), "; pass a contiguous tensor and copy it, or use the list form");
}

inline uint64_t largest(const Tensors& tensors) {
  uint64_t bytes = 0;
  for (const auto& tensor : tensors) bytes = std::max<uint64_t>(bytes, tensor.nbytes());
  return bytes;
}

inline bool same_sizes(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.numel() == tensors[0].numel(); });
}

inline bool all_dense(const Tensors& tensors) { return std::all_of(tensors.begin(), tensors.end(), is_dense); }

inline bool same_dtype(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.scalar_type() == tensors[0].scalar_type(); });
}

inline bool have_shape(const Tensors& tensors, const at::Tensor& like) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.sizes() == like.sizes(); });
}

inline Tensors chunks(const at::Tensor& tensor, int size) {
  const int64_t elements = tensor.numel() / size;
  const at::Tensor flat = tensor.view({-1});
  Tensors parts;
  for (int r = 0; r < size; r++) parts.push_back(flat.narrow(0, r * elements, elements));
  return parts;
}

}  // namespace zipccl
