#include "process_group/cuda_calls.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <ATen/cuda/CUDAGraphsUtils.cuh>
#include <deque>
#include <map>

#include "collectives/backend_transport.h"
#include "collectives/cuda/stream_exchange.h"

namespace zipccl {
namespace {

using c10::cuda::CUDAStream;
using c10::cuda::CUDAStreamGuard;

at::Tensor as_tensor(const void* data, uint64_t bytes, c10::DeviceIndex device) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCUDA, device);
  if (bytes == 0) return at::empty({0}, options);
  return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, options);
}

// Over a backend for CUDA tensors, such as ProcessGroupNCCL. Its all-to-all makes pairs of ranks meet also for nothing,
// so that all ranks would have to come: sends and receives meet only whom they concern. It has to be connected before.
class CollectiveTransport final : public StreamTransport {
 public:
  CollectiveTransport(c10::intrusive_ptr<c10d::Backend> backend, c10::DeviceIndex device)
      : backend_(std::move(backend)), device_(device) {}
  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }

  void exchange(const std::vector<Range>& sends, const std::vector<Range>& receives, cudaStream_t stream) override {
    const auto anything = [this](const std::vector<Range>& ranges) {
      for (int peer = 0; peer < size(); peer++) {
        if (peer != rank() && ranges[peer].bytes != 0) return true;
      }
      return false;
    };
    if (!anything(sends) && !anything(receives)) return;
    const CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(stream, device_));
    backend_->startCoalescing();
    for (int step = 1; step < size(); step++) {
      const int to = (rank() + step) % size(), from = (rank() + size() - step) % size();
      if (receives[from].bytes != 0) {
        Tensors tensors{as_tensor(receives[from].data, receives[from].bytes, device_)};
        backend_->recv(tensors, from, 0);
      }
      if (sends[to].bytes != 0) {
        Tensors tensors{as_tensor(sends[to].data, sends[to].bytes, device_)};
        backend_->send(tensors, to, 0);
      }
    }
    finish(backend_->endCoalescing());
  }

  void all_gather(const void* input, void* output, uint64_t bytes, cudaStream_t stream) override {
    const CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(stream, device_));
    at::Tensor from = as_tensor(input, bytes, device_), to = as_tensor(output, bytes * size(), device_);
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    finish(backend_->_allgather_base(to, from, options));
  }

 private:
  // A wait makes the current stream wait, not the host, and nothing at all where the backend ran on the current stream.
  static void finish(const c10::intrusive_ptr<c10d::Work>& work) {
    if (work) work->wait();
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const c10::DeviceIndex device_;
};

// Through processor memory, over a backend for CPU tensors. The host waits; for tests, with several ranks on one GPU.
class StagedTransport final : public StreamTransport {
 public:
  StagedTransport(c10::intrusive_ptr<c10d::Backend> backend, int tag, std::chrono::milliseconds timeout)
      : transport_(std::move(backend)), tag_(tag), timeout_(timeout) {}
  int rank() const override { return transport_.rank(); }
  int size() const override { return transport_.size(); }

  void exchange(const std::vector<Range>& sends, const std::vector<Range>& receives, cudaStream_t stream) override {
    std::vector<at::Tensor> staged_sends, staged_receives;
    for (const Range& range : receives) staged_receives.push_back(staging(range.bytes));
    for (const Range& range : sends) {
      staged_sends.push_back(staging(range.bytes));
      copy(staged_sends.back().data_ptr(), range.data, range.bytes, stream);
    }
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    std::vector<std::unique_ptr<Posted>> posted;
    for (int step = 1; step < size(); step++) {
      const int peer = (rank() + size() - step) % size();
      if (receives[peer].bytes == 0) continue;
      posted.push_back(transport_.receive(peer, tag_, staged_receives[peer].data_ptr(), receives[peer].bytes));
    }
    for (int step = 1; step < size(); step++) {
      const int peer = (rank() + step) % size();
      if (sends[peer].bytes == 0) continue;
      posted.push_back(transport_.send(peer, tag_, staged_sends[peer].data_ptr(), sends[peer].bytes));
    }
    for (auto& one : posted) one->wait(timeout_);
    for (int peer = 0; peer < size(); peer++) {
      if (peer != rank()) copy(receives[peer].data, staged_receives[peer].data_ptr(), receives[peer].bytes, stream);
    }
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  }

  void abort() override { transport_.abort(); }

  void all_gather(const void* input, void* output, uint64_t bytes, cudaStream_t stream) override {
    std::vector<Range> sends, receives;
    for (int peer = 0; peer < size(); peer++) {
      sends.push_back({const_cast<void*>(input), peer == rank() ? 0 : bytes});
      receives.push_back({static_cast<uint8_t*>(output) + peer * bytes, peer == rank() ? 0 : bytes});
    }
    exchange(sends, receives, stream);
  }

