// The CUDA runtime's functions over an emulated device: one thread that runs the operations of all streams, each
// stream's in order, and chooses among the streams as badly as it may.
#include "runtime.h"

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "engine.h"

#if defined(__SANITIZE_ADDRESS__)
// Fibers that a failed kernel leaves, and the device itself, are not leaks.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }
#endif

namespace simt {
namespace {

using std::chrono::steady_clock;

// What a launch may ask for, as on sm_90.
constexpr size_t kSharedBytes = 48 * 1024, kSharedBytesOptin = 227 * 1024;

struct Operation {
  std::string label;
  std::function<bool()> ready;            // empty: always
  std::function<void(const Place&)> run;  // empty: a kernel
  Launch launch;
  std::shared_ptr<struct Record> waits_for, records;
  bool after_all = false;  // ordered by something the race detector does not see, so after all that is done
  uint64_t number = 0;     // over all streams
  Clock host;
};

// One cudaEventRecord.
struct Record {
  bool done = false;
  steady_clock::time_point when;
  Clock clock;
};

struct Event {
  std::shared_ptr<Record> last;  // null: never recorded, and then done
};

struct Stream {
  size_t number = 0;
  int device = 0;
  int priority = 0;
  bool blocking = true, legacy = false, destroyed = false;
  std::deque<Operation> operations;
  Grid* grid = nullptr;   // the first operation, if it is a kernel that has started
  bool spinning = false;  // its last turn changed nothing
  uint64_t submitted = 0, finished = 0;
  Clock clock;
};

struct Device {
  std::mutex mutex;
  std::condition_variable work, progress;
  std::thread thread;
  Config config;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Stream>> streams;
  std::map<int, Stream*> legacy;  // by device
  std::set<Event*> events;
  std::map<void*, size_t> allocations, host_allocations;
  std::map<const void*, size_t> shared_limits;  // by kernel
  uint64_t operations = 0;
  size_t created = 0, last_stream = 0;  // numbers of streams
  Clock host;
  std::string error;
  bool failed = false, stopping = false;
  steady_clock::time_point last_call, last_progress;
};

Device& device() {
  static Device* const device = new Device;  // never destroyed: its thread outlives main()
  return *device;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool is_device_thread = false;

cudaError_t set_error(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

[[noreturn]] void stop(const std::string& text, int code) {
  std::fflush(stdout);
  std::fprintf(stderr, "simt: %s\n", text.c_str());
  std::fflush(stderr);
  std::_Exit(code);
}

std::string describe_streams(const Device& d) {
  std::string text;
  for (const auto& stream : d.streams) {
    if (stream->operations.empty()) continue;
    text += "\n  stream " + std::to_string(stream->number) + (stream->legacy ? " (legacy)" : "") + ", device " +
            std::to_string(stream->device) + ", " + std::to_string(stream->operations.size()) + " operations:";
    for (size_t i = 0; i < std::min<size_t>(stream->operations.size(), 4); ++i) {
      text += (i ? ", " : " ") + stream->operations[i].label;
    }
    if (stream->grid) text += "\n    in " + describe(stream->grid);
  }
  return text;
}

// Whether nothing that must come first is still to do.
bool can_start(const Device& d, const Stream& stream) {
  const Operation& first = stream.operations.front();
  for (const auto& other : d.streams) {
    if (other.get() == &stream || other->operations.empty()) continue;
    const bool legacy =
        other->device == stream.device && other->blocking && stream.blocking && (other->legacy || stream.legacy);
    if (legacy && other->operations.front().number < first.number) return false;
    if (d.config.connections == 0 || other->number % d.config.connections != stream.number % d.config.connections)
      continue;
    // In a hardware queue what was submitted earlier has at least started.
    const size_t started = other->grid ? 1 : 0;
    if (other->operations.size() > started && other->operations[started].number < first.number) return false;
  }
  const Operation& operation = first;
  if (operation.waits_for && !operation.waits_for->done) return false;
  return !operation.ready || operation.ready();
}

Stream* choose(Device& d) {
  std::vector<Stream*> able;
  for (const auto& stream : d.streams) {
    if (!stream->operations.empty() && (stream->grid || can_start(d, *stream))) able.push_back(stream.get());
  }
  const auto drop = [&able](auto which) {
    if (!std::all_of(able.begin(), able.end(), which))
      able.erase(std::remove_if(able.begin(), able.end(), which), able.end());
  };
  drop([](const Stream* stream) { return stream->spinning; });
  if (able.empty()) return nullptr;
  if (d.config.policy == Policy::kStarve) {
    const Stream* starved = reinterpret_cast<Stream*>(d.config.starved);
    if (!starved) starved = d.streams[d.config.seed % d.streams.size()].get();
    drop([starved](const Stream* stream) { return stream == starved; });
    // The host may be about to give other streams something to do.
    if (able.front() == starved && steady_clock::now() - d.last_call < std::chrono::milliseconds(1)) return nullptr;
  }
  if (d.config.policy == Policy::kRandom) return able[d.random() % able.size()];
  const auto next = std::find_if(able.begin(), able.end(), [&d](const Stream* s) { return s->number > d.last_stream; });
  return next == able.end() ? able.front() : *next;
}

void finish(Device& d, Stream& stream) {
  Operation& operation = stream.operations.front();
  ++stream.finished;
  if (detects_races()) {
    stream.clock.resize(std::max(stream.clock.size(), stream.number + 1));
    stream.clock[stream.number] = stream.finished;
  }
  if (operation.records) {
    operation.records->clock = stream.clock;
    operation.records->when = steady_clock::now();
    operation.records->done = true;
  }
  stream.operations.pop_front();
  for (const auto& other : d.streams) other->spinning = false;
  d.last_progress = steady_clock::now();
  d.progress.notify_all();
}

Place place_of(Device& d, Stream& stream) {
  if (!detects_races()) return {};
  const Operation& operation = stream.operations.front();
  join(stream.clock, operation.host);
  if (operation.waits_for) join(stream.clock, operation.waits_for->clock);
  for (const auto& other : d.streams) {
    const bool legacy =
        other->device == stream.device && other->blocking && stream.blocking && (other->legacy || stream.legacy);
    if (operation.after_all || legacy) join(stream.clock, other->clock);
    if (operation.after_all && other->grid) {  // it may be a kernel's flag that this one has waited for
      stream.clock.resize(std::max(stream.clock.size(), other->number + 1));
      stream.clock[other->number] = other->finished + 1;
    }
  }
  return {stream.number, stream.finished + 1, stream.clock};
}

// After a failed kernel the device does nothing more.
void fail(Device& d, const std::string& text) {
  if (d.config.exit_on_error) stop(text, kExitKernelError);
  if (!d.failed) d.error = text;
  d.failed = true;
  for (const auto& stream : d.streams) {
    if (stream->grid) destroy(stream->grid);
    stream->grid = nullptr;
    for (const Operation& operation : stream->operations) {
      if (operation.records) operation.records->done = true;
    }
    stream->finished += stream->operations.size();
    stream->operations.clear();
  }
  d.progress.notify_all();
}

// One operation, or a part of a kernel.
void step(Device& d, Stream& stream, std::unique_lock<std::mutex>& lock) {
  Operation& operation = stream.operations.front();
  d.last_stream = stream.number;
  try {
    if (operation.run) {
      const Place place = place_of(d, stream);
      lock.unlock();
      operation.run(place);
      lock.lock();
      finish(d, stream);
      return;
    }
    if (!stream.grid) stream.grid = start(std::move(operation.launch), place_of(d, stream), d.random());
    const bool whole = d.config.policy != Policy::kRandom || d.random() % 2 == 0;
    const uint64_t switches = whole ? 1 << 20 : 1 + d.random() % 4096;
    lock.unlock();
    const Progress progress = advance(stream.grid, switches);
    lock.lock();
    stream.spinning = progress == Progress::kSpinning;
    if (progress == Progress::kMore) d.last_progress = steady_clock::now();
    if (progress == Progress::kDone) {
      destroy(stream.grid);
      stream.grid = nullptr;
      finish(d, stream);
    }
  } catch (const Error& error) {
    if (!lock.owns_lock()) lock.lock();
    fail(d, error.text);
  }
}

bool is_idle(const Device& d) {
  return std::all_of(d.streams.begin(), d.streams.end(), [](const auto& stream) { return stream->operations.empty(); });
}

void check_watchdog(const Device& d) {
  const auto since = steady_clock::now() - std::max(d.last_call, d.last_progress);
  if (std::chrono::duration<double>(since).count() < d.config.watchdog_seconds) return;
  stop("stuck: no stream can go on" + describe_streams(d), kExitStuck);
}

void run_device() {
  Device& d = device();
  is_device_thread = true;
  std::unique_lock<std::mutex> lock(d.mutex);
  while (!d.stopping) {
    collect_untracked();
    if (is_idle(d)) {
      d.work.wait(lock);
      continue;
    }
    // Now and then let the host run ahead.
    if (d.config.policy == Policy::kRandom && d.random() % 4 == 0) d.work.wait_for(lock, std::chrono::microseconds(50));
    Stream* stream = is_idle(d) ? nullptr : choose(d);
    const bool spinning = stream && stream->spinning;
    if (stream) step(d, *stream, lock);
    if (!stream || spinning) {
      check_watchdog(d);
      d.work.wait_for(lock, std::chrono::microseconds(100));
    }
  }
}

// Every call of the host. Polling does not keep the watchdog quiet.
class Call {
 public:
  explicit Call(bool polls = false) : lock_(lock()) {
    Device& d = device();
    if (!polls) d.last_call = steady_clock::now();
    if (d.thread.joinable()) return;
    d.last_call = steady_clock::now();
    d.thread = std::thread(run_device);
    // Before the engine's own data go.
    std::atexit([] {
      Device& d = device();
      {
        const std::lock_guard<std::mutex> lock(d.mutex);
        d.stopping = true;
        d.work.notify_one();
      }
      d.thread.join();
    });
  }

  template <class Condition>
  cudaError_t wait(Condition condition) {
    device().progress.wait(lock_, [&] { return device().failed || condition(); });
    device().last_call = steady_clock::now();
    return result();
  }

  cudaError_t result() const { return device().failed ? cudaErrorLaunchFailure : cudaSuccess; }

 private:
  static std::unique_lock<std::mutex> lock() {
    if (is_device_thread) stop("a host function or a test's operation calls CUDA", kExitKernelError);
    return std::unique_lock<std::mutex>(device().mutex);
  }

  std::unique_lock<std::mutex> lock_;
};

Stream* new_stream(Device& d, bool blocking, int priority) {
  d.streams.push_back(std::make_unique<Stream>());
  Stream* stream = d.streams.back().get();
  stream->number = d.created++;
  stream->device = current_device;
  stream->blocking = blocking;
  stream->priority = priority;
  return stream;
}

// Null if there is no such stream.
Stream* find_stream(Device& d, cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    Stream*& legacy = d.legacy[current_device];
    if (!legacy) {
      legacy = new_stream(d, true, 0);
      legacy->legacy = true;
    }
    return legacy;
  }
  for (const auto& stream : d.streams) {
    if (reinterpret_cast<cudaStream_t>(stream.get()) == handle && !stream->destroyed) return stream.get();
  }
  return nullptr;
}

// With the device's mutex held.
cudaError_t push(Device& d, cudaStream_t handle, Operation operation) {
  Stream* stream = find_stream(d, handle);
  if (!stream) return set_error(cudaErrorInvalidResourceHandle);
  if (d.failed) return set_error(cudaErrorLaunchFailure);
  operation.number = ++d.operations;
  if (detects_races()) operation.host = d.host;
  ++stream->submitted;
  stream->operations.push_back(std::move(operation));
  d.work.notify_one();
  return cudaSuccess;
}

cudaError_t push(cudaStream_t handle, Operation operation) {
  const Call call;
  return push(device(), handle, std::move(operation));
}

cudaError_t synchronise(Call& call, Stream* stream) {
  if (!stream) return set_error(cudaErrorInvalidResourceHandle);
  const uint64_t last = stream->submitted;
  const cudaError_t error = call.wait([&] { return stream->finished >= last; });
  join(device().host, stream->clock);
  return set_error(error);
}

cudaError_t allocate(std::map<void*, size_t>& where, void** data, size_t bytes, bool on_device) {
  if (!data) return set_error(cudaErrorInvalidValue);
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (posix_memalign(data, 256, bytes)) return set_error(cudaErrorMemoryAllocation);
  std::memset(*data, 0xCD, bytes);
  where[*data] = bytes;
  static size_t count = 0;
  if (on_device) track(*data, bytes, ("cudaMalloc #" + std::to_string(++count)).c_str());
  return cudaSuccess;
}

cudaError_t release(std::map<void*, size_t>& where, void* data, bool on_device) {
  if (!data) return cudaSuccess;
  const auto found = where.find(data);
  if (found == where.end()) return set_error(cudaErrorInvalidValue);
  if (on_device) untrack(data);
  std::memset(data, 0xDD, found->second);
  where.erase(found);
  free(data);
  return cudaSuccess;
}

CUresult driver_result(cudaError_t error) {
  return error == cudaSuccess                      ? CUDA_SUCCESS
         : error == cudaErrorInvalidResourceHandle ? CUDA_ERROR_INVALID_HANDLE
         : error == cudaErrorLaunchFailure         ? CUDA_ERROR_LAUNCH_FAILED
                                                   : CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

// ---- What tests call.

void configure(const Config& config) {
  const Call call;
  Device& d = device();
  d.config = config;
  d.random.seed(config.seed);
}

void configure(uint64_t seed, Policy policy) {
  Config next = config();
  next.seed = seed;
  next.policy = policy;
  next.order = seed == 0 ? Order::kForward : seed == 1 ? Order::kReverse : Order::kRandom;
  next.resident_blocks = seed < 2 ? 1 : unsigned(seed % 3 + 1);
  configure(next);
}

const Config& config() { return device().config; }

void set_connections(unsigned count) {
  const Call call;
  device().config.connections = count;
}

void reset() {
  Call call;
  Device& d = device();
  call.wait([&d] { return is_idle(d); });
  d.config = Config{};
  d.failed = false;
  d.error.clear();
  d.host.clear();
  // The others keep their numbers and counts: handles stay valid.
  d.streams.erase(std::remove_if(d.streams.begin(), d.streams.end(), [](const auto& s) { return s->destroyed; }),
                  d.streams.end());
  for (const auto& stream : d.streams) stream->clock.clear();
  forget_accesses();
}

void enqueue(cudaStream_t stream, std::function<bool()> ready, std::function<void()> action, const char* label) {
  Operation operation;
  operation.label = label;
  operation.ready = std::move(ready);
  operation.run = [action = std::move(action)](const Place&) { action(); };
  operation.after_all = true;
  if (push(stream, std::move(operation)) != cudaSuccess)
    stop(std::string(label) + ": no such stream", kExitKernelError);
}

std::string take_error() {
  const Call call;
  Device& d = device();
  d.failed = false;
  return std::exchange(d.error, {});
}

void host_acquire() {
  const Call call(true);
  for (const auto& stream : device().streams) join(device().host, stream->clock);
}

size_t live_allocations() {
  const Call call(true);
  return device().allocations.size() + device().host_allocations.size();
}

void launch(const void* function, const char* name, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            std::function<void()> body) {
  const Call call;
  Device& d = device();
  const size_t threads = size_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > 1024 || block.z > 64 || grid.x == 0 || grid.y == 0 || grid.z == 0 ||
      grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) {
    set_error(cudaErrorInvalidConfiguration);
    return;
  }
  const auto limit = d.shared_limits.find(function);
  if (shared_bytes > (limit == d.shared_limits.end() ? kSharedBytes : std::max(kSharedBytes, limit->second))) {
    set_error(cudaErrorInvalidValue);
    return;
  }
  Operation operation;
  operation.label = name;
  operation.launch = {name, grid, block, shared_bytes, std::move(body)};
  push(d, stream, std::move(operation));
}

}  // namespace simt

// ---- The CUDA runtime.

using namespace simt;

extern "C" {

cudaError_t cudaMalloc(void** data, size_t bytes) {
  const Call call;
  return allocate(device().allocations, data, bytes, true);
}

// At once, as nothing in the queue may need it: what does is a use after free.
cudaError_t cudaFree(void* data) {
  const Call call;
  return release(device().allocations, data, true);
}

// The memory is there at once, but what it holds is lost when the stream gets there.
cudaError_t cudaMallocAsync(void** data, size_t bytes, cudaStream_t stream) {
  const Call call;
  cudaError_t error = allocate(device().allocations, data, bytes, true);
  if (error != cudaSuccess || *data == nullptr) return error;
  Operation operation;
  operation.label = "cudaMallocAsync";
  operation.run = [data = *data, bytes](const Place& place) {
    check_access("cudaMallocAsync", place, data, bytes, true);
    std::memset(data, 0xCD, bytes);
  };
  error = push(device(), stream, std::move(operation));
  if (error != cudaSuccess) release(device().allocations, std::exchange(*data, nullptr), true);
  return error;
}

// Pools differ in what the driver keeps, of which there is nothing here.
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  *pool = reinterpret_cast<cudaMemPool_t>(new char);
  return cudaSuccess;
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  delete reinterpret_cast<char*>(pool);
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }

cudaError_t cudaMallocFromPoolAsync(void** data, size_t bytes, cudaMemPool_t, cudaStream_t stream) {
  return cudaMallocAsync(data, bytes, stream);
}

cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  const Call call;
  if (!data) return cudaSuccess;
  const auto found = device().allocations.find(data);
  if (found == device().allocations.end()) return set_error(cudaErrorInvalidValue);
  Operation operation;
  operation.label = "cudaFreeAsync";
  operation.run = [data, bytes = found->second](const Place& place) {
    check_access("cudaFreeAsync", place, data, bytes, true);
    const std::lock_guard<std::mutex> lock(device().mutex);
    release(device().allocations, data, true);
  };
  return push(device(), stream, std::move(operation));
}

cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  const Call call;
  return allocate(device().host_allocations, data, bytes, false);
}

