// The c10d face: a Backend that sends all-gathers, all-to-alls and reduce-scatters of floating-point tensors in
// compressed form and hands everything else to the backend that it wraps.
//
// Threads: as for any c10d backend, one thread at a time issues the calls of a group, in the same order on all ranks.
// Two backends are wrapped: `plain` serves what is handed on, on the caller's thread; `exchange` belongs to the
// worker thread. Calls therefore never race for one backend's order. For CUDA tensors there are two more, made when
// they are first needed.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/collectives.h"
#include "collectives/host_exchange.h"
#include "process_group/cuda_calls.h"
#include "process_group/options.h"
#include "process_group/tensor.h"
#include "process_group/windows.h"
#include "process_group/worker.h"

namespace zipccl {

// Why calls took the route that they took.
struct Decision {
  DType dtype = {};
  bool cuda = false;
  uint64_t part_bytes = 0;  // of the last such call
  Route route = {};
  const char* reason = "";
  uint64_t calls = 0;
  RouteSeconds predicted = kNoSeconds;
};

struct CollectiveStats {
  uint64_t calls = 0;
  uint64_t zipped = 0;  // calls that sent at least one coded message
  uint64_t raw = 0;     // calls over our exchange that sent none
  uint64_t native = 0;  // calls handed to the wrapped backend
  Counters counters;    // of zipped and raw calls
  std::vector<Decision> decisions;
};

class ProcessGroupZipCCL final : public c10d::Backend {
 public:
  template <typename T>
  using Ptr = c10::intrusive_ptr<T>;
  using WorkPtr = Ptr<c10d::Work>;

  // Makes a backend for CUDA tensors with the ranks of `like` and a rendezvous of its own in `store`. `name` tells the
  // backends of one group apart.
  using CudaFactory = std::function<Ptr<c10d::Backend>(const Ptr<c10d::Store>& store, const Ptr<c10d::Backend>& like,
                                                       const Ptr<ZipCCLOptions>& options, const std::string& name)>;

  // `plain` and `exchange`: two backends for CPU tensors with the same ranks, used by nobody else. Through `store` the
  // ranks check that they have the same options; where they do not, all of them throw.
  // `cuda_factory`: null: CUDA tensors are refused.
  ProcessGroupZipCCL(Ptr<c10d::Store> store, Ptr<c10d::Backend> plain, Ptr<c10d::Backend> exchange,
                     Ptr<ZipCCLOptions> options, CudaFactory cuda_factory);
  ~ProcessGroupZipCCL() override;

  const std::string getBackendName() const override { return "zipccl"; }
  Ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  Ptr<ZipCCLOptions> options() const { return options_; }
  Ptr<c10d::Backend> plain() const { return plain_; }
  Ptr<c10d::Backend> exchange_backend() const { return exchange_; }
  bool serves_cuda() const { return cuda_factory_ != nullptr; }
  // The wrapped backend that serves CUDA tensors which are handed on.
  Ptr<c10d::Backend> cuda_plain();

  const Hosts& hosts() const { return hosts_; }
  std::map<std::string, CollectiveStats> stats();
  // All that was measured.
  std::vector<ProfilePoint> profile();
  void reset_stats();

