#include "process_group/ProcessGroupZipCCL.h"

#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "collectives/backend_transport.h"
#include "process_group/gloo.h"

namespace zipccl {
namespace {

using c10d::OpType;
using c10d::ReduceOp;

// Not with a factor in GPU memory, for which the host would have to wait.
bool reduces_in_fp32(const ReduceOp& operation) {
  if (operation == ReduceOp::PREMUL_SUM) {
    const auto* factor = static_cast<const c10d::NCCLPreMulSumSupplement*>(operation.supplement_.get());
    if (factor != nullptr && factor->tensor_factor.defined() && !factor->tensor_factor.is_cpu()) return false;
  }
  return operation == ReduceOp::SUM || operation == ReduceOp::AVG || operation == ReduceOp::PREMUL_SUM ||
         operation == ReduceOp::MIN || operation == ReduceOp::MAX;
}

Reduce reduce_of(const ReduceOp& operation, int size, const ZipCCLOptions& options) {
  Reduce reduce;
  reduce.bf16_partial_sums = options.bf16_partial_sums;
  if (operation == ReduceOp::MIN) reduce.reduction = Reduction::kMin;
  if (operation == ReduceOp::MAX) reduce.reduction = Reduction::kMax;
  if (operation == ReduceOp::AVG) reduce.divisor = static_cast<float>(size);
  if (operation == ReduceOp::PREMUL_SUM) reduce.scale = premul_factor(operation).item<float>();
  return reduce;
}

std::shared_ptr<void> profiler_span(const char* name) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  auto span = std::make_shared<at::RecordFunction>(std::move(*callbacks));
  span->before(name);
  return span;
}

// Throws on all ranks if they have not the same options; where each of them is, else.
Hosts check_agreement(c10d::Store& store, int rank, int size, const ZipCCLOptions& options) {
  const auto key = [](int rank) { return c10::str("zipccl/options/", rank); };
  const std::string seen = "zipccl/options/seen";
  const std::string mine = options.describe(), said = mine + "\n" + options.host;
  store.set(key(rank), std::vector<uint8_t>(said.begin(), said.end()));
  std::string others;
  std::vector<std::string> hosts;
  for (int other = 0; other < size; other++) {
    const auto value = store.get(key(other));
    const std::string text(value.begin(), value.end());
    const std::string theirs = text.substr(0, text.find('\n'));
    hosts.push_back(text.substr(std::min(theirs.size() + 1, text.size())));
    if (theirs != mine) others += c10::str(", rank ", other, " has ", theirs);
  }
  store.add(seen, 1);
  if (others.empty()) return Hosts(hosts);
  // The rank that ends first may take the store with it: let all of them see first.
  for (int tries = 0; tries < 100 && store.add(seen, 0) < size; tries++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  TORCH_CHECK(false, "zipccl: the ranks of the group do not agree: rank ", rank, " has ", mine, others,
              ". Install one version everywhere and give all ranks the same zipccl.Options and ZIPCCL_* variables.");
}

bool on_cuda(const Tensors& tensors) { return !tensors.empty() && tensors[0].is_cuda(); }

// Never destroyed: a group may outlive this file's statics.
std::mutex& live_mutex = *new std::mutex;
std::set<ProcessGroupZipCCL*>& live_groups = *new std::set<ProcessGroupZipCCL*>;  // guarded by live_mutex

}  // namespace

void ProcessGroupZipCCL::abort_all() {
  std::lock_guard<std::mutex> lock(live_mutex);
  for (auto* group : live_groups) {
    group->abort();
    group->worker_.stop();
    std::lock_guard<std::mutex> cuda_lock(group->cuda_mutex_);
    group->cuda_calls_.reset();
  }
}

ProcessGroupZipCCL::ProcessGroupZipCCL(Ptr<c10d::Store> store, Ptr<c10d::Backend> plain, Ptr<c10d::Backend> exchange,
                                       Ptr<ZipCCLOptions> options, CudaFactory cuda_factory)
    : c10d::Backend(plain->getRank(), plain->getSize()),
      store_(std::move(store)),
      plain_(std::move(plain)),
      exchange_(std::move(exchange)),
      options_(std::move(options)),
      cuda_factory_(std::move(cuda_factory)),
      transport_(std::make_unique<BackendTransport>(exchange_)),
      host_state_(size_) {
  init();
  host_services_.trace = profiler_span;
  host_services_.side_by_side = [this](const auto& tasks) { crew_.run(tasks); };
  coder_name();  // a ZIPCCL_CPU that this processor cannot run fails here, on this rank's thread
  hosts_ = check_agreement(*store_, rank_, size_, *options_);
  for (const ProfilePoint& point : options_->profile) {
    if (point.layout == hosts_.describe()) switcher_.add(point.kind, point.bytes, point.measured);
  }
  std::lock_guard<std::mutex> lock(live_mutex);
  live_groups.insert(this);
}

ProcessGroupZipCCL::~ProcessGroupZipCCL() {
  // The last reference to a tensor and the callbacks of a future may need the GIL, so it must not be held while waiting
  // for threads, ours or Gloo's.
  std::optional<pybind11::gil_scoped_release> release;
  if (Py_IsInitialized() && PyGILState_Check()) release.emplace();
  {
    std::lock_guard<std::mutex> lock(live_mutex);
    live_groups.erase(this);
  }
  worker_.stop();
  coalesced_.clear();
  cuda_coalesced_.clear();
  cuda_calls_.reset();  // waits for its worker
  cuda_exchanges_.clear();
  cuda_plain_.reset();
  close_exchange();
  plain_.reset();
}

// ---- All-gather

bool ProcessGroupZipCCL::exchangeable(const at::Tensor& tensor) const {
  if (dtype_of(tensor) == DType::kBytes) return false;
#ifdef ZIPCCL_CUDA
  if (tensor.is_cuda()) return cuda_calls_possible(tensor.device().index());
#endif
  return true;
}

std::shared_ptr<const KnownWindows> ProcessGroupZipCCL::known_of(const at::Tensor& tensor) const {
  return options_->use_known_windows && exchangeable(tensor) ? known_windows(tensor) : nullptr;
}

Job ProcessGroupZipCCL::all_gather_job(Route route, const Tensors& outputs, const at::Tensor& input) {
  auto targets = targets_of(outputs);
  at::Tensor source = dense(input);
  for (int r = 0; r < size_; r++) {
    const at::Tensor& target = targets[r].dense();
    const bool in_place = r == rank_ && target.const_data_ptr() == source.const_data_ptr();
    if (!in_place && overlap(source, target)) source = source.clone();
  }
  return [route, targets, source, known = known_of(source)](Exchange& exchange, uint64_t sequence) mutable {
    Call call{Collective::kAllGather, sequence, dtype_of(source), 0, 0, route};
    Part input{source.const_data_ptr(), message_elements(source)};
    if (known) {
      input.windows = known->windows.data();
      call.escapes = known->escapes;
    }
    std::vector<void*> outputs;
    std::vector<uint64_t> elements;
    for (const auto& target : targets) {
      outputs.push_back(target.dense().data_ptr());
      elements.push_back(message_elements(target.dense()));
    }
    zipccl::all_gather(exchange, call, input, outputs, elements);
    for (auto& target : targets) target.copy_back();
  };
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                             const c10d::AllgatherOptions& options) {
  constexpr auto kName = "all_gather";
  TORCH_CHECK_VALUE(inputs.size() == 1 && outputs.size() == 1, "zipccl ", kName, ": expects one input and one list");
  TORCH_CHECK_VALUE(outputs[0].size() == static_cast<size_t>(size_), "zipccl ", kName, ": expects ", size_,
                    " output tensors, one a rank, got ", outputs[0].size());
  check_device(kName, inputs);
  check_device(kName, outputs[0]);
  check_same_dtype(kName, outputs[0], inputs[0]);
  TORCH_CHECK_VALUE(outputs[0][rank_].numel() == inputs[0].numel(), "zipccl ", kName, ": the output for this rank has ",
                    outputs[0][rank_].numel(), " elements, its input ", inputs[0].numel());
  // Gloo has no all-gather of different sizes, and not all dtypes.
  const bool cuda = inputs[0].is_cuda();
  const bool native = cuda || (same_sizes(outputs[0]) && gloo_knows(inputs[0].scalar_type()));
  const Route route = route_of(Collective::kAllGather, inputs[0], largest(outputs[0]), exchangeable(inputs[0]), native);
  if (route == Route::kNative && cuda) {
    return hand_on_cuda(kName, [&](auto& backend) { return backend.allgather(outputs, inputs, options); });
  }
  if (route == Route::kNative) {
    count_native(kName);
    if (have_shape(outputs[0], inputs[0]) || !all_dense(outputs[0])) {
      return coalesced(plain_->allgather(outputs, inputs, options));
    }
    std::vector<Tensors> flat_outputs{flat(outputs[0])};
    Tensors flat_inputs = flat(inputs);
    return with_result(plain_->allgather(flat_outputs, flat_inputs, options), outputs[0]);
  }
  return submit_exchange(Collective::kAllGather, OpType::ALLGATHER, inputs, outputs[0], options.timeout,
                         options.asyncOp, {all_gather_job(route, outputs[0], inputs[0])});
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                   const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                                       const c10d::AllgatherOptions& options) {
  constexpr auto kName = "all_gather";
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), "zipccl ", kName, ": expects ", size_,
                    " output lists, one a rank, got ", outputs.size());
  for (const auto& list : outputs) {
    TORCH_CHECK_VALUE(list.size() == inputs.size(), "zipccl ", kName,
                      ": every output list has a tensor for each of the ", inputs.size(), " inputs, got one with ",
                      list.size());
  }
  std::vector<Tensors> of_input(inputs.size());  // the outputs by input, not by rank
  bool native = same_dtype(inputs);
  Sizes sizes;
  for (size_t i = 0; i < inputs.size(); i++) {
    for (const auto& list : outputs) of_input[i].push_back(list[i]);
    check_device(kName, {inputs[i]});
    check_device(kName, of_input[i]);
    check_same_dtype(kName, of_input[i], inputs[i]);
    TORCH_CHECK_VALUE(of_input[i][rank_].numel() == inputs[i].numel(), "zipccl ", kName, ": the output for input ", i,
                      " of this rank has ", of_input[i][rank_].numel(), " elements, the input ", inputs[i].numel());
    sizes.add(inputs[i], largest(of_input[i]), exchangeable(inputs[i]));
    native = native && same_sizes(of_input[i]) && gloo_knows(inputs[i].scalar_type());
  }
  const bool cuda = on_cuda(inputs);
  const Route route = route_of(Collective::kAllGather, sizes, cuda ? sizes.all : sizes.any, cuda || native);
  if (route == Route::kNative && cuda) {
    return hand_on_cuda(kName, [&](auto& backend) { return backend.allgather_coalesced(outputs, inputs, options); });
  }
  if (route == Route::kNative) {
    count_native(kName);
    return coalesced(plain_->allgather_coalesced(outputs, inputs, options));
  }
  std::vector<Job> jobs;
  Tensors flat_outputs;
  for (size_t i = 0; i < inputs.size(); i++) jobs.push_back(all_gather_job(route, of_input[i], inputs[i]));
  for (const auto& list : outputs) flat_outputs.insert(flat_outputs.end(), list.begin(), list.end());
  return submit_exchange(Collective::kAllGather, OpType::ALLGATHER_COALESCED, inputs, flat_outputs, options.timeout,
                         options.asyncOp, std::move(jobs), c10::IValue(outputs));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  constexpr auto kName = "all_gather";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "zipccl ", kName, ": expects as many outputs as inputs, got ",
                    outputs.size(), " and ", inputs.size());
  bool native = same_dtype(inputs);  // Gloo would mix up their bytes
  Sizes sizes;
  for (size_t i = 0; i < inputs.size(); i++) {
    check_device(kName, {outputs[i], inputs[i]});
    check_same_dtype(kName, {outputs[i]}, inputs[i]);
    check_contiguous(kName, outputs[i]);
    TORCH_CHECK_VALUE(outputs[i].numel() == inputs[i].numel() * size_, "zipccl ", kName, ": output ", i, " has ",
                      outputs[i].numel(), " elements, but ", size_, " inputs of ", inputs[i].numel(), " go into it");
    sizes.add(inputs[i], inputs[i].nbytes(), exchangeable(inputs[i]));
    native = native && gloo_knows(inputs[i].scalar_type());
  }
  const bool one = outputs.size() == 1, cuda = on_cuda(inputs);
  const Route route = route_of(Collective::kAllGather, sizes, cuda ? sizes.all : sizes.any, cuda || native);
  if (route == Route::kNative && cuda) {
    return hand_on_cuda(kName, [&](auto& backend) {
      return one ? backend._allgather_base(outputs[0], inputs[0], options)
                 : backend.allgather_into_tensor_coalesced(outputs, inputs, options);
    });
  }
  if (route == Route::kNative) {
    count_native(kName);
    const auto gather = [&](Tensors& outputs, Tensors& inputs) {
      return one ? plain_->_allgather_base(outputs[0], inputs[0], options)
                 : plain_->allgather_into_tensor_coalesced(outputs, inputs, options);
    };
    if (are_rows_of(outputs, inputs, size_)) return coalesced(gather(outputs, inputs));
    Tensors flat_outputs = flat(outputs), flat_inputs = flat(inputs);
    return with_result(gather(flat_outputs, flat_inputs), outputs);
  }
  std::vector<Job> jobs;
  for (size_t i = 0; i < inputs.size(); i++) {
    jobs.push_back(all_gather_job(route, chunks(outputs[i], size_), inputs[i]));
  }
  return submit_exchange(Collective::kAllGather, one ? OpType::_ALLGATHER_BASE : OpType::COALESCED, inputs, outputs,
                         options.timeout, options.asyncOp, std::move(jobs));
}