cudaError_t cudaMallocHost(void** data, size_t bytes) { return cudaHostAlloc(data, bytes, 0); }

cudaError_t cudaFreeHost(void* data) {
  const Call call;
  return release(device().host_allocations, data, false);
}

cudaError_t cudaHostGetDevicePointer(void** on_device, void* data, unsigned) {
  const Call call;
  const auto& all = device().host_allocations;
  const auto after = all.upper_bound(data);
  if (after == all.begin() ||
      static_cast<char*>(data) >= static_cast<char*>(std::prev(after)->first) + std::prev(after)->second) {
    return set_error(cudaErrorInvalidValue);
  }
  *on_device = data;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  const Call call;
  *stream = reinterpret_cast<cudaStream_t>(new_stream(device(), !(flags & cudaStreamNonBlocking), priority));
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  const Call call;
  const Stream* stream = find_stream(device(), handle);
  if (!stream) return set_error(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Call call;
  Stream* stream = find_stream(device(), handle);
  if (!stream || stream->legacy) return set_error(cudaErrorInvalidResourceHandle);
  stream->destroyed = true;  // what it still holds runs
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Call call;
  return synchronise(call, find_stream(device(), handle));
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  const Call call(true);
  const Stream* stream = find_stream(device(), handle);
  if (!stream) return set_error(cudaErrorInvalidResourceHandle);
  if (device().failed) return set_error(cudaErrorLaunchFailure);
  if (stream->finished < stream->submitted) return set_error(cudaErrorNotReady);
  join(device().host, stream->clock);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  const Call call;
  Event* event = reinterpret_cast<Event*>(event_handle);
  if (!device().events.count(event)) return set_error(cudaErrorInvalidResourceHandle);
  if (!event->last) return cudaSuccess;
  Operation operation;
  operation.label = "cudaStreamWaitEvent";
  operation.waits_for = event->last;
  operation.run = [](const Place&) {};
  return push(device(), handle, std::move(operation));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  const Call call;
  Event* event = new Event;
  device().events.insert(event);
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  const Call call;
  Event* event = reinterpret_cast<Event*>(handle);
  if (!device().events.erase(event)) return set_error(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) {
  const Call call;
  Event* event = reinterpret_cast<Event*>(handle);
  if (!device().events.count(event)) return set_error(cudaErrorInvalidResourceHandle);
  Operation operation;
  operation.label = "cudaEventRecord";
  operation.records = std::make_shared<Record>();
  operation.run = [](const Place&) {};
  const auto record = operation.records;
  const cudaError_t error = push(device(), stream, std::move(operation));
  if (error == cudaSuccess) event->last = record;
  return error;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const Call call(true);
  const Event* event = reinterpret_cast<Event*>(handle);
  if (!device().events.count(const_cast<Event*>(event))) return set_error(cudaErrorInvalidResourceHandle);
  if (device().failed) return set_error(cudaErrorLaunchFailure);
  if (!event->last) return cudaSuccess;
  if (!event->last->done) return set_error(cudaErrorNotReady);
  join(device().host, event->last->clock);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Call call;
  const Event* event = reinterpret_cast<Event*>(handle);
  if (!device().events.count(const_cast<Event*>(event))) return set_error(cudaErrorInvalidResourceHandle);
  const std::shared_ptr<Record> record = event->last;
  if (!record) return cudaSuccess;
  const cudaError_t error = call.wait([&record] { return record->done; });
  join(device().host, record->clock);
  return set_error(error);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  const Call call(true);
  const std::shared_ptr<Record>* records[2];
  for (int i = 0; i < 2; ++i) {
    Event* event = reinterpret_cast<Event*>(i == 0 ? from : to);
    if (!device().events.count(event) || !event->last) return set_error(cudaErrorInvalidResourceHandle);
    if (!event->last->done) return set_error(cudaErrorNotReady);
    records[i] = &event->last;
  }
  *milliseconds = std::chrono::duration<float, std::milli>((*records[1])->when - (*records[0])->when).count();
  return cudaSuccess;
}

// Late also where CUDA would have staged pageable memory during the call.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  Operation operation;
  operation.label = "cudaMemcpyAsync";
  operation.run = [=](const Place& place) {
    check_access("cudaMemcpyAsync", place, from, bytes, false);
    check_access("cudaMemcpyAsync", place, to, bytes, true);
    if (bytes) std::memmove(to, from, bytes);
  };
  return push(stream, std::move(operation));
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  Operation operation;
  operation.label = "cudaMemsetAsync";
  operation.run = [=](const Place& place) {
    check_access("cudaMemsetAsync", place, to, bytes, true);
    if (bytes) std::memset(to, value, bytes);
  };
  return push(stream, std::move(operation));
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  const cudaError_t error = cudaMemsetAsync(to, value, bytes, nullptr);
  return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  Operation operation;
  operation.label = "cudaLaunchHostFunc";
  operation.run = [=](const Place&) { function(data); };
  return push(stream, std::move(operation));
}

cudaError_t cudaGetDevice(int* number) {
  *number = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
  const Call call;
  if (number < 0 || number >= device().config.devices) return set_error(cudaErrorInvalidDevice);
  current_device = number;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  const Call call;
  *count = device().config.devices;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<cudaDeviceAttr, int> values = {
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
      {cudaDevAttrMaxSharedMemoryPerBlock, int(kSharedBytes)},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, int(kSharedBytesOptin)},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 228 * 1024},
      {cudaDevAttrReservedSharedMemoryPerBlock, 1024},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrCanMapHostMemory, 1},
      {cudaDevAttrStreamPrioritiesSupported, 1},
      {cudaDevAttrConcurrentKernels, 1},
  };
  const Call call;
  if (attribute == cudaDevAttrMultiProcessorCount) {
    *value = device().config.multiprocessors;
    return cudaSuccess;
  }
  const auto found = values.find(attribute);
  if (found == values.end()) return set_error(cudaErrorInvalidValue);
  *value = found->second;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const Call call;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || size_t(value) > kSharedBytesOptin) return set_error(cudaErrorInvalidValue);
  device().shared_limits[function] = size_t(value);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  Call call;
  Device& d = device();
  std::vector<std::pair<const Stream*, uint64_t>> all;
  for (const auto& stream : d.streams) {
    if (stream->device == current_device) all.push_back({stream.get(), stream->submitted});
  }
  const cudaError_t error = call.wait([&all] {
    return std::all_of(all.begin(), all.end(), [](const auto& one) { return one.first->finished >= one.second; });
  });
  for (const auto& one : all) join(d.host, one.first->clock);
  return set_error(error);
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaPeekAtLastError() { return last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    default:
      return "unrecognized error code";
  }
}

