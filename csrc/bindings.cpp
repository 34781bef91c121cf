// zipccl._C: what the Python package is made of.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "process_group/ProcessGroupZipCCL.h"
#include "process_group/tensor.h"

namespace py = pybind11;
using namespace zipccl;

#ifdef ZIPCCL_CUDA
namespace zipccl {
void bind_cuda(py::module_& module);  // process_group/cuda/bindings.cpp
}
#endif

namespace {

at::Tensor encode_tensor(const at::Tensor& tensor, std::optional<double> sigma) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), "zipccl.encode: expects a CPU tensor, got one on ", tensor.device());
  const at::Tensor input = dense(tensor);
  const DType dtype = dtype_of(input);
  const uint64_t elements = message_elements(input);
  EncodeOptions options;
  options.checksum = true;
  std::vector<int16_t> tops;
  if (sigma) {
    tops.assign(chunk_count(elements), window_top(static_cast<float>(*sigma)));
    options.tops = tops.data();
  }
  at::Tensor output = at::empty({static_cast<int64_t>(contiguous_bound(elements, dtype))}, at::kByte);
  const uint64_t used = encode_contiguous(input.const_data_ptr(), elements, dtype, options, output.data_ptr<uint8_t>());
  return output.narrow(0, 0, static_cast<int64_t>(used)).clone();
}

void check_buffer(const at::Tensor& buffer) {
  TORCH_CHECK_VALUE(buffer.device().is_cpu() && buffer.scalar_type() == at::kByte && buffer.is_contiguous(),
                    "zipccl.decode: expects a contiguous uint8 CPU tensor");
}

void decode_into(const at::Tensor& buffer, at::Tensor output) {
  check_buffer(buffer);
  const Message message = contiguous_message(buffer.const_data_ptr<uint8_t>(), buffer.numel());
  decode(message, message_elements(output), dtype_of(output), output.data_ptr());
}

// The Python callable, which may be None, as a function that any thread may call and drop.
ProcessGroupZipCCL::CudaFactory as_factory(const py::object& callable) {
  if (callable.is_none()) return nullptr;
  const std::shared_ptr<py::object> shared(new py::object(callable), [](py::object* object) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire acquire;
    delete object;
  });
  return [shared](const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::Backend>& like,
                  const c10::intrusive_ptr<ZipCCLOptions>& options, const std::string& name) {
    const py::gil_scoped_acquire acquire;
    return (*shared)(store, like, options, name).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
}

// None where this PyTorch has no NCCL.
py::object nccl_class() {
  return py::getattr(py::module_::import("torch.distributed"), "ProcessGroupNCCL", py::none());
}

