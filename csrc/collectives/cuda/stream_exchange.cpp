#include "collectives/cuda/stream_exchange.h"

#include <cuda.h>

#include <cstdlib>
#include <cstring>

namespace zipccl {
namespace {

using Clock = std::chrono::steady_clock;

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("zipccl: ") + what + " failed: " + cudaGetErrorString(error));
  }
}

// Stream memory operations are the driver's alone. Nothing links to the driver, so that the library loads without one.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();  // it is remembered, and would be taken for the next launch's
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Function>(function);
}

auto wait_value() {
  static const auto function = driver_function<decltype(&cuStreamWaitValue32)>("cuStreamWaitValue32");
  return function;
}

auto write_value() {
  static const auto function = driver_function<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32");
  return function;
}

CUdeviceptr address(const uint32_t* flag) { return static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(flag)); }

bool environment_says(const char* name, const char* value) {
  const char* set = std::getenv(name);
  return set != nullptr && std::strcmp(set, value) == 0;
}

// What all segments of a call have in common.
struct Progress {
  Finished finished;
  Call call;
  Clock::time_point deadline;
  Counters counters;  // by the worker
  std::string error;
};

}  // namespace

bool streams_can_wait() {
  static const bool environment =
      !environment_says("CUDA_DEVICE_MAX_CONNECTIONS", "1") && !environment_says("CUDA_LAUNCH_BLOCKING", "1");
  return environment && wait_value() != nullptr && write_value() != nullptr;
}

// Its memory and events serve one segment after the other. One whose segment failed is never destroyed: its stream may
// still get to it, and to free its memory would be to wait for the device, which may stand still.
struct Ticket {
  uint32_t* flag = nullptr;            // device memory
  cuda::Findings* findings = nullptr;  // device memory
  cuda::Report* report = nullptr;      // pinned, and behind it:
  cuda::Sizes* outgoing_sizes = nullptr;
  cuda::Sizes* incoming_sizes = nullptr;
  cudaEvent_t begun = nullptr, encoded = nullptr, exchanged = nullptr, settled = nullptr;
  uint32_t value = 0;  // that the flag takes when the segment is done

  std::shared_ptr<Progress> progress;
  bool last = false;  // segment of the call
  Counters counters;  // what is known when the segment is queued
  std::vector<cuda::Outgoing> outgoing;
  std::vector<std::vector<int>> outgoing_peers;  // whom outgoing[i] goes to
  std::vector<cuda::Incoming> incoming;
  std::vector<int> incoming_peers;
  std::vector<cuda::Incoming> inputs;  // of a reduction: incoming, with the own values at their place
  cuda::Reducing reducing = {};        // output is null: no reduction
  std::vector<size_t> runs;            // of a reduction that first sums each host's inputs: how many they are, and
  std::vector<float*> sums;            //   where each sum goes; else empty

  // `setup`: a stream that waits for no other.
  Ticket(int size, cudaStream_t setup) {
    const size_t pinned = sizeof(cuda::Report) + 2 * static_cast<size_t>(size) * sizeof(cuda::Sizes);
    void* device = nullptr;
    void* host = nullptr;
    try {
      check(cudaMalloc(&device, sizeof(cuda::Findings) + sizeof(uint32_t)), "allocating a flag");
      findings = static_cast<cuda::Findings*>(device);
      flag = reinterpret_cast<uint32_t*>(findings + 1);
      // Not on the default stream, which waits for others: the flag may be waited for when they let it go on.
      check(cudaMemsetAsync(flag, 0, sizeof(uint32_t), setup), "clearing a flag");
      check(cudaStreamSynchronize(setup), "clearing a flag");
      check(cudaMallocHost(&host, pinned), "allocating pinned memory");
      report = static_cast<cuda::Report*>(host);
      outgoing_sizes = reinterpret_cast<cuda::Sizes*>(report + 1);
      incoming_sizes = outgoing_sizes + size;
      for (cudaEvent_t* event : {&begun, &encoded, &exchanged, &settled}) {
        check(cudaEventCreateWithFlags(event, cudaEventDefault), "creating an event");
      }
    } catch (...) {
      release();
      throw;
    }
  }
  ~Ticket() { release(); }
  Ticket(const Ticket&) = delete;