// ---- Reduce-scatter

Job ProcessGroupZipCCL::reduce_scatter_job(Route route, const at::Tensor& output, const Tensors& inputs,
                                           const ReduceOp& operation) {
  Target target(output);
  Tensors sources;
  for (int r = 0; r < size_; r++) {
    at::Tensor source = dense(inputs[r]);
    const bool in_place = r == rank_ && source.const_data_ptr() == target.dense().const_data_ptr();
    if (!in_place && overlap(source, target.dense())) source = source.clone();
    sources.push_back(source);
  }
  const Reduce reduce = reduce_of(operation, size_, *options_);
  const auto code = static_cast<uint8_t>(operation.op_);
  return [route, code, reduce, target, sources](Exchange& exchange, uint64_t sequence) mutable {
    const Call call{Collective::kReduceScatter, sequence, dtype_of(target.dense()), code, 0, route};
    std::vector<Part> parts;
    for (const auto& source : sources) parts.push_back({source.const_data_ptr(), message_elements(source)});
    zipccl::reduce_scatter(exchange, call, parts, reduce, target.dense().data_ptr());
    target.copy_back();
  };
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::reduce_scatter_wrapped(Tensors outputs, std::vector<Tensors> inputs,
                                                                          const ReduceOp& operation,
                                                                          std::chrono::milliseconds timeout) {
  Tensors all_inputs;
  for (const auto& list : inputs) {
    TORCH_CHECK_VALUE(same_sizes(list), "zipccl reduce_scatter: ", operation.op_, " of ", list[0].scalar_type(),
                      " needs inputs of one size");
    all_inputs.insert(all_inputs.end(), list.begin(), list.end());
  }
  return submit("reduce_scatter", OpType::REDUCE_SCATTER, all_inputs, outputs, timeout,
                [this, outputs, inputs, operation](std::chrono::milliseconds timeout) {
                  for (size_t i = 0; i < outputs.size(); i++) {
                    Tensors flat;
                    for (const auto& input : inputs[i]) flat.push_back(input.reshape({-1}));
                    at::Tensor summand = to_be_summed(at::cat(flat), operation);
                    at::Tensor sum = at::empty({outputs[i].numel()}, summand.options());
                    c10d::ReduceScatterOptions options;
                    options.timeout = timeout;
                    exchange_->_reduce_scatter_base(sum, summand, options)->wait();
                    from_sum(outputs[i], sum, operation, size_);
                  }
                });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                                  const c10d::ReduceScatterOptions& options) {
  constexpr auto kName = "reduce_scatter";
  TORCH_CHECK_VALUE(outputs.size() == 1 && inputs.size() == 1, "zipccl ", kName, ": expects one output and one list");
  TORCH_CHECK_VALUE(inputs[0].size() == static_cast<size_t>(size_), "zipccl ", kName, ": expects ", size_,
                    " input tensors, one a rank, got ", inputs[0].size());
  const ReduceOp& operation = options.reduceOp;
  const at::Tensor& output = outputs[0];
  check_device(kName, outputs);
  check_device(kName, inputs[0]);
  check_same_dtype(kName, inputs[0], output);
  TORCH_CHECK_VALUE(inputs[0][rank_].numel() == output.numel(), "zipccl ", kName, ": the input for this rank has ",
                    inputs[0][rank_].numel(), " elements, its output ", output.numel());
  const bool reducible = reduces_in_fp32(operation) && exchangeable(output);
  const bool lacks = !output.is_cuda() && gloo_lacks(operation, outputs);
  const Route route =
      route_of(Collective::kReduceScatter, inputs[0][0], largest(inputs[0]), reducible, !lacks || !reducible);
  if (route != Route::kNative) {
    return submit_exchange(Collective::kReduceScatter, OpType::REDUCE_SCATTER, inputs[0], outputs, options.timeout,
                           options.asyncOp, {reduce_scatter_job(route, output, inputs[0], operation)});
  }
  if (output.is_cuda()) {
    return hand_on_cuda(kName, [&](auto& backend) { return backend.reduce_scatter(outputs, inputs, options); });
  }
  count_native(kName);
  if (lacks) return reduce_scatter_wrapped(outputs, inputs, operation, options.timeout);
  if (have_shape(inputs[0], output) || !all_dense(outputs)) {
    return with_result(plain_->reduce_scatter(outputs, inputs, options), outputs);
  }
  Tensors flat_outputs = flat(outputs);
  std::vector<Tensors> flat_inputs{flat(inputs[0])};
  return with_result(plain_->reduce_scatter(flat_outputs, flat_inputs, options), outputs);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                        const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  constexpr auto kName = "reduce_scatter";
  TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "zipccl ", kName, ": expects as many outputs as inputs, got ",
                    outputs.size(), " and ", inputs.size());
  const ReduceOp& operation = options.reduceOp;
  bool reducible = reduces_in_fp32(operation);
  Sizes sizes;
  for (size_t i = 0; i < inputs.size(); i++) {
    check_device(kName, {outputs[i], inputs[i]});
    check_same_dtype(kName, {outputs[i]}, inputs[i]);
    check_contiguous(kName, outputs[i]);
    TORCH_CHECK_VALUE(inputs[i].numel() == outputs[i].numel() * size_, "zipccl ", kName, ": input ", i, " has ",
                      inputs[i].numel(), " elements, but ", size_, " outputs of ", outputs[i].numel(),
                      " come out of it");
    reducible = reducible && exchangeable(outputs[i]);
    sizes.add(inputs[i], outputs[i].nbytes());
  }
  const bool lacks = !on_cuda(outputs) && gloo_lacks(operation, outputs);
  const bool one = outputs.size() == 1;
  const auto parts = [&](size_t i) { return chunks(dense(inputs[i]), size_); };
  const Route route = route_of(Collective::kReduceScatter, sizes, reducible, !lacks || !reducible);
  if (route != Route::kNative) {
    std::vector<Job> jobs;
    for (size_t i = 0; i < outputs.size(); i++) {
      jobs.push_back(reduce_scatter_job(route, outputs[i], parts(i), operation));
    }
    return submit_exchange(Collective::kReduceScatter, one ? OpType::_REDUCE_SCATTER_BASE : OpType::COALESCED, inputs,
                           outputs, options.timeout, options.asyncOp, std::move(jobs));
  }
  if (on_cuda(outputs)) {
    return hand_on_cuda(kName, [&](auto& backend) {
      return one ? backend._reduce_scatter_base(outputs[0], inputs[0], options)
                 : backend.reduce_scatter_tensor_coalesced(outputs, inputs, options);
    });
  }
  count_native(kName);
  if (lacks) {
    std::vector<Tensors> lists;
    for (size_t i = 0; i < inputs.size(); i++) lists.push_back(parts(i));
    return reduce_scatter_wrapped(outputs, std::move(lists), operation, options.timeout);
  }
  const bool rows = are_rows_of(inputs, outputs, size_);
  Tensors native_outputs = rows ? outputs : flat(outputs);
  Tensors native_inputs = rows ? inputs : flat(inputs);
  return with_result(one ? plain_->_reduce_scatter_base(native_outputs[0], native_inputs[0], options)
                         : plain_->reduce_scatter_tensor_coalesced(native_outputs, native_inputs, options),
                     outputs);
}

