// Tensors as messages see them.
#pragma once

#include <ATen/ATen.h>

#include "codec/format.h"

namespace zipccl {

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

}  // namespace zipccl