 private:
  void release() {
    for (cudaEvent_t event : {begun, encoded, exchanged, settled}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    cudaFree(findings);
    cudaFreeHost(report);
  }
};

// ---- The call, on the caller's thread

class StreamCall {
 public:
  StreamCall(StreamExchange& exchange, const Call& call, const Parts& parts)
      : exchange_(exchange),
        stream_(exchange.stream_),
        call_(call),
        parts_(parts),
        rank_(exchange.rank()),
        size_(exchange.size()),
        order_(exchange.hosts().order(exchange.members(parts))),
        segments_(exchange.options_, call, exchange.members(parts).size()),
        receives_(size_) {
    // Where all ranks send the same and as much, the transport's own all-gather knows the best way.
    gathers_ = parts_.same;
    for (uint64_t elements : parts_.incoming) gathers_ = gathers_ && elements == parts_.incoming[0];
  }

  void run() {
    exchange_.worker_.check_aborted();
    if (parts_.output == nullptr) copy_own_part();
    const uint64_t segments = size_ == 1 && parts_.output == nullptr ? 0 : segments_.count(parts_);
    auto progress = std::make_shared<Progress>();
    progress->finished = exchange_.finished_;
    progress->call = call_;
    progress->deadline = Clock::now() + exchange_.timeout_;
    if (segments == 0) {
      progress->finished(progress->counters, "");
      return;
    }
    allocate();
    for (uint64_t k = 0; k < segments; k++) {
      const uint64_t begin = k * segments_.elements();
      if (parts_.produce) parts_.produce(k, begin, segments_.elements());
      run_segment(k, progress, k + 1 == segments);
      if (parts_.deliver) parts_.deliver(begin, segments_.elements(), false);
    }
  }

 private:
  // Work memory of the call, for its longest segment; the next segment begins when the one before is done.
  void allocate() {
    outgoing_memory_.resize(size_);
    for (int peer = 0; peer < size_; peer++) {
      const uint64_t part = parts_.outgoing[peer].elements;
      const uint64_t elements = segments_.elements(part, 0);
      if (peer == rank_ || elements == 0) continue;
      if (parts_.same && shared_ >= 0) continue;
      if (parts_.same) shared_ = peer;
      auto& memory = outgoing_memory_[peer];
      memory.statics = allocate(segments_.largest_static_size(part));
      if (!segments_.coded(part)) continue;
      const bool known = call_.escapes != nullptr;  // then a segment may have no inline pool
      memory.pool = allocate(beyond_inline(pool_bound(elements), known ? 0 : segments_.inline_bytes(0, elements)));
      memory.low = allocate(low_bound(elements, call_.dtype));
      if (const int16_t* windows = parts_.outgoing[peer].windows) {
        const uint64_t bytes = chunk_count(part) * sizeof(int16_t);
        memory.windows = allocate(bytes);
        check(cudaMemcpyAsync(memory.windows.get(), windows, bytes, cudaMemcpyHostToDevice, stream_),
              "copying code windows");
      }
    }
    if (gathers_) {
      gathered_ = allocate(round_up(segments_.largest_static_size(parts_.incoming[0]), kAlignment) * size_);
    }
    for (int source = 0; source < size_ && !gathers_; source++) {
      const uint64_t part = parts_.incoming[source];
      const uint64_t elements = segments_.elements(part, 0);
      if (source != rank_ && elements != 0) receives_[source] = allocate(segments_.largest_static_size(part));
    }
    if (parts_.output != nullptr && size_ > cuda::kBatch) {
      const uint64_t elements = segments_.elements(parts_.incoming[rank_], 0);
      accumulator_ = allocate(elements * sizeof(float));
    }
    if (parts_.output != nullptr && order_.size() > 1) {
      const uint64_t elements = segments_.elements(parts_.incoming[rank_], 0);
      for (size_t i = 0; i < order_.size(); i++) sums_of_hosts_.push_back(allocate(elements * sizeof(float)));
    }
    if (exchange_.options_.checksum) sums_ = allocate(2 * size_ * sizeof(uint64_t));
  }

  std::shared_ptr<uint8_t> allocate(uint64_t bytes) {
    return bytes == 0 ? nullptr : exchange_.memory_.allocate(round_up(bytes, kAlignment), stream_);
  }