  bool supportsSplitting() const override { return plain_->supportsSplitting(); }
  // NCCL needs sends and receives to come together; on Gloo it makes no difference.
  bool supportsCoalescing() const override { return serves_cuda(); }
  Ptr<c10d::Backend> split(const Ptr<c10d::Store>& store, const std::vector<int>& ranks,
                           const Ptr<c10d::Backend::Options>& options) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setGroupUid(const std::string& uid) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;
  c10d::ErrorType getError() override;
  void eagerConnectSingleDevice(at::Device device) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return cuda_plain()->getMemAllocator(); }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return cuda_plain()->allocateTensor(size, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  void abort() override;
  void shutdown() override;
  // Ends the workers of all groups, before an interpreter that exits takes away the GIL that they may need.
  static void abort_all();

  // Zipped.
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;

  // Handed on; where the wrapped backend lacks a dtype or an operation, made of what it has.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  // What a rank has for another in a call of one or more tensors.
  struct Sizes {
    at::Tensor sample;  // the input with the largest part; of those that may go over our exchange, if any may
    uint64_t largest = 0;
    uint64_t total = 0;
    bool any = false;  // may
    bool all = true;
    void add(const at::Tensor& tensor, uint64_t part_bytes, bool exchangeable = true) {
      if (!sample.defined() || (exchangeable && (!any || part_bytes > largest))) {
        sample = tensor;
        largest = part_bytes;
      }
      total += part_bytes;
      any = any || exchangeable;
      all = all && exchangeable;
    }
  };

  // The route of a call (routing.cpp): a pure function of what all its ranks agree on. `exchange`, `native`: whether
  // that is possible. Where the switcher has to measure, all ranks do.
  Route route_of(Collective collective, const Sizes& sizes, bool exchange, bool native);
  Route route_of(Collective collective, const at::Tensor& tensor, uint64_t part_bytes, bool exchange, bool native);
  // Of an all-to-all with split sizes.
  Route route_of_splits(const at::Tensor& tensor, bool native);
  Route switched(Collective collective, const Sizes& sizes, bool native, bool rare_review);
  void learn(const CallKind& kind, uint64_t bytes, const at::Tensor& sample);
  void review(const CallKind& kind, uint64_t bytes, const at::Tensor& sample, Route route);
  void agree_to_measure(const CallKind& kind, uint64_t bytes);
  // `once`: no more than one call of each.
  Measured measure(const CallKind& kind, uint64_t bytes, const at::Tensor& sample, const std::vector<Route>& routes,
                   bool once = false);
  WorkPtr measured_call(Collective collective, Route route, at::Tensor& output, at::Tensor& input);
  Route decided(Collective collective, const Sizes& sizes, const Choice& choice, const char* reason);

  // Whether tensors of this dtype may go over our exchange, on their device.
  bool exchangeable(const at::Tensor& tensor) const;
  std::shared_ptr<const KnownWindows> known_of(const at::Tensor& tensor) const;
  Job all_gather_job(Route route, const Tensors& outputs, const at::Tensor& input);
  Job reduce_scatter_job(Route route, const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& operation);
  Job all_reduce_job(Route route, const at::Tensor& tensor, const c10d::ReduceOp& operation);
  // The zipped all-reduce of these tensors; null if it is not for the exchange.
  WorkPtr exchange_all_reduce(Tensors& tensors, const c10d::ReduceOp& operation, c10d::OpType type,
                              std::chrono::milliseconds timeout, bool asynchronous);
  WorkPtr reduce_scatter_wrapped(Tensors outputs, std::vector<Tensors> inputs, const c10d::ReduceOp& operation,
                                 std::chrono::milliseconds timeout);
  WorkPtr all_to_all(const Tensors& outputs, const Tensors& inputs, Tensors result_outputs, Tensors result_inputs,
                     c10d::OpType type, Route route, const c10d::AllToAllOptions& options);

  // Peers may still be about to hear that this rank had nothing for them.
  void settle_exchange();
  // Ends the connections of the exchange, which tells peers that wait. By the worker, or when it is idle.
  void close_exchange();
  void check_device(const char* collective, const Tensors& tensors) const;
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds asked) const;

  // Runs `jobs` as one call that is counted as `collective`: those on CPU tensors on the worker. The work's future
  // holds `value`, or else `outputs`.
  WorkPtr submit_exchange(Collective collective, c10d::OpType type, Tensors inputs, Tensors outputs,
                          std::chrono::milliseconds timeout, bool asynchronous, std::vector<Job> jobs,
                          std::optional<c10::IValue> value = std::nullopt);
  // Hands a call on CUDA tensors on: `call` gets the backend that serves them.
  template <typename Call>
  WorkPtr hand_on_cuda(const char* collective, Call call);
  void count(Collective collective, const Counters& counters);
  CudaCalls& cuda_calls();
  Ptr<c10d::Backend> make_cuda_backend(const std::string& name);
  // Runs anything on the worker; `function` may use exchange_.
  WorkPtr submit(const char* collective, c10d::OpType type, Tensors inputs, Tensors outputs,
                 std::chrono::milliseconds timeout, std::function<void(std::chrono::milliseconds)> function,
                 std::optional<c10::IValue> value = std::nullopt);
  // The work of a call that was handed on, with a future and with these tensors as its result.
  WorkPtr with_result(WorkPtr work, Tensors outputs);
  // Counts a call that is handed on.
  void count_native(const char* collective);
  // Notes the work if calls are being coalesced.
  WorkPtr coalesced(WorkPtr work);
  WorkPtr point_to_point(WorkPtr work);

  const Ptr<c10d::Store> store_;
  Ptr<c10d::Backend> plain_;
  Ptr<c10d::Backend> exchange_;
  const Ptr<ZipCCLOptions> options_;
  const CudaFactory cuda_factory_;
  std::mutex cuda_mutex_;  // abort() comes from any thread
  Ptr<c10d::Backend> cuda_plain_;
  std::vector<Ptr<c10d::Backend>> cuda_exchanges_;  // one a device
  bool cuda_shut_down_ = false;
  std::unique_ptr<CudaCalls> cuda_calls_;
  std::mutex transport_mutex_;  // the worker drops the transport after a failure, abort() comes from any thread
  std::unique_ptr<Transport> transport_;
  HostState host_state_;  // after the transport, so that it goes first
  HostServices host_services_;
  Crew crew_;
  std::atomic<uint64_t> sequence_{0};
  uint64_t splits_ = 0;
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
  // While coalescing: whether the backend for CUDA tensors does too, and our own calls on them, for after that.
  bool cuda_coalescing_ = false;
  std::optional<c10::Device> cuda_device_;  // of those calls
  std::vector<JobList> cuda_coalesced_;

  Hosts hosts_;
  std::map<CallKind, double> since_review_;  // calls, as they count for the next
  std::atomic<bool> measuring_{false};

  std::mutex stats_mutex_;
  std::map<std::string, CollectiveStats> stats_;
  Switcher switcher_;  // changed by the callers' thread alone, and under the mutex
  Counters measured_;  // of what is being measured

  // Last, so that it goes first: its jobs use all of the above.
  Worker worker_;
};

}  // namespace zipccl
