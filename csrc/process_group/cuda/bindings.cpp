// The GPU codec on tensors, for tests and benchmarks on a machine that has a GPU. Asynchronous, on the current stream.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/utils/pybind.h>

#include "codec/cuda/batch.h"
#include "process_group/cuda_calls.h"

namespace py = pybind11;

namespace zipccl {
namespace {

// A message's memory: static part, pool beyond the inline one, low halves.
using Parts = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

uint64_t inline_bytes_of(uint64_t elements, const at::Tensor& statics) {
  const auto bytes = static_cast<uint64_t>(statics.numel());
  TORCH_CHECK_VALUE(bytes >= pool_offset(elements), "zipccl: a static part of ", bytes, " bytes is too short for ",
                    elements, " elements");
  return bytes - pool_offset(elements);
}

DType check_codable(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cuda() && is_dense(tensor) && dtype_of(tensor) != DType::kBytes,
                    "zipccl: expects a contiguous CUDA tensor of bfloat16 or float32");
  return dtype_of(tensor);
}

cuda::Incoming incoming(const Parts& parts, uint64_t elements) {
  const auto& [statics, pool, low] = parts;
  cuda::Incoming message = {};
  message.statics = statics.const_data_ptr<uint8_t>();
  message.pool = pool.const_data_ptr<uint8_t>();
  message.low = low.const_data_ptr<uint8_t>();
  message.pool_room = pool.numel();
  message.low_room = low.numel();
  message.elements = elements;
  message.inline_bytes = inline_bytes_of(elements, statics);
  return message;
}

std::tuple<uint64_t, uint64_t, uint64_t> message_bytes(const at::Tensor& tensor, uint64_t inline_bytes) {
  const uint64_t elements = tensor.numel(), bound = pool_bound(elements);
  inline_bytes = std::min(inline_bytes, bound);
  return {static_bytes(elements, inline_bytes), bound - inline_bytes, low_bound(elements, dtype_of(tensor))};
}

void encode_tensor(const at::Tensor& tensor, const Parts& parts, const std::optional<at::Tensor>& windows) {
  const DType dtype = check_codable(tensor);
  const c10::cuda::CUDAGuard guard(tensor.device());
  const auto& [statics, pool, low] = parts;
  cuda::Outgoing message = {};
  message.values = tensor.const_data_ptr();
  message.elements = tensor.numel();
  message.statics = statics.data_ptr<uint8_t>();
  message.pool = pool.data_ptr<uint8_t>();
  message.low = low.data_ptr<uint8_t>();
  message.inline_bytes = inline_bytes_of(tensor.numel(), statics);
  message.scale = 1.0f;
  if (windows) {
    TORCH_CHECK_VALUE(windows->is_cuda() && windows->scalar_type() == at::kShort && windows->is_contiguous() &&
                          static_cast<uint64_t>(windows->numel()) == chunk_count(tensor.numel()),
                      "zipccl: expects one int16 window top a chunk");
    message.windows = windows->const_data_ptr<int16_t>();
  }
  cuda::encode({message}, dtype, nullptr, at::cuda::getCurrentCUDAStream());
}

// The findings, which the caller may look at once the stream is done: fault, message, chunk (two words), deferred.
at::Tensor new_findings(const at::Tensor& like) {
  return at::zeros({sizeof(cuda::Findings) / 4}, like.options().dtype(at::kInt));
}

at::Tensor decode_tensor(const Parts& parts, at::Tensor output) {
  const DType dtype = check_codable(output);
  const c10::cuda::CUDAGuard guard(output.device());
  at::Tensor findings = new_findings(output);
  cuda::Incoming message = incoming(parts, output.numel());
  message.output = output.data_ptr();
  cuda::decode({message}, dtype, reinterpret_cast<cuda::Findings*>(findings.data_ptr<int>()),
               at::cuda::getCurrentCUDAStream());
  return findings;
}

at::Tensor reduce_tensors(const std::vector<Parts>& messages, at::Tensor output, double divisor) {
  const DType dtype = check_codable(output);
  const c10::cuda::CUDAGuard guard(output.device());
  at::Tensor findings = new_findings(output);
  std::vector<cuda::Incoming> list;
  for (const Parts& parts : messages) list.push_back(incoming(parts, output.numel()));
  at::Tensor accumulator;
  if (list.size() > cuda::kBatch) accumulator = at::empty({output.numel()}, output.options().dtype(at::kFloat));
  const cuda::Reducing reducing = {Reduction::kSum,
                                   static_cast<float>(divisor),
                                   static_cast<uint64_t>(output.numel()),
                                   accumulator.defined() ? accumulator.data_ptr<float>() : nullptr,
                                   output.data_ptr(),
                                   dtype,
                                   0,
                                   false};
  cuda::reduce(list, dtype, reducing, reinterpret_cast<cuda::Findings*>(findings.data_ptr<int>()),
               at::cuda::getCurrentCUDAStream());
  return findings;
}

}  // namespace

void bind_cuda(py::module_& module) {
  module.def("cuda_message_bytes", &message_bytes, py::arg("tensor"), py::arg("inline_bytes"));
  module.def("cuda_encode", &encode_tensor, py::arg("tensor"), py::arg("parts"), py::arg("windows") = std::nullopt);
  module.def("cuda_decode", &decode_tensor, py::arg("parts"), py::arg("output"));
  module.def("cuda_reduce", &reduce_tensors, py::arg("messages"), py::arg("output"), py::arg("divisor") = 1.0);
}

}  // namespace zipccl