  void copy_own_part() {
    const Part& own = parts_.outgoing[rank_];
    if (own.elements == 0 || own.data == parts_.outputs[rank_]) return;
    check(cudaMemcpyAsync(parts_.outputs[rank_], own.data, own.elements * element_bytes(call_.dtype),
                          cudaMemcpyDeviceToDevice, stream_),
          "copying the own part");
  }

  void run_segment(uint64_t k, const std::shared_ptr<Progress>& progress, bool last) {
    auto ticket = exchange_.worker_.take_ticket();
    try {
      queue_segment(*ticket, k, progress, last);
    } catch (...) {
      ticket->progress.reset();
      ticket.release();  // see Ticket
      throw;
    }
    exchange_.worker_.submit(std::move(ticket));
  }

  void queue_segment(Ticket& ticket, uint64_t k, const std::shared_ptr<Progress>& progress, bool last) {
    ticket.progress = progress;
    ticket.last = last;
    ticket.value++;
    *ticket.report = {};
    std::memset(ticket.outgoing_sizes, 0, 2 * static_cast<size_t>(size_) * sizeof(cuda::Sizes));
    list_outgoing(ticket, k);
    list_incoming(ticket, k);

    check(cudaMemsetAsync(ticket.findings, 0, sizeof(cuda::Findings), stream_), "clearing findings");
    check(cudaEventRecord(ticket.begun, stream_), "recording an event");
    auto* sums = reinterpret_cast<uint64_t*>(sums_.get());
    if (!ticket.outgoing.empty()) cuda::encode(ticket.outgoing, call_.dtype, sums, stream_);
    check(cudaEventRecord(ticket.encoded, stream_), "recording an event");
    move(ticket, k);
    check(cudaEventRecord(ticket.exchanged, stream_), "recording an event");
    if (sums != nullptr && !ticket.incoming.empty()) {
      cuda::sum_messages(ticket.incoming, call_.dtype, sums + size_, stream_);
    }
    decode(ticket, stream_);
    cuda::settle(
        ticket.outgoing, ticket.incoming,
        {ticket.findings, ticket.report, ticket.outgoing_sizes, ticket.incoming_sizes, ticket.flag, ticket.value},
        stream_);
    check(cudaEventRecord(ticket.settled, stream_), "recording an event");
    const CUresult waits =
        wait_value()(reinterpret_cast<CUstream>(stream_), address(ticket.flag), ticket.value, CU_STREAM_WAIT_VALUE_GEQ);
    if (waits != CUDA_SUCCESS) throw std::runtime_error("zipccl: the stream cannot wait for a flag");
  }

  void list_outgoing(Ticket& ticket, uint64_t k) {
    ticket.outgoing.clear();
    ticket.outgoing_peers.clear();
    ticket.counters = {};
    for (int peer = 0; peer < size_; peer++) {
      const Part& part = parts_.outgoing[peer];
      const uint64_t elements = segments_.elements(part.elements, k);
      if (peer == rank_ || elements == 0) continue;
      const bool coded = segments_.coded(part.elements);
      ticket.counters.messages++;
      ticket.counters.raw_bytes += elements * element_bytes(call_.dtype);
      ticket.counters.wire_bytes += segments_.static_size(part.elements, k);
      if (exchange_.is_local(peer)) ticket.counters.local_bytes += segments_.static_size(part.elements, k);
      if (coded) {
        ticket.counters.coded_messages++;
        ticket.counters.elements += elements;
      }
      if (parts_.same && peer != shared_) {
        ticket.outgoing_peers[0].push_back(peer);
        continue;
      }
      const auto& memory = outgoing_memory_[peer];
      cuda::Outgoing message = {};
      message.values = parts_.source(peer, k, k * segments_.elements(), call_.dtype);
      message.elements = elements;
      message.statics = memory.statics.get();
      message.pool = memory.pool.get();
      message.low = memory.low.get();
      if (memory.windows != nullptr) {
        message.windows =
            reinterpret_cast<const int16_t*>(memory.windows.get()) + k * segments_.elements() / kChunkElements;
      }
      message.inline_bytes = segments_.inline_bytes(k, elements);
      message.scale = parts_.reduce.scale;
      message.plain = !coded;
      ticket.outgoing.push_back(message);
      ticket.outgoing_peers.push_back({peer});
    }
  }