const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }

CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  const unsigned comparison = flags & ~unsigned(CU_STREAM_WAIT_VALUE_FLUSH);
  if (address % 4 || address == 0 || comparison > CU_STREAM_WAIT_VALUE_NOR) return CUDA_ERROR_INVALID_VALUE;
  Operation operation;
  char label[96];
  std::snprintf(label, sizeof label, "cuStreamWaitValue32(%#llx, %u)", address, value);
  operation.label = label;
  operation.ready = [=] {
    const uint32_t now = __atomic_load_n(reinterpret_cast<const uint32_t*>(address), __ATOMIC_ACQUIRE);
    switch (comparison) {
      case CU_STREAM_WAIT_VALUE_GEQ:
        return int32_t(now - value) >= 0;
      case CU_STREAM_WAIT_VALUE_EQ:
        return now == value;
      case CU_STREAM_WAIT_VALUE_AND:
        return (now & value) != 0;
      default:
        return ~(now | value) != 0;
    }
  };
  operation.run = [](const Place&) {};
  operation.after_all = true;
  return driver_result(push(stream, std::move(operation)));
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  if (address % 4 || address == 0 || flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
  Operation operation;
  operation.label = "cuStreamWriteValue32";
  operation.run = [=](const Place&) {
    __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
  };
  return driver_result(push(stream, std::move(operation)));
}

// By the base name, as the driver has it.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const std::string name = symbol;
  *function = name == "cuStreamWaitValue32"    ? reinterpret_cast<void*>(cuStreamWaitValue32)
              : name == "cuStreamWriteValue32" ? reinterpret_cast<void*>(cuStreamWriteValue32)
                                               : nullptr;
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(symbol, function, CUDART_VERSION, flags, result);
}

}  // extern "C"