 private:
  static at::Tensor staging(uint64_t bytes) {
    return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
  }
  static void copy(void* to, const void* from, uint64_t bytes, cudaStream_t stream) {
    if (bytes != 0) C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
  }

  BackendTransport transport_;
  const int tag_;
  const std::chrono::milliseconds timeout_;
};

// From PyTorch's allocator, for the current stream: released memory is reused in that stream's order.
class CachedMemory final : public StreamMemory {
 public:
  std::shared_ptr<uint8_t> allocate(uint64_t bytes, cudaStream_t stream) override {
    auto& allocator = *c10::cuda::CUDACachingAllocator::get();
    auto* memory = static_cast<uint8_t*>(allocator.raw_alloc_with_stream(bytes, stream));
    return {memory, [&allocator](uint8_t* pointer) { allocator.raw_delete(pointer); }};
  }
};

// What a work, the caller's thread and the worker share of a call.
struct CallState {
  const Collective collective;
  const uint64_t sequence;
  explicit CallState(const JobList& call) : collective(call.collective), sequence(call.sequence) {}

  std::mutex mutex;
  bool queued = false;  // all of it is
  int runs = 0;         // of its exchanges, and
  int finished = 0;     // how many of them are done
  bool done = false;
  std::string error;
  Counters counters;

  at::cuda::CUDAEvent end;  // behind all that the call queued
  // What an asynchronous call works on. It goes when the work has been waited for, or else when the call is done, on a
  // caller's thread: the worker must not come to the allocator's lock, or to the GIL.
  JobList call;

  void release() {
    JobList released;
    std::lock_guard<std::mutex> lock(mutex);
    std::swap(released, call);
  }
  bool over() {
    std::lock_guard<std::mutex> lock(mutex);
    return done && end.query();
  }
};

class WorkCuda final : public c10d::Work {
 public:
  // `stream` is the one that the call was queued on.
  WorkCuda(int rank, const std::string& title, const JobList& call, std::shared_ptr<CallState> state, CUDAStream stream)
      : c10d::Work(rank, call.type, title.c_str(), call.inputs),
        title_(title),
        state_(std::move(state)),
        outputs_(call.outputs),
        sequence_(call.sequence),
        timeout_(call.timeout),
        future_(
            c10::make_intrusive<c10::ivalue::Future>(call.value.type(), std::vector<c10::Device>{stream.device()})) {
    {
      const CUDAStreamGuard guard(stream);
      future_->markCompleted(call.value);  // in stream order, as the future knows
    }
    // A profiler's event is about the call, as with ProcessGroupNCCL; kernels have their own.
    if (recordFunctionEndCallback_) recordFunctionEndCallback_();
  }

  bool isCompleted() override {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->done && (!state_->error.empty() || state_->end.query());
  }
  bool isSuccess() const override {
    std::lock_guard<std::mutex> lock(state_->mutex);
    return state_->error.empty();
  }
  std::exception_ptr exception() const override {
    try {
      check();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  // The current stream waits; the host does not.
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    check();
    state_->end.block(c10::cuda::getCurrentCUDAStream(state_->end.device_index()));
    state_->release();
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }
#ifdef C10D_BACKEND_HAS_HOOKS
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
  void blockCurrentStream() override { synchronize(); }
#endif

 private:
  void check() const {
    std::lock_guard<std::mutex> lock(state_->mutex);
    TORCH_CHECK_WITH(DistBackendError, state_->error.empty(), state_->error);
  }

  const std::string title_;
  const std::shared_ptr<CallState> state_;
  const Tensors outputs_;
  const uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class CudaCallsOnStreams final : public CudaCalls {
 public:
  explicit CudaCallsOnStreams(CudaGroup group) : group_(std::move(group)) {}

  c10::intrusive_ptr<c10d::Work> run(JobList call, bool asynchronous) override {
    const c10::Device device = call.outputs.empty() ? call.inputs[0].device() : call.outputs[0].device();
    const c10::cuda::CUDAGuard device_guard(device);
    Lane& lane = lane_of(device.index());
    const CUDAStream current = c10::cuda::getCurrentCUDAStream();
    const CUDAStream stream = asynchronous ? lane.stream : current;
    if (asynchronous) {
      at::cuda::CUDAEvent ready;
      ready.record(current);
      ready.block(stream);
    }
    release_over();
    auto state = std::make_shared<CallState>(call);
    {
      const CUDAStreamGuard stream_guard(stream);
      const auto finished = [this, state](const Counters& counters, const std::string& error) {
        finish_run(*state, counters, error);
      };
      StreamExchange exchange(*lane.transport, *lane.worker, memory_, group_.options, group_.hosts, stream.stream(),
                              call.timeout, finished);
      for (size_t i = 0; i < call.jobs.size(); i++) {
        try {
          call.jobs[i](exchange, call.sequence + i);
        } catch (const std::exception& error) {
          const std::string text = describe(call.collective, call.sequence + i, error.what());
          lane.worker->abort(text);
          TORCH_CHECK_WITH(DistBackendError, false, text);
        }
      }
      state->end.record(stream);
      seal(*state, exchange.runs());
    }
    const std::string title = c10::str("zipccl:", name(call.collective));
    auto work = c10::make_intrusive<WorkCuda>(group_.rank, title, call, state, stream);
    if (asynchronous) {  // otherwise memory may be used again at once, in the stream's order
      state->call = std::move(call);
      pending_.push_back(state);
    }
    return work;
  }

  void abort(const std::string& why) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [device, lane] : lanes_) {
      lane.worker->abort(why);
      lane.transport->abort();
    }
  }