  void list_incoming(Ticket& ticket, uint64_t k) {
    ticket.incoming.clear();
    ticket.incoming_peers.clear();
    ticket.inputs.clear();
    ticket.reducing = {};
    ticket.runs.clear();
    ticket.sums.clear();
    for (const auto& run : order_) {
      const size_t before = ticket.inputs.size();
      list_incoming(ticket, k, run);
      if (order_.size() == 1 || parts_.output == nullptr || ticket.inputs.size() == before) continue;
      ticket.sums.push_back(reinterpret_cast<float*>(sums_of_hosts_[ticket.runs.size()].get()));
      ticket.runs.push_back(ticket.inputs.size() - before);
    }
    if (parts_.output != nullptr) {
      ticket.reducing.reduction = parts_.reduce.reduction;
      ticket.reducing.divisor = parts_.reduce.divisor;
      ticket.reducing.elements = segments_.elements(parts_.incoming[rank_], k);
      ticket.reducing.accumulator = reinterpret_cast<float*>(accumulator_.get());
      ticket.reducing.output = at_offset(parts_.output, k * segments_.elements(), parts_.output_dtype);
      ticket.reducing.output_dtype = parts_.output_dtype;
    }
  }

  void list_incoming(Ticket& ticket, uint64_t k, const std::vector<int>& sources) {
    const uint64_t offset = k * segments_.elements();
    auto* sums = reinterpret_cast<uint64_t*>(sums_.get());
    for (int source : sources) {
      const uint64_t part = parts_.incoming[source];
      cuda::Incoming message = {};
      message.elements = segments_.elements(part, k);
      if (message.elements == 0) continue;
      if (source == rank_) {
        message.values = parts_.source(rank_, k, offset, call_.dtype);
        message.scale = parts_.reduce.scale;
        ticket.inputs.push_back(message);
        continue;
      }
      message.statics = gathers_ ? gathered_.get() + source * gathered_size(k) : receives_[source].get();
      message.inline_bytes = segments_.inline_bytes(k, message.elements);
      message.plain = !segments_.coded(part);
      if (sums != nullptr) message.sum = sums + size_ + ticket.incoming.size();
      if (parts_.output == nullptr) message.output = at_offset(parts_.outputs[source], offset, call_.dtype);
      ticket.inputs.push_back(message);
      ticket.incoming.push_back(message);
      ticket.incoming_peers.push_back(source);
    }
  }

  // Bytes from one rank's message to the next in what is gathered.
  uint64_t gathered_size(uint64_t k) const {
    return round_up(segments_.static_size(parts_.incoming[0], k), kAlignment);
  }

  void move(const Ticket& ticket, uint64_t k) {
    if (gathers_) {
      const uint64_t bytes = gathered_size(k);
      if (!ticket.outgoing.empty()) {
        exchange_.transport_.all_gather(ticket.outgoing[0].statics, gathered_.get(), bytes, stream_);
      }
      return;
    }
    std::vector<Range> sends(size_), receives(size_);
    for (int peer = 0; peer < size_; peer++) {
      const uint64_t part = parts_.outgoing[peer].elements;
      if (peer == rank_ || segments_.elements(part, k) == 0) continue;
      const auto& memory = outgoing_memory_[parts_.same ? shared_ : peer];
      sends[peer] = {memory.statics.get(), segments_.static_size(part, k)};
    }
    for (size_t i = 0; i < ticket.incoming.size(); i++) {
      const int source = ticket.incoming_peers[i];
      receives[source] = {receives_[source].get(), segments_.static_size(parts_.incoming[source], k)};
    }
    exchange_.transport_.exchange(sends, receives, stream_);
  }

 public:
  static void decode(const Ticket& ticket, cudaStream_t stream) {
    const DType dtype = ticket.progress->call.dtype;
    if (!ticket.runs.empty()) {
      reduce_by_hosts(ticket, stream);
    } else if (ticket.reducing.output != nullptr) {
      if (!ticket.inputs.empty()) cuda::reduce(ticket.inputs, dtype, ticket.reducing, ticket.findings, stream);
    } else if (!ticket.incoming.empty()) {
      cuda::decode(ticket.incoming, dtype, ticket.findings, stream);
    }
  }