py::dict as_dict(const CollectiveStats& stats) {
  py::dict seconds;
  seconds["encode"] = stats.counters.encode_seconds;
  seconds["exchange"] = stats.counters.exchange_seconds;
  seconds["decode"] = stats.counters.decode_seconds;
  seconds["total"] = stats.counters.total_seconds;
  py::dict dict;
  dict["calls"] = stats.calls;
  dict["zipped"] = stats.zipped;
  dict["raw"] = stats.raw;
  dict["native"] = stats.native;
  dict["raw_bytes"] = stats.counters.raw_bytes;
  dict["wire_bytes"] = stats.counters.wire_bytes;
  dict["elements"] = stats.counters.elements;
  dict["escapes"] = stats.counters.escapes;
  dict["dynamic_bytes"] = stats.counters.dynamic_bytes;
  dict["seconds"] = seconds;
  return dict;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::register_exception<FormatError>(module, "FormatError", PyExc_ValueError);

  module.def("encode", &encode_tensor, py::arg("tensor"), py::arg("sigma"), py::call_guard<py::gil_scoped_release>());
  module.def("decode_into", &decode_into, py::arg("buffer"), py::arg("output"),
             py::call_guard<py::gil_scoped_release>());
  module.def("message", [](const at::Tensor& buffer) {
    check_buffer(buffer);
    const MessageHeader header = read_header(buffer.const_data_ptr<uint8_t>(), buffer.numel());
    return py::make_tuple(static_cast<int>(header.dtype), header.elements);
  });
  module.def("window_top", &window_top, py::arg("sigma"));
#ifdef ZIPCCL_CUDA
  module.attr("built_with_cuda") = true;
  bind_cuda(module);
#else
  module.attr("built_with_cuda") = false;
#endif

  py::class_<ZipCCLOptions, c10::intrusive_ptr<ZipCCLOptions>, c10d::Backend::Options>(module, "Options")
      .def(py::init<>())
      .def_property(
          "mode", [](const ZipCCLOptions& options) { return kRouteModes[static_cast<int>(options.mode)]; },
          [](ZipCCLOptions& options, const std::string& name) {
            const auto* found = std::find(std::begin(kRouteModes), std::end(kRouteModes), name);
            TORCH_CHECK_VALUE(found != std::end(kRouteModes), "zipccl: unknown mode '", name, "'");
            options.mode = static_cast<RouteMode>(found - kRouteModes);
            options.exchange.code = options.mode == RouteMode::kAuto || options.mode == RouteMode::kZip;
          })
      .def_property(
          "min_bytes", [](const ZipCCLOptions& options) { return options.exchange.min_bytes; },
          [](ZipCCLOptions& options, uint64_t bytes) { options.exchange.min_bytes = bytes; })
      .def_property(
          "segment_bytes", [](const ZipCCLOptions& options) { return options.exchange.segment_bytes; },
          [](ZipCCLOptions& options, uint64_t bytes) { options.exchange.segment_bytes = bytes; })
      .def_property(
          "inline_fraction", [](const ZipCCLOptions& options) { return options.exchange.inline_fraction; },
          [](ZipCCLOptions& options, double fraction) { options.exchange.inline_fraction = fraction; })
      .def_property(
          "cuda_segment_bytes", [](const ZipCCLOptions& options) { return options.cuda_segment_bytes; },
          [](ZipCCLOptions& options, uint64_t bytes) { options.cuda_segment_bytes = bytes; })
      .def_property(
          "cuda_over", [](const ZipCCLOptions& options) { return options.cuda_over_gloo ? "gloo" : "nccl"; },
          [](ZipCCLOptions& options, const std::string& name) { options.cuda_over_gloo = name == "gloo"; })
      .def_property(
          "checksum", [](const ZipCCLOptions& options) { return options.exchange.checksum; },
          [](ZipCCLOptions& options, bool checksum) { options.exchange.checksum = checksum; });

  py::class_<ProcessGroupZipCCL, c10::intrusive_ptr<ProcessGroupZipCCL>, c10d::Backend>(module, "ProcessGroupZipCCL")
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> plain,
                       c10::intrusive_ptr<c10d::Backend> exchange, c10::intrusive_ptr<ZipCCLOptions> options,
                       const py::object& cuda_factory) {
             auto factory = as_factory(cuda_factory);
             const py::gil_scoped_release release;
             return c10::make_intrusive<ProcessGroupZipCCL>(std::move(store), std::move(plain), std::move(exchange),
                                                            std::move(options), std::move(factory));
           }),
           py::arg("store"), py::arg("plain"), py::arg("exchange"), py::arg("options"), py::arg("cuda_factory"))
      .def_property_readonly("options", &ProcessGroupZipCCL::options)
      .def_property_readonly("plain", &ProcessGroupZipCCL::plain, "The wrapped backend for calls that are handed on.")
      // New groups are made afresh, members only: there is nothing for others to do.
      .def(
          "perform_nocolor_split", [](ProcessGroupZipCCL&, const py::object&) {}, py::arg("device"))
      // What frameworks call on NCCL's backend beyond c10d's own interface: register_mem_pool, _comm_ptr, ....
      .def("__getattr__",
           [](ProcessGroupZipCCL& group, const std::string& name) -> py::object {
             if (group.serves_cuda() && py::hasattr(nccl_class(), name.c_str())) {
               c10::intrusive_ptr<c10d::Backend> backend;
               {
                 const py::gil_scoped_release release;
                 backend = group.cuda_plain();
               }
               return py::cast(backend).attr(name.c_str());
             }
             throw py::attribute_error("'ProcessGroupZipCCL' object has no attribute '" + name + "'");
           })
      .def_property_readonly("exchange_backend", &ProcessGroupZipCCL::exchange_backend,
                             "The wrapped backend whose sends and receives carry the exchange; the worker's own.")
      .def("stats",
           [](ProcessGroupZipCCL& group) {
             py::dict all;
             for (const auto& [collective, stats] : group.stats()) all[collective.c_str()] = as_dict(stats);
             return all;
           })
      .def("reset_stats", &ProcessGroupZipCCL::reset_stats)
      .def_static("abort_all", &ProcessGroupZipCCL::abort_all, py::call_guard<py::gil_scoped_release>());
}
