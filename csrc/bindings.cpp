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
  std::vector<int16_t> windows;
  if (sigma) {
    windows.assign(chunk_count(elements), window_top(static_cast<float>(*sigma)));
    options.windows = windows.data();
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

constexpr Route kAllRoutes[] = {Route::kNative, Route::kRaw, Route::kZip, Route::kHierarchical};
constexpr Collective kAllCollectives[] = {Collective::kAllGather, Collective::kReduceScatter, Collective::kAllToAll,
                                          Collective::kAllReduce};

template <typename Value, size_t count>
Value of_name(const Value (&values)[count], const std::string& wanted, const char* what) {
  const auto* found =
      std::find_if(std::begin(values), std::end(values), [&](Value one) { return name(one) == wanted; });
  TORCH_CHECK_VALUE(found != std::end(values), "zipccl: unknown ", what, " '", wanted, "'");
  return *found;
}

const char* dtype_name(DType dtype) {
  return dtype == DType::kBFloat16 ? "bfloat16" : dtype == DType::kFloat32 ? "float32" : "other";
}

// Of the routes that there are.
py::dict as_dict(const RouteSeconds& seconds) {
  py::dict dict;
  for (Route route : kAllRoutes) {
    const double value = seconds[static_cast<int>(route)];
    if (value >= 0) dict[name(route)] = value;
  }
  return dict;
}

py::dict as_dict(const Decision& decision) {
  py::dict dict;
  dict["dtype"] = dtype_name(decision.dtype);
  dict["device"] = decision.cuda ? "cuda" : "cpu";
  dict["part_bytes"] = decision.part_bytes;
  dict["route"] = name(decision.route);
  dict["reason"] = decision.reason;
  dict["calls"] = decision.calls;
  dict["predicted"] = as_dict(decision.predicted);
  return dict;
}

py::dict as_dict(const ProfilePoint& point) {
  py::dict dict;
  dict["layout"] = point.layout;
  dict["collective"] = name(point.kind.collective);
  dict["dtype"] = dtype_name(point.kind.dtype);
  dict["device"] = point.kind.cuda ? "cuda" : "cpu";
  dict["part_bytes"] = point.bytes;
  dict["seconds"] = as_dict(point.measured.seconds);
  dict["low"] = as_dict(point.measured.low);
  dict["high"] = as_dict(point.measured.high);
  dict["ratio"] = point.measured.ratio;
  dict["encode_seconds"] = point.measured.encode_seconds;
  dict["decode_seconds"] = point.measured.decode_seconds;
  return dict;
}

ProfilePoint as_point(const py::dict& dict) {
  ProfilePoint point;
  point.layout = dict["layout"].cast<std::string>();
  point.kind.collective = of_name(kAllCollectives, dict["collective"].cast<std::string>(), "collective");
  const auto dtype = dict["dtype"].cast<std::string>();
  TORCH_CHECK_VALUE(dtype == "bfloat16" || dtype == "float32", "zipccl: unknown dtype '", dtype, "'");
  point.kind.dtype = dtype == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
  point.kind.cuda = dict["device"].cast<std::string>() == "cuda";
  point.bytes = dict["part_bytes"].cast<uint64_t>();
  for (const auto& [figure, seconds] :
       {std::pair{"seconds", &point.measured.seconds}, std::pair{"low", &point.measured.low},
        std::pair{"high", &point.measured.high}}) {
    for (const auto& [route, value] : dict[figure].cast<std::map<std::string, double>>()) {
      (*seconds)[static_cast<int>(of_name(kAllRoutes, route, "route"))] = value;
    }
  }
  point.measured.ratio = dict["ratio"].cast<double>();
  point.measured.encode_seconds = dict["encode_seconds"].cast<double>();
  point.measured.decode_seconds = dict["decode_seconds"].cast<double>();
  return point;
}

py::dict as_dict(const CollectiveStats& stats) {
  py::dict seconds;
  seconds["encode"] = stats.counters.encode_seconds;
  seconds["exchange"] = stats.counters.exchange_seconds;
  seconds["static"] = stats.counters.exchange_seconds - stats.counters.dynamic_seconds;
  seconds["dynamic"] = stats.counters.dynamic_seconds;
  seconds["decode"] = stats.counters.decode_seconds;
  seconds["total"] = stats.counters.total_seconds;
  py::dict dict;
  dict["calls"] = stats.calls;
  dict["zipped"] = stats.zipped;
  dict["raw"] = stats.raw;
  dict["native"] = stats.native;
  dict["raw_bytes"] = stats.counters.raw_bytes;
  dict["wire_bytes"] = stats.counters.wire_bytes;
  dict["local_bytes"] = stats.counters.local_bytes;
  dict["elements"] = stats.counters.elements;
  dict["escapes"] = stats.counters.escapes;
  dict["dynamic_bytes"] = stats.counters.dynamic_bytes;
  dict["sampled_chunks"] = stats.counters.sampled_chunks;
  dict["seconds"] = seconds;
  py::list decisions;
  for (const Decision& decision : stats.decisions) decisions.append(as_dict(decision));
  dict["decisions"] = decisions;
  return dict;
}

at::Tensor as_shorts(const std::vector<int16_t>& windows) { return at::tensor(windows, at::kShort); }

std::vector<int16_t> from_shorts(const at::Tensor& windows) {
  TORCH_CHECK_VALUE(windows.is_cpu() && windows.scalar_type() == at::kShort && windows.is_contiguous(),
                    "zipccl: windows are a contiguous int16 CPU tensor");
  const auto* data = windows.const_data_ptr<int16_t>();
  return {data, data + windows.numel()};
}

void bind_windows(py::module_& module) {
  module.def(
      "windows_of_layers",
      [](const std::vector<std::pair<uint64_t, double>>& layers) { return as_shorts(windows_of_layers(layers)); },
      py::arg("layers"));
  module.def(
      "plan",
      [](const at::Tensor& values, const at::Tensor& windows, bool by_operators) {
        auto chosen = from_shorts(windows);
        const auto escapes = plan_tensor(values, chosen, by_operators);
        return std::pair{as_shorts(chosen), at::tensor(std::vector<int>(escapes.begin(), escapes.end()), at::kInt)};
      },
      py::arg("values"), py::arg("windows"), py::arg("by_operators") = false, py::call_guard<py::gil_scoped_release>());
  module.def(
      "set_layers",
      [](uint64_t owner, const std::vector<std::tuple<uintptr_t, uint64_t, double>>& layers) {
        std::vector<LayerMemory> memory;
        for (const auto& [address, bytes, sigma] : layers) memory.push_back({address, bytes, sigma});
        set_layers(owner, std::move(memory));
      },
      py::arg("owner"), py::arg("layers"));
  py::class_<KnownWindows, std::shared_ptr<KnownWindows>>(module, "KnownWindows")
      .def(py::init([](const at::Tensor& windows, const std::optional<at::Tensor>& escapes) {
             auto known = std::make_shared<KnownWindows>();
             known->windows = from_shorts(windows);
             if (escapes) {
               TORCH_CHECK_VALUE(escapes->is_cpu() && escapes->scalar_type() == at::kInt && escapes->is_contiguous(),
                                 "zipccl: escapes are a contiguous int32 CPU tensor");
               const auto* data = escapes->const_data_ptr<int>();
               known->escapes = std::make_shared<std::vector<uint32_t>>(data, data + escapes->numel());
             }
             return known;
           }),
           py::arg("windows"), py::arg("escapes") = std::nullopt);
  module.def(
      "set_known_windows",
      [](std::shared_ptr<KnownWindows> known) {
        return std::const_pointer_cast<KnownWindows>(set_known_windows(std::move(known)));
      },
      py::arg("known"));
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
  module.def("escape_rate", &escape_rate, py::arg("sigma"), py::arg("top"));
  bind_windows(module);
#ifdef ZIPCCL_CUDA
  module.attr("built_with_cuda") = true;
  bind_cuda(module);
#else
  module.attr("built_with_cuda") = false;
#endif

  py::class_<ZipCCLOptions, c10::intrusive_ptr<ZipCCLOptions>, c10d::Backend::Options>(module, "Options")
      .def(py::init<>())
      .def_property(
          "mode", [](const ZipCCLOptions& options) { return options.mode ? name(*options.mode) : "auto"; },
          [](ZipCCLOptions& options, const std::string& mode) {
            options.mode = std::nullopt;
            if (mode != "auto") options.mode = of_name(kAllRoutes, mode, "mode");
          })
      .def_readwrite("host", &ZipCCLOptions::host)
      .def_readwrite("bf16_partial_sums", &ZipCCLOptions::bf16_partial_sums)
      .def_property(
          "points",
          [](const ZipCCLOptions& options) {
            py::list points;
            for (const ProfilePoint& point : options.profile) points.append(as_dict(point));
            return points;
          },
          [](ZipCCLOptions& options, const std::vector<py::dict>& points) {
            options.profile.clear();
            for (const py::dict& point : points) options.profile.push_back(as_point(point));
          },
          "What was measured: ProcessGroupZipCCL.profile() of an earlier group.")
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
          [](ZipCCLOptions& options, bool checksum) { options.exchange.checksum = checksum; })
      .def_property(
          "two_phase", [](const ZipCCLOptions& options) { return options.exchange.two_phase; },
          [](ZipCCLOptions& options, bool two_phase) { options.exchange.two_phase = two_phase; })
      .def_property(
          "window", [](const ZipCCLOptions& options) { return options.use_known_windows ? "sigma" : "sample"; },
          [](ZipCCLOptions& options, const std::string& name) { options.use_known_windows = name == "sigma"; });

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
      .def("profile",
           [](ProcessGroupZipCCL& group) {
             py::list points;
             for (const ProfilePoint& point : group.profile()) points.append(as_dict(point));
             return points;
           })
      .def_property_readonly(
          "hosts",
          [](const ProcessGroupZipCCL& group) {
            std::vector<std::vector<int>> hosts;
            for (int host = 0; host < group.hosts().count(); host++) hosts.push_back(group.hosts().ranks(host));
            return hosts;
          },
          "The ranks of each host.")
      .def("reset_stats", &ProcessGroupZipCCL::reset_stats)
      .def_static("abort_all", &ProcessGroupZipCCL::abort_all, py::call_guard<py::gil_scoped_release>());
}