 private:
  static void reduce_by_hosts(const Ticket& ticket, cudaStream_t stream) {
    std::vector<cuda::Incoming> sums;
    auto input = ticket.inputs.begin();
    for (size_t i = 0; i < ticket.runs.size(); i++) {
      cuda::Reducing reducing = ticket.reducing;
      reducing.divisor = 1.0f;
      reducing.output = ticket.sums[i];
      reducing.output_dtype = DType::kFloat32;
      reducing.first_message = static_cast<uint32_t>(input - ticket.inputs.begin());
      cuda::reduce({input, input + ticket.runs[i]}, ticket.progress->call.dtype, reducing, ticket.findings, stream);
      input += ticket.runs[i];
      cuda::Incoming sum = {};
      sum.values = ticket.sums[i];
      sum.elements = ticket.reducing.elements;
      sum.scale = 1.0f;
      sums.push_back(sum);
    }
    cuda::Reducing reducing = ticket.reducing;
    reducing.after_findings = true;
    cuda::reduce(sums, DType::kFloat32, reducing, ticket.findings, stream);
  }

  struct OutgoingMemory {
    std::shared_ptr<uint8_t> statics, pool, low, windows;
  };

  StreamExchange& exchange_;
  const cudaStream_t stream_;
  const Call& call_;
  const Parts& parts_;
  const int rank_;
  const int size_;
  const std::vector<std::vector<int>> order_;
  const Segments segments_;
  bool gathers_;
  int shared_ = -1;  // the peer whose message serves all
  std::vector<OutgoingMemory> outgoing_memory_;
  std::vector<std::shared_ptr<uint8_t>> receives_;
  std::shared_ptr<uint8_t> gathered_, accumulator_, sums_;
  std::vector<std::shared_ptr<uint8_t>> sums_of_hosts_;
};

void StreamExchange::run(const Call& call, const Parts& parts) {
  runs_++;
  StreamCall(*this, call, parts).run();
}

uint8_t* StreamExchange::stage(int index, uint64_t bytes) {
  return (stages_[index] = memory_.allocate(round_up(bytes, kAlignment), stream_)).get();
}

// ---- The rest of the call, on the worker's thread

constexpr int kFirstTickets = 16;

StreamWorker::StreamWorker(int device, std::unique_ptr<StreamTransport> transport)
    : device_(device), transport_(std::move(transport)) {
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities");
  // A stream that waits must not be before the worker's in a hardware queue: those of the highest priority are apart
  // from the others'.
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "creating a stream");
  check(cudaStreamCreateWithPriority(&setup_stream_, cudaStreamNonBlocking, greatest), "creating a stream");
  // A pool of its own, which gives nothing back: in the device's, memory that another stream frees behind a flag could
  // make this one wait for that flag.
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  check(cudaMemPoolCreate(&memory_, &properties), "creating a memory pool");
  uint64_t keep = UINT64_MAX;
  check(cudaMemPoolSetAttribute(memory_, cudaMemPoolAttrReleaseThreshold, &keep), "setting up a memory pool");
  // Later ones may be allocated while streams wait, which can hold up the host.
  for (int i = 0; i < kFirstTickets; i++) {
    free_.push_back(std::make_unique<Ticket>(transport_->size(), setup_stream_));
  }
  thread_ = std::thread([this] { loop(); });
}

StreamWorker::~StreamWorker() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
  if (!aborted_.empty()) {
    for (auto& ticket : free_) ticket.release();  // see Ticket
  }
  free_.clear();
  cudaStreamDestroy(stream_);
  cudaStreamDestroy(setup_stream_);
  cudaMemPoolDestroy(memory_);
}

void StreamWorker::abort(const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_.empty()) aborted_ = why;
  }
  transport_->abort();
}

void StreamWorker::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return in_flight_ == 0; });
}

void StreamWorker::check_aborted() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!aborted_.empty()) throw std::runtime_error(aborted_);
}

std::unique_ptr<Ticket> StreamWorker::take_ticket() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      auto ticket = std::move(free_.back());
      free_.pop_back();
      return ticket;
    }
  }
  return std::make_unique<Ticket>(transport_->size(), setup_stream_);
}

void StreamWorker::submit(std::unique_ptr<Ticket> ticket) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(ticket));
    in_flight_++;
  }
  changed_.notify_all();
}