// ---- All-reduce

Job ProcessGroupZipCCL::all_reduce_job(Route route, const at::Tensor& tensor, const ReduceOp& operation) {
  // Ranks may lay their tensors out differently: dense ones have one order.
  at::Tensor values = dense(tensor);
  const Reduce reduce = reduce_of(operation, size_, *options_);
  const auto code = static_cast<uint8_t>(operation.op_);
  return [route, tensor, values, reduce, code](Exchange& exchange, uint64_t sequence) mutable {
    const Call call{Collective::kAllReduce, sequence, dtype_of(values), code, 0, route};
    zipccl::all_reduce(exchange, call, values.data_ptr(), message_elements(values), reduce);
    if (!values.is_same(tensor)) tensor.copy_(values);
  };
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::exchange_all_reduce(Tensors& tensors, const ReduceOp& operation,
                                                                       OpType type, std::chrono::milliseconds timeout,
                                                                       bool asynchronous) {
  if (!reduces_in_fp32(operation) || tensors.empty() ||
      !std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
        return tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense() && exchangeable(tensor);
      })) {
    return nullptr;
  }
  Sizes sizes;
  for (const auto& tensor : tensors) {
    sizes.add(tensor, all_reduce_share(tensor.numel(), size_) * tensor.element_size());
  }
  const Route route = route_of(Collective::kAllReduce, sizes, /*exchange=*/true, /*native=*/true);
  if (route == Route::kNative) return nullptr;
  std::vector<Job> jobs;
  for (const auto& tensor : tensors) jobs.push_back(all_reduce_job(route, tensor, operation));
  return submit_exchange(Collective::kAllReduce, type, tensors, tensors, timeout, asynchronous, std::move(jobs));
}

