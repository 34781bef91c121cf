// What Gloo's collectives know and lack beside NCCL's, and how the rest is made of what they have.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "process_group/tensor.h"

namespace zipccl {

// dtypes that Gloo's collectives know. It moves the others as bytes.
inline bool gloo_knows(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

inline Tensors as_gloo_knows(const char* collective, const Tensors& tensors) {
  Tensors known;
  for (const auto& tensor : tensors) {
    if (gloo_knows(tensor.scalar_type())) {
      known.push_back(tensor);
      continue;
    }
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "zipccl ", collective, ": a tensor of dtype ", tensor.scalar_type(),
                      " must be contiguous");
    known.push_back(tensor.view({-1}).view(at::kByte));
  }
  return known;
}

inline std::vector<Tensors> as_gloo_knows(const char* collective, const std::vector<Tensors>& lists) {
  std::vector<Tensors> known;
  for (const auto& list : lists) known.push_back(as_gloo_knows(collective, list));
  return known;
}

// Whether Gloo lacks a reduction of any of these that an NCCL user expects.
inline bool gloo_lacks(const c10d::ReduceOp& operation, const Tensors& tensors) {
  return operation == c10d::ReduceOp::PREMUL_SUM ||
         (operation == c10d::ReduceOp::AVG && std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
            return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
          }));
}

inline at::Tensor premul_factor(const c10d::ReduceOp& operation) {
  const auto* supplement = static_cast<const c10d::NCCLPreMulSumSupplement*>(operation.supplement_.get());
  TORCH_CHECK_VALUE(supplement, "zipccl: a PREMUL_SUM without its factor");
  if (supplement->tensor_factor.defined()) return supplement->tensor_factor.to(at::kCPU);
  return at::scalar_tensor(supplement->double_factor, at::kDouble);
}

// The two ends of a reduction made of the wrapped backend's SUM: what is summed, and what the sum becomes. Summing
// in fp32 spares 16-bit floats all roundings but the last.
inline at::Tensor to_be_summed(const at::Tensor& tensor, const c10d::ReduceOp& operation) {
  const bool small_float = at::isFloatingType(tensor.scalar_type()) && tensor.element_size() < 4;
  at::Tensor summand = small_float ? tensor.to(at::kFloat) : tensor.clone(at::MemoryFormat::Contiguous);
  summand = dense(summand);
  if (operation == c10d::ReduceOp::PREMUL_SUM) {
    summand = (summand * premul_factor(operation).to(summand.is_floating_point() ? summand.scalar_type() : at::kDouble))
                  .to(summand.scalar_type());
  }
  return summand;
}

inline void from_sum(const at::Tensor& output, const at::Tensor& sum, const c10d::ReduceOp& operation, int size) {
  at::Tensor result = sum.view(output.sizes());
  if (operation == c10d::ReduceOp::AVG) {
    result = at::isIntegralType(output.scalar_type(), false) ? at::div(result, size, "trunc") : at::div(result, size);
  }
  output.copy_(result);
}

// Gloo takes a tensor's memory from its first to its last element for its values.
inline void check_no_gaps(const char* collective, const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.layout() != at::kStrided || tensor.is_non_overlapping_and_dense(), "zipccl ", collective,
                      ": the tensor must not have gaps, its strides are ", tensor.strides(),
                      "; pass a contiguous tensor and copy it");
  }
}

// Gloo compares shapes where NCCL counts elements: flattened, tensors of as many elements are the same to it.
inline Tensors flat(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) views.push_back(dense(tensor).view({-1}));
  return views;
}

inline bool all_known(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return gloo_knows(tensor.scalar_type()); });
}

// Whether `whole` is `size` tensors like `part`, one below the other.
inline bool is_rows_of(const at::Tensor& whole, const at::Tensor& part, int size) {
  return part.dim() > 0 && whole.dim() == part.dim() && whole.size(0) == size * part.size(0) &&
         whole.sizes().slice(1) == part.sizes().slice(1);
}

inline bool are_rows_of(const Tensors& wholes, const Tensors& parts, int size) {
  for (size_t i = 0; i < wholes.size(); i++) {
    if (!is_rows_of(wholes[i], parts[i], size)) return false;
  }
  return true;
}

}  // namespace zipccl