  void drain() override {
    for (auto& [device, lane] : lanes_) lane.worker->drain();
    release_over();
  }

 private:
  // What calls on one device share.
  struct Lane {
    std::unique_ptr<StreamTransport> transport;
    std::unique_ptr<StreamWorker> worker;
    CUDAStream stream;  // of asynchronous calls
  };

  // All ranks come here in the same call, their first on this device.
  Lane& lane_of(c10::DeviceIndex device) {
    const auto found = lanes_.find(device);
    if (found != lanes_.end()) return found->second;
    std::unique_ptr<StreamTransport> callers, workers;
    if (group_.plain) {
      callers = std::make_unique<CollectiveTransport>(group_.plain(), device);
      workers = std::make_unique<CollectiveTransport>(group_.exchange(device), device);
      connect(*callers, device);
      connect(*workers, device);
    } else {
      callers = std::make_unique<StagedTransport>(group_.staging, kCallersTag, group_.timeout);
      workers = std::make_unique<StagedTransport>(group_.staging, kWorkersTag, group_.timeout);
    }
    auto worker = std::make_unique<StreamWorker>(device, std::move(workers));
    std::lock_guard<std::mutex> lock(mutex_);
    return lanes_
        .emplace(device, Lane{std::move(callers), std::move(worker),
                              c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device)})
        .first->second;
  }

  // Makes the communicator and its connections, for which all ranks are needed: later, only those may come that have
  // something for each other, and a stream may stand at a flag meanwhile.
  static void connect(StreamTransport& transport, c10::DeviceIndex device) {
    const int size = transport.size();
    const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCUDA, device);
    const at::Tensor mine = at::zeros({size}, options), theirs = at::zeros({size}, options);
    const auto stream = c10::cuda::getCurrentCUDAStream(device);
    transport.all_gather(mine.data_ptr(), theirs.data_ptr(), 1, stream.stream());
    std::vector<Range> sends, receives;
    for (int peer = 0; peer < size; peer++) {
      sends.push_back({mine.data_ptr<uint8_t>() + peer, 1});
      receives.push_back({theirs.data_ptr<uint8_t>() + peer, 1});
    }
    transport.exchange(sends, receives, stream.stream());
    stream.synchronize();
  }

  std::string describe(Collective collective, uint64_t sequence, const std::string& what) const {
    return failure_text(collective, sequence, group_.name, group_.rank, what);
  }

  // By the worker's thread, after each exchange of the call.
  void finish_run(CallState& state, const Counters& counters, const std::string& error) {
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      state.finished++;
      state.counters += counters;
      if (!error.empty() && state.error.empty()) state.error = describe(state.collective, state.sequence, error);
    }
    complete(state);
  }

  // When all is queued.
  void seal(CallState& state, int runs) {
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      state.queued = true;
      state.runs = runs;
    }
    complete(state);
  }

  void complete(CallState& state) {
    {
      std::lock_guard<std::mutex> lock(state.mutex);
      if (state.done || !state.queued || state.finished < state.runs) return;
      state.done = true;
    }
    group_.finished(state.collective, state.counters);
  }

  // On the callers' thread.
  void release_over() {
    while (!pending_.empty() && pending_.front()->over()) {
      pending_.front()->release();
      pending_.pop_front();
    }
  }

  // Beside those of the exchange on processor memory, which uses the same backend.
  static constexpr int kCallersTag = 16, kWorkersTag = 17;

  const CudaGroup group_;
  CachedMemory memory_;
  std::mutex mutex_;                                // the callers' thread adds lanes, abort() comes from any thread
  std::deque<std::shared_ptr<CallState>> pending_;  // asynchronous calls, in their order
  std::map<c10::DeviceIndex, Lane> lanes_;
};

}  // namespace

std::unique_ptr<CudaCalls> make_cuda_calls(CudaGroup group) {
  return std::make_unique<CudaCallsOnStreams>(std::move(group));
}

bool cuda_calls_possible(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  return at::cuda::currentStreamCaptureStatusMayInitCtx() == at::cuda::CaptureStatus::None && streams_can_wait();
}

}  // namespace zipccl