// ---- All-to-all

// Of an all-to-all with split sizes, no rank knows those between two others, so that a choice by size would not be the
// same everywhere: every one of a dtype that can be coded goes over our exchange, where each pair decides for itself.
c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::all_to_all(const Tensors& outputs, const Tensors& inputs,
                                                              Tensors result_outputs, Tensors result_inputs,
                                                              OpType type, Route route,
                                                              const c10d::AllToAllOptions& options) {
  auto targets = targets_of(outputs);
  const bool aliased = std::any_of(result_inputs.begin(), result_inputs.end(), [&](const at::Tensor& input) {
    return std::any_of(result_outputs.begin(), result_outputs.end(),
                       [&](const at::Tensor& output) { return overlap(input, output); });
  });
  Tensors sources;
  std::vector<std::shared_ptr<const KnownWindows>> known;
  for (const auto& input : inputs) {
    sources.push_back(dense(aliased ? input.clone() : input));
    known.push_back(known_of(sources.back()));
  }
  Job job = [route, targets, sources, known](Exchange& exchange, uint64_t sequence) mutable {
    const Call call{Collective::kAllToAll, sequence, dtype_of(sources[0]), 0, 0, route};
    std::vector<Part> parts;
    std::vector<void*> memory;
    std::vector<uint64_t> elements;
    for (size_t r = 0; r < sources.size(); r++) {
      parts.push_back({sources[r].const_data_ptr(), message_elements(sources[r])});
      if (known[r]) parts.back().windows = known[r]->windows.data();
    }
    for (const auto& target : targets) {
      memory.push_back(target.dense().data_ptr());
      elements.push_back(message_elements(target.dense()));
    }
    zipccl::all_to_all(exchange, call, parts, memory, elements);
    for (auto& target : targets) target.copy_back();
  };
  return submit_exchange(Collective::kAllToAll, type, std::move(result_inputs), std::move(result_outputs),
                         options.timeout, options.asyncOp, {std::move(job)});
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                                 std::vector<int64_t>& output_splits,
                                                                 std::vector<int64_t>& input_splits,
                                                                 const c10d::AllToAllOptions& options) {
  constexpr auto kName = "all_to_all";
  check_device(kName, {output, input});
  check_same_dtype(kName, {output}, input);
  check_contiguous(kName, output);
  const auto checked = [&](const char* side, const at::Tensor& tensor, const std::vector<int64_t>& sizes) {
    TORCH_CHECK_VALUE(tensor.dim() > 0, "zipccl ", kName, ": the ", side, " tensor has no dimension to split");
    const int64_t rows = tensor.size(0);
    std::vector<int64_t> rows_of = sizes;
    if (sizes.empty()) {
      TORCH_CHECK_VALUE(rows % size_ == 0, "zipccl ", kName, ": the ", side, " tensor's dimension 0 of ", rows,
                        " does not divide equally among ", size_, " ranks; give split sizes");
      rows_of.assign(size_, rows / size_);
    }
    TORCH_CHECK_VALUE(rows_of.size() == static_cast<size_t>(size_), "zipccl ", kName, ": expects ", size_, " ", side,
                      " split sizes, got ", rows_of.size());
    TORCH_CHECK_VALUE(std::all_of(rows_of.begin(), rows_of.end(), [](int64_t n) { return n >= 0; }), "zipccl ", kName,
                      ": the ", side, " split sizes ", rows_of, " must not be negative");
    const int64_t sum = std::accumulate(rows_of.begin(), rows_of.end(), int64_t{0});
    TORCH_CHECK_VALUE(sum == rows, "zipccl ", kName, ": the ", side, " split sizes ", rows_of, " sum to ", sum,
                      ", but the tensor's dimension 0 is ", rows);
    return rows_of;
  };
  at::Tensor source = dense(input);
  const auto output_rows = checked("output", output, output_splits);
  const auto input_rows = checked("input", source, input_splits);
  const bool cuda = input.is_cuda(), native = cuda || gloo_knows(input.scalar_type());
  // As all c10d calls, one with split sizes is one on all ranks.
  const bool equal = output_splits.empty() && input_splits.empty();
  const Route route =
      equal ? route_of(Collective::kAllToAll, source, source.nbytes() / size_, exchangeable(input), native)
            : route_of_splits(source, native);
  if (route == Route::kNative) {
    // Gloo empties the vectors that it is given.
    auto output_copy = output_splits, input_copy = input_splits;
    const auto call = [&](auto& backend) {
      return backend.alltoall_base(output, source, output_copy, input_copy, options);
    };
    if (cuda) return hand_on_cuda(kName, call);
    count_native(kName);
    return coalesced(call(*plain_));
  }
  return all_to_all(output.split_with_sizes(output_rows), source.split_with_sizes(input_rows), {output}, {source},
                    OpType::ALLTOALL_BASE, route, options);
}