void StreamWorker::loop() {
  cudaSetDevice(device_);
  // A graph that another thread captures meanwhile is none of ours.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
  cudaThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto ticket = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    std::string error;
    try {
      error = finish(*ticket);
    } catch (const std::exception& failure) {
      error = failure.what();
    }
    if (!error.empty()) {
      // Let the stream go on: whoever waits for the call learns that its outputs are garbage.
      write_value()(reinterpret_cast<CUstream>(stream_), address(ticket->flag), ticket->value,
                    CU_STREAM_WRITE_VALUE_DEFAULT);
    }
    // Before anyone is told: whoever knows of a failure finds that later calls fail.
    if (!error.empty()) abort("an earlier call of the group failed: " + error);
    Progress& progress = *ticket->progress;
    if (progress.error.empty()) progress.error = error;
    if (ticket->last) progress.finished(progress.counters, progress.error);
    ticket->progress.reset();
    lock.lock();
    if (error.empty()) {
      free_.push_back(std::move(ticket));
    } else {
      ticket.release();  // see Ticket
    }
    in_flight_--;
    changed_.notify_all();
  }
}

// Returns when the event has happened, with a text if it has not in time.
std::string StreamWorker::wait(cudaEvent_t event, const Ticket& ticket) {
  auto pause = std::chrono::microseconds(5);
  while (true) {
    const cudaError_t state = cudaEventQuery(event);
    if (state == cudaSuccess) return "";
    cudaGetLastError();  // the state is remembered as an error, which the next launch would take for its own
    if (state != cudaErrorNotReady) return std::string("the device failed: ") + cudaGetErrorString(state);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!aborted_.empty()) return aborted_;
    }
    if (Clock::now() > ticket.progress->deadline) {
      return "timed out; are all ranks alive, and did they make the same call with the same sizes?";
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(200));
  }
}

std::string StreamWorker::finish(Ticket& ticket) {
  {
    // After a segment whose dynamic part was not exchanged there is none: the peers would take it for the one before.
    std::lock_guard<std::mutex> lock(mutex_);
    if (!aborted_.empty()) return aborted_;
  }
  if (std::string error = wait(ticket.settled, ticket); !error.empty()) return error;
  Counters& counters = ticket.progress->counters;
  counters += ticket.counters;
  const auto seconds = [](cudaEvent_t begin, cudaEvent_t end) {
    float milliseconds = 0;
    return cudaEventElapsedTime(&milliseconds, begin, end) == cudaSuccess ? milliseconds * 1e-3 : 0.0;
  };
  counters.encode_seconds += seconds(ticket.begun, ticket.encoded);
  counters.exchange_seconds += seconds(ticket.encoded, ticket.exchanged);
  counters.decode_seconds += seconds(ticket.exchanged, ticket.settled);
  for (size_t i = 0; i < ticket.outgoing.size(); i++) {
    const cuda::Sizes& sizes = ticket.outgoing_sizes[i];
    const uint64_t peers = ticket.outgoing_peers[i].size();
    const uint64_t dynamic = beyond_inline(sizes.pool_bytes, ticket.outgoing[i].inline_bytes) + sizes.low_bytes;
    counters.escapes += peers * sizes.pool_bytes;
    counters.dynamic_bytes += peers * dynamic;
    counters.wire_bytes += peers * dynamic;
  }
  std::string error;
  if (ticket.report->open != 0) {
    const auto start = Clock::now();
    error = finish_dynamic(ticket);  // also after a fault: the peers wait for their parts
    counters.exchange_seconds += std::chrono::duration<double>(Clock::now() - start).count();
    const cuda::Findings& findings = ticket.report->findings;
    if (error.empty() && findings.fault != 0) {
      const auto& messages = ticket.reducing.output != nullptr ? ticket.inputs : ticket.incoming;
      int source = -1;
      for (size_t i = 0; i < ticket.incoming.size() && findings.message < messages.size(); i++) {
        if (ticket.incoming[i].statics == messages[findings.message].statics) source = ticket.incoming_peers[i];
      }
      error = "rank " + std::to_string(source) + " sent a corrupted message: chunk " + std::to_string(findings.chunk) +
              ": " + cuda::describe(static_cast<cuda::Fault>(findings.fault));
    }
  }
  counters.total_seconds = counters.encode_seconds + counters.exchange_seconds + counters.decode_seconds;
  return error;
}