// On CPU tensors always over our exchange: Gloo's list form refuses different shapes, which no rank can see of the
// others.
c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::alltoall(Tensors& outputs, Tensors& inputs,
                                                            const c10d::AllToAllOptions& options) {
  constexpr auto kName = "all_to_all";
  for (const Tensors* list : {&outputs, &inputs}) {
    TORCH_CHECK_VALUE(list->size() == static_cast<size_t>(size_), "zipccl ", kName, ": expects ", size_,
                      " tensors in each list, one a rank, got ", list->size());
    check_device(kName, *list);
  }
  check_same_dtype(kName, outputs, inputs[0]);
  check_same_dtype(kName, inputs, inputs[0]);
  const Route route = route_of_splits(inputs[0], inputs[0].is_cuda());
  if (route == Route::kNative) {
    return hand_on_cuda(kName, [&](auto& backend) { return backend.alltoall(outputs, inputs, options); });
  }
  return all_to_all(outputs, inputs, outputs, inputs, OpType::ALLTOALL, route, options);
}

// ---- Handed on

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_device("broadcast", tensors);
  if (on_cuda(tensors)) {
    return hand_on_cuda("broadcast", [&](auto& backend) { return backend.broadcast(tensors, options); });
  }
  check_no_gaps("broadcast", tensors);
  count_native("broadcast");
  auto known = as_gloo_knows("broadcast", tensors);
  auto work = plain_->broadcast(known, options);
  return all_known(tensors) ? coalesced(work) : with_result(work, tensors);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_device("all_reduce", tensors);
  if (auto work = exchange_all_reduce(tensors, options.reduceOp, OpType::ALLREDUCE, options.timeout, options.asyncOp)) {
    return work;
  }
  if (on_cuda(tensors)) {
    return hand_on_cuda("all_reduce", [&](auto& backend) { return backend.allreduce(tensors, options); });
  }
  check_no_gaps("all_reduce", tensors);
  count_native("all_reduce");
  const ReduceOp operation = options.reduceOp;
  if (!gloo_lacks(operation, tensors)) return coalesced(plain_->allreduce(tensors, options));
  return submit("all_reduce", OpType::ALLREDUCE, tensors, tensors, options.timeout,
                [this, tensors, operation](std::chrono::milliseconds timeout) {
                  for (const auto& tensor : tensors) {
                    Tensors sum{to_be_summed(tensor, operation)};
                    c10d::AllreduceOptions options;
                    options.timeout = timeout;
                    exchange_->allreduce(sum, options)->wait();
                    from_sum(tensor, sum[0], operation, size_);
                  }
                });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::allreduce_sparse(Tensors& tensors,
                                                                    const c10d::AllreduceOptions& options) {
  if (on_cuda(tensors)) {
    return hand_on_cuda("all_reduce", [&](auto& backend) { return backend.allreduce_sparse(tensors, options); });
  }
  count_native("all_reduce");
  return coalesced(plain_->allreduce_sparse(tensors, options));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::allreduce_coalesced(Tensors& tensors,
                                                                       const c10d::AllreduceCoalescedOptions& options) {
  check_device("all_reduce", tensors);
  if (auto work = exchange_all_reduce(tensors, options.reduceOp, OpType::ALLREDUCE_COALESCED, options.timeout,
                                      options.asyncOp)) {
    return work;
  }
  if (on_cuda(tensors)) {
    return hand_on_cuda("all_reduce", [&](auto& backend) { return backend.allreduce_coalesced(tensors, options); });
  }
  if (gloo_lacks(options.reduceOp, tensors)) return allreduce(tensors, options);
  check_no_gaps("all_reduce", tensors);
  count_native("all_reduce");
  return coalesced(plain_->allreduce_coalesced(tensors, options));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_device("reduce", tensors);
  if (on_cuda(tensors)) {
    return hand_on_cuda("reduce", [&](auto& backend) { return backend.reduce(tensors, options); });
  }
  check_no_gaps("reduce", tensors);
  count_native("reduce");
  const ReduceOp operation = options.reduceOp;
  if (!gloo_lacks(operation, tensors)) return coalesced(plain_->reduce(tensors, options));
  const int64_t root = options.rootRank;
  return submit("reduce", OpType::REDUCE, tensors, tensors, options.timeout,
                [this, tensors, operation, root](std::chrono::milliseconds timeout) {
                  for (const auto& tensor : tensors) {
                    Tensors sum{to_be_summed(tensor, operation)};
                    c10d::ReduceOptions options;
                    options.rootRank = root;
                    options.timeout = timeout;
                    exchange_->reduce(sum, options)->wait();
                    if (rank_ == root) from_sum(tensor, sum[0], operation, size_);
                  }
                });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                          const c10d::GatherOptions& options) {
  check_device("gather", inputs);
  if (on_cuda(inputs)) {
    return hand_on_cuda("gather", [&](auto& backend) { return backend.gather(outputs, inputs, options); });
  }
  count_native("gather");
  auto known_outputs = as_gloo_knows("gather", outputs);
  auto known_inputs = as_gloo_knows("gather", inputs);
  const Tensors& results = outputs.empty() ? Tensors{} : outputs[0];
  auto work = plain_->gather(known_outputs, known_inputs, options);
  return all_known(inputs) ? coalesced(work) : with_result(work, results);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                           const c10d::ScatterOptions& options) {
  check_device("scatter", outputs);
  if (on_cuda(outputs)) {
    return hand_on_cuda("scatter", [&](auto& backend) { return backend.scatter(outputs, inputs, options); });
  }
  count_native("scatter");
  auto known_outputs = as_gloo_knows("scatter", outputs);
  auto known_inputs = as_gloo_knows("scatter", inputs);
  auto work = plain_->scatter(known_outputs, known_inputs, options);
  return all_known(outputs) ? coalesced(work) : with_result(work, outputs);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::send(Tensors& tensors, int peer, int tag) {
  check_device("send", tensors);
  if (on_cuda(tensors)) {
    return hand_on_cuda("send", [&](auto& backend) { return backend.send(tensors, peer, tag); });
  }
  count_native("send");
  return point_to_point(plain_->send(tensors, peer, tag));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::recv(Tensors& tensors, int peer, int tag) {
  check_device("recv", tensors);
  if (on_cuda(tensors)) {
    return hand_on_cuda("recv", [&](auto& backend) { return backend.recv(tensors, peer, tag); });
  }
  count_native("recv");
  return point_to_point(plain_->recv(tensors, peer, tag));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::recvAnysource(Tensors& tensors, int tag) {
  check_device("recv", tensors);
  if (on_cuda(tensors)) {
    return hand_on_cuda("recv", [&](auto& backend) { return backend.recvAnysource(tensors, tag); });
  }
  count_native("recv");
  return point_to_point(plain_->recvAnysource(tensors, tag));
}

// As Gloo's own: done when all ranks are here and this rank's earlier calls are done. Where it is a GPU that waits, as
// NCCL's own.
c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::barrier(const c10d::BarrierOptions& options) {
  if (options.device && options.device->is_cuda() && cuda_factory_) {
    return hand_on_cuda("barrier", [&](auto& backend) { return backend.barrier(options); });
  }
  count_native("barrier");
  auto arrival = plain_->barrier(options);
  return submit("barrier", OpType::BARRIER, {}, {}, options.timeout,
                [arrival](std::chrono::milliseconds) { arrival->wait(); });
}

void ProcessGroupZipCCL::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  count_native("barrier");
  plain_->monitoredBarrier(options, wait_all_ranks);
}

// ---- Groups

c10::intrusive_ptr<c10d::Backend> ProcessGroupZipCCL::split(const Ptr<c10d::Store>& store,
                                                            const std::vector<int>& ranks,
                                                            const Ptr<c10d::Backend::Options>& options) {
  waitForPendingWorks();
  TORCH_CHECK(exchange_, "zipccl split: an earlier call of this group failed, so it has no connections to split");
  auto child_options = c10::make_intrusive<ZipCCLOptions>(*options_);
  if (options) {
    if (const auto* own = dynamic_cast<const ZipCCLOptions*>(options.get())) {
      child_options = c10::make_intrusive<ZipCCLOptions>(*own);
    }
    child_options->timeout = options->timeout;
    child_options->group_name = options->group_name;
    child_options->group_desc = options->group_desc;
    child_options->global_ranks_in_group = options->global_ranks_in_group;
  }
  // c10d may split once per device type with one store: number the rendezvous, or they meet.
  const auto number = splits_++;
  const auto store_for = [&](const char* name) {
    return c10::make_intrusive<c10d::PrefixStore>(c10::str(name, number), store);
  };
  const auto split_off = [&](const Ptr<c10d::Backend>& parent, const char* name) {
    Ptr<c10d::Backend::Options> parent_options;
#ifdef C10D_BACKEND_HAS_HOOKS
    parent_options = parent->getBackendOptions()->clone();
    parent_options->timeout = child_options->timeout;
    parent_options->group_name = c10::str(child_options->group_name, "/", name);
#endif
    return parent->split(store_for(name), ranks, parent_options);
  };
  auto plain = split_off(plain_, "plain");
  auto exchange = split_off(exchange_, "exchange");
  if (!plain || !exchange) return nullptr;
  plain->setTimeout(child_options->timeout);
  return c10::make_intrusive<ProcessGroupZipCCL>(store_for("options"), plain, exchange, child_options, cuda_factory_);
}

void ProcessGroupZipCCL::startCoalescing() {
  coalesced_.clear();  // of a coalesced call that ended with an exception
  cuda_coalesced_.clear();
  coalescing_ = true;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::endCoalescing() {
  TORCH_CHECK(coalescing_, "zipccl: coalescing has not started");
  coalescing_ = false;
  std::optional<c10::Device> device;
  if (cuda_coalescing_) {
    cuda_coalescing_ = false;
    device = cuda_device_;
    if (auto work = cuda_plain_->endCoalescing()) coalesced_.push_back(std::move(work));
  }
  for (auto& call : cuda_coalesced_) {
    device = call.outputs[0].device();
    coalesced_.push_back(cuda_calls().run(std::move(call), /*asynchronous=*/true));
  }
  cuda_coalesced_.clear();
  return c10::make_intrusive<WorkGroup>(std::move(coalesced_), Tensors{}, device);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::coalesced(WorkPtr work) {
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::point_to_point(WorkPtr work) {
  // Both whoever has the work and whoever ends the coalescing may wait for it.
  return coalescing_ ? coalesced(c10::make_intrusive<WorkGroup>(std::vector<WorkPtr>{std::move(work)})) : work;
}

void ProcessGroupZipCCL::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  plain_->setTimeout(timeout);
  if (cuda_plain_) cuda_plain_->setTimeout(timeout);
  for (auto& backend : cuda_exchanges_) backend->setTimeout(timeout);
}

void ProcessGroupZipCCL::setGroupUid(const std::string& uid) {
  c10d::Backend::setGroupUid(uid);
  plain_->setGroupUid(uid);
}

void ProcessGroupZipCCL::abort() {
  worker_.refuse("the group was aborted");
  {
    std::lock_guard<std::mutex> lock(transport_mutex_);
    if (transport_) transport_->abort();
  }
  plain_->abort();
  std::vector<Ptr<c10d::Backend>> backends;
  {
    std::lock_guard<std::mutex> lock(cuda_mutex_);
    if (cuda_calls_) cuda_calls_->abort("the group was aborted");
    if (cuda_shut_down_) return;  // NCCL's communicators are gone, which it does not see
    backends = cuda_exchanges_;
    if (cuda_plain_ && cuda_plain_ != plain_) backends.push_back(cuda_plain_);
  }
  for (auto& backend : backends) backend->abort();
}

void ProcessGroupZipCCL::shutdown() {
  waitForPendingWorks();  // peers may wait for calls that nobody here does
  worker_.refuse("the group was destroyed");
  if (cuda_calls_) cuda_calls_->abort("the group was destroyed");
  for (auto& backend : cuda_exchanges_) backend->shutdown();
  if (cuda_plain_ && cuda_plain_ != plain_) cuda_plain_->shutdown();
  {
    std::lock_guard<std::mutex> lock(cuda_mutex_);
    cuda_shut_down_ = true;
  }
  settle_exchange();
  close_exchange();
  plain_->shutdown();
}

void ProcessGroupZipCCL::settle_exchange() {
  if (!transport_) return;
  Counters counters;
  const auto deadline = std::chrono::steady_clock::now() + options_->timeout;
  try {
    HostExchange(*transport_, host_state_, options_->exchange, hosts_, deadline, counters, host_services_).settle();
  } catch (const std::exception&) {
    // The peer is gone, or the group was aborted: nobody waits for us any more.
  }
}

void ProcessGroupZipCCL::waitForPendingWorks() {
  worker_.drain();
  if (cuda_calls_) cuda_calls_->drain();
}

// ---- CUDA

c10::intrusive_ptr<c10d::Backend> ProcessGroupZipCCL::cuda_plain() {
  TORCH_CHECK(cuda_factory_, "zipccl: the group serves no CUDA tensors, so it has no backend for them");
  {
    std::lock_guard<std::mutex> lock(cuda_mutex_);
    if (cuda_plain_) return cuda_plain_;
  }
  // By the callers' thread alone, and not under the mutex, as the factory takes the GIL.
  auto backend = options_->cuda_over_gloo ? plain_ : make_cuda_backend("plain");
  std::lock_guard<std::mutex> lock(cuda_mutex_);
  return cuda_plain_ = backend;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupZipCCL::make_cuda_backend(const std::string& name) {
  auto backend = cuda_factory_(store_, plain_, options_, name);
  backend->setGroupUid(c10::str(getGroupUid(), "/cuda_", name));
  backend->setGroupDesc(getGroupDesc());
  if (getBoundDeviceId()) backend->setBoundDeviceId(getBoundDeviceId());
  return backend;
}

CudaCalls& ProcessGroupZipCCL::cuda_calls() {
#ifdef ZIPCCL_CUDA
  std::lock_guard<std::mutex> lock(cuda_mutex_);
  if (!cuda_calls_) {
    CudaGroup group;
    group.rank = rank_;
    group.name = getGroupUid();
    group.options = options_->exchange;
    group.options.segment_bytes = options_->cuda_segment_bytes;
    group.hosts = hosts_;
    group.timeout = options_->timeout;
    if (options_->cuda_over_gloo) {
      group.staging = exchange_;
    } else {
      group.plain = [this] { return cuda_plain(); };
      group.exchange = [this](c10::DeviceIndex device) {
        auto backend = make_cuda_backend(c10::str("exchange", static_cast<int>(device)));
        std::lock_guard<std::mutex> lock(cuda_mutex_);
        cuda_exchanges_.push_back(backend);
        return backend;
      };
    }
    group.finished = [this](Collective collective, const Counters& counters) { count(collective, counters); };
    cuda_calls_ = make_cuda_calls(std::move(group));
  }
  return *cuda_calls_;
#else
  TORCH_CHECK(false, "zipccl: this build has no CUDA part");
#endif
}

void ProcessGroupZipCCL::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cuda()) cuda_plain()->eagerConnectSingleDevice(device);
}

void ProcessGroupZipCCL::enableCollectivesTiming() {
  if (cuda_plain_) cuda_plain_->enableCollectivesTiming();
}

bool ProcessGroupZipCCL::supportsTensorAlloc(c10::DeviceIndex device) {
  return cuda_factory_ && cuda_plain()->supportsTensorAlloc(device);
}

c10d::ErrorType ProcessGroupZipCCL::getError() {
  if (cuda_plain_ && cuda_plain_ != plain_) {
    const auto error = cuda_plain_->getError();
    if (error != c10d::ErrorType::SUCCESS) return error;
  }
  return plain_->getError();
}

template <typename Call>
c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::hand_on_cuda(const char* collective, Call call) {
  const auto backend = cuda_plain();
  count_native(collective);
  if (coalescing_ && !cuda_coalescing_ && !options_->cuda_over_gloo) {
    backend->startCoalescing();
    cuda_coalescing_ = true;
    cuda_device_ = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
  }
  auto work = call(*backend);
  return cuda_coalescing_ ? work : coalesced(work);
}

void ProcessGroupZipCCL::close_exchange() {
  exchange_.reset();
  std::lock_guard<std::mutex> lock(transport_mutex_);
  for (auto& greetings : host_state_.unanswered) greetings.clear();
  transport_.reset();
}

// ---- Running

void ProcessGroupZipCCL::check_device(const char* collective, const Tensors& tensors) const {
  for (const auto& tensor : tensors) {
    const at::Device device = tensor.device();
    TORCH_CHECK_VALUE(device == tensors[0].device(), "zipccl ", collective,
                      ": all tensors of a call are on one device, got ", tensors[0].device(), " and ", device);
    if (device.is_cpu()) continue;
#ifdef ZIPCCL_CUDA
    TORCH_CHECK_VALUE(device.is_cuda(), "zipccl ", collective, ": serves CPU and CUDA tensors, got one on ", device);
    TORCH_CHECK_VALUE(cuda_factory_, "zipccl ", collective, ": got a tensor on ", device,
                      ", but CUDA or NCCL is not available to this process");
#else
    TORCH_CHECK_VALUE(false, "zipccl ", collective, ": this build serves CPU tensors only, got one on ", device,
                      "; build zipccl where nvcc is found, beside a PyTorch with CUDA, or initialise with "
                      "\"cpu:zipccl,cuda:nccl\" to have NCCL serve CUDA tensors");
#endif
  }
}

std::chrono::milliseconds ProcessGroupZipCCL::timeout_of(std::chrono::milliseconds asked) const {
  return asked == c10d::kUnsetTimeout ? options_->timeout : asked;
}

void ProcessGroupZipCCL::count_native(const char* collective) {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  auto& stats = stats_[collective];
  stats.calls++;
  stats.native++;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::submit(const char* collective, OpType type, Tensors inputs,
                                                          Tensors outputs, std::chrono::milliseconds timeout,
                                                          std::function<void(std::chrono::milliseconds)> function,
                                                          std::optional<c10::IValue> value) {
  timeout = timeout_of(timeout);
  if (!value) value = c10::IValue(outputs);
  auto work = c10::make_intrusive<WorkZipCCL>(rank_, type, c10::str("zipccl:", collective), inputs, std::move(outputs),
                                              std::move(*value), sequence_, timeout);
  worker_.submit(work, [function = std::move(function), timeout] { function(timeout); });
  return coalesced(work);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::with_result(WorkPtr work, Tensors outputs) {
  return coalesced(c10::make_intrusive<WorkGroup>(std::vector<WorkPtr>{std::move(work)}, std::move(outputs)));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupZipCCL::submit_exchange(Collective collective, OpType type, Tensors inputs,
                                                                   Tensors outputs, std::chrono::milliseconds timeout,
                                                                   bool asynchronous, std::vector<Job> jobs,
                                                                   std::optional<c10::IValue> value) {
  const uint64_t first = sequence_;
  sequence_ += jobs.size();
  if (on_cuda(outputs)) {
    if (!value) value = c10::IValue(outputs);
    JobList call{collective,      type,  std::move(inputs),  std::move(outputs), std::move(*value),
                 std::move(jobs), first, timeout_of(timeout)};
    if (!coalescing_) return cuda_calls().run(std::move(call), asynchronous);
    // Not now: the wrapped backend may be in the middle of a group of its own calls.
    cuda_coalesced_.push_back(std::move(call));
    return c10::make_intrusive<WorkGroup>(std::vector<WorkPtr>{});
  }
  auto run = [this, collective, first, jobs = std::move(jobs)](std::chrono::milliseconds timeout) {
    Counters counters;
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    HostExchange exchange(*transport_, host_state_, options_->exchange, hosts_, deadline, counters, host_services_);
    std::string error;
    bool broken = false;
    for (size_t i = 0; i < jobs.size() && !broken; i++) {
      std::string what;
      try {
        jobs[i](exchange, first + i);
        continue;
      } catch (const MismatchError& mismatch) {
        what = mismatch.what();  // the peers still wait for the rest of a coalesced call,
      } catch (const FormatError& corrupted) {
        what = corrupted.what();  // here too
      } catch (const std::exception& failure) {
        what = failure.what();
        broken = true;
      }
      error += (error.empty() ? "" : "; ") + failure_text(collective, first + i, getGroupUid(), rank_, what);
    }
    count(collective, counters);
    if (broken) {
      // What is on the wire is lost, so later calls cannot know what they receive. Closing the connections tells the
      // peers, who would else wait for their timeout.
      worker_.refuse("an earlier call of the group failed: " + error);
      close_exchange();
    }
    TORCH_CHECK_WITH(DistBackendError, error.empty(), error);
  };
  return submit(name(collective), type, std::move(inputs), std::move(outputs), timeout, std::move(run),
                std::move(value));
}

void ProcessGroupZipCCL::count(Collective collective, const Counters& counters) {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  if (measuring_) {
    measured_ += counters;
    return;
  }
  auto& stats = stats_[name(collective)];
  stats.calls++;
  (counters.coded_messages != 0 ? stats.zipped : stats.raw)++;
  stats.counters += counters;
}

std::map<std::string, CollectiveStats> ProcessGroupZipCCL::stats() {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  return stats_;
}

void ProcessGroupZipCCL::reset_stats() {
  std::lock_guard<std::mutex> lock(stats_mutex_);
  stats_.clear();
}

}  // namespace zipccl