std::string StreamWorker::finish_dynamic(Ticket& ticket) {
  const int size = transport_->size();
  const DType dtype = ticket.progress->call.dtype;
  std::vector<Range> pool_sends(size), pool_receives(size), low_sends(size), low_receives(size);
  bool pools = false, lows = false;
  for (size_t i = 0; i < ticket.outgoing.size(); i++) {
    const cuda::Outgoing& message = ticket.outgoing[i];
    const cuda::Sizes& sizes = ticket.outgoing_sizes[i];
    const Range pool = {message.pool, beyond_inline(sizes.pool_bytes, message.inline_bytes)};
    const Range low = {message.low, sizes.low_bytes};
    for (int peer : ticket.outgoing_peers[i]) {
      if (message.plain) continue;
      pool_sends[peer] = pool;
      low_sends[peer] = low;
      pools = pools || pool.bytes != 0;
      lows = lows || low.bytes != 0;
    }
  }
  // Not from an allocator that the caller's thread shares: it may hold its lock while it waits for the very stream that
  // waits for us.
  std::vector<std::shared_ptr<void>> allocated;
  const auto allocate = [&](uint64_t bytes) {
    void* memory = nullptr;
    check(cudaMallocFromPoolAsync(&memory, bytes, memory_, stream_),
          "allocating memory for the dynamic part of a message");
    allocated.emplace_back(memory, [this](void* data) { cudaFreeAsync(data, stream_); });
    return memory;
  };
  for (size_t i = 0; i < ticket.incoming.size(); i++) {
    cuda::Incoming& message = ticket.incoming[i];
    const cuda::Sizes& sizes = ticket.incoming_sizes[i];
    // A header with impossible sizes, which decoding refuses, says nothing of a dynamic part.
    const bool possible =
        sizes.pool_bytes <= pool_bound(message.elements) && sizes.low_bytes <= low_bound(message.elements, dtype);
    if (message.plain || !possible) continue;
    const int source = ticket.incoming_peers[i];
    message.pool_room = beyond_inline(sizes.pool_bytes, message.inline_bytes);
    message.low_room = sizes.low_bytes;
    if (message.pool_room != 0) pool_receives[source] = {allocate(message.pool_room), message.pool_room};
    if (message.low_room != 0) low_receives[source] = {allocate(message.low_room), message.low_room};
    message.pool = static_cast<const uint8_t*>(pool_receives[source].data);
    message.low = static_cast<const uint8_t*>(low_receives[source].data);
    pools = pools || message.pool_room != 0;
    lows = lows || message.low_room != 0;
  }
  for (cuda::Incoming& input : ticket.inputs) {
    for (const cuda::Incoming& message : ticket.incoming) {
      if (input.values == nullptr && input.statics == message.statics) input = message;
    }
  }
  check(cudaStreamWaitEvent(stream_, ticket.settled, 0), "waiting for an event");
  if (pools) transport_->exchange(pool_sends, pool_receives, stream_);
  if (lows) transport_->exchange(low_sends, low_receives, stream_);
  if (ticket.report->findings.deferred != 0) {
    check(cudaMemsetAsync(ticket.findings, 0, sizeof(cuda::Findings), stream_), "clearing findings");
    if (!ticket.incoming.empty() && ticket.incoming[0].sum != nullptr) {
      cuda::sum_messages(ticket.incoming, dtype, const_cast<uint64_t*>(ticket.incoming[0].sum), stream_);
    }
    StreamCall::decode(ticket, stream_);
    check(cudaMemcpyAsync(&ticket.report->findings, ticket.findings, sizeof(cuda::Findings), cudaMemcpyDeviceToHost,
                          stream_),
          "copying findings");
  }
  const CUresult written = write_value()(reinterpret_cast<CUstream>(stream_), address(ticket.flag), ticket.value,
                                         CU_STREAM_WRITE_VALUE_DEFAULT);
  if (written != CUDA_SUCCESS) return "the flag of the call could not be set";
  check(cudaEventRecord(ticket.settled, stream_), "recording an event");
  return wait(ticket.settled, ticket);
}

}  // namespace zipccl
