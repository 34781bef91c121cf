// Zipped collectives on streams, on the emulator: some ranks in one process, each with a thread that issues calls, a
// worker, a device and streams of its own, over an emulation of NCCL. What arrives must be what was sent, bit for bit.
// Usage: exchange SCHEDULE POLICY SET..., where a set is a name below, SCHEDULE as for simt::configure, and POLICY one
// of random, round-robin and starve. Says what differs and exits with 1.
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "collectives/collectives.h"
#include "collectives/cuda/stream_exchange.h"
#include "runtime.h"

using namespace zipccl;
using namespace std::chrono_literals;

namespace {

using Bytes = std::vector<uint8_t>;
using Clock = std::chrono::steady_clock;

uint64_t schedule = 0;
std::mutex output_mutex;
std::string current;
int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  const std::lock_guard<std::mutex> lock(output_mutex);
  if (++failures <= 20) std::printf("%s: %s\n", current.c_str(), what.c_str());
}

[[noreturn]] void die(const std::string& what) {
  std::printf("%s: %s\n", current.c_str(), what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) die(std::string(what) + ": " + cudaGetErrorString(error));
}

// ---- What NCCL does

// A communicator of all ranks. An operation happens when it is at the head of its stream on all ranks that it needs;
// where the ends of a pair do not agree, where NCCL would hang or write out of bounds, the process ends.
class Communicator {
 public:
  // `serial`: a rank's operations happen in the order of their calls, whatever their streams, as NCCL's own do.
  Communicator(int size, const char* name, bool serial)
      : size_(size), name_(name), serial_(serial), channels_(size * size), gathers_(size), ranks_(size) {}

  // What a rank has sent. The headers' words only count where messages travel as a whole.
  struct Sent {
    uint64_t bytes = 0, escapes = 0, dynamic_bytes = 0;
  };

  void all_gather(int rank, const void* input, void* output, uint64_t bytes, cudaStream_t stream) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto operation = new_operation(rank);
    operation->open = 1;
    gathers_[rank].push_back({operation, static_cast<const uint8_t*>(input), static_cast<uint8_t*>(output), bytes});
    lock.unlock();
    enqueue(operation, stream, "all_gather");
  }

  void exchange(int rank, const std::vector<Range>& sends, const std::vector<Range>& receives, cudaStream_t stream) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto operation = new_operation(rank);
    for (int peer = 0; peer < size_; peer++) {
      if (peer == rank) continue;
      const auto add = [&](std::deque<End>& ends, const Range& range) {
        if (range.bytes == 0) return;
        ends.push_back({operation, static_cast<uint8_t*>(range.data), range.bytes});
        operation->open++;
      };
      add(channel(rank, peer).sends, sends[peer]);
      add(channel(peer, rank).receives, receives[peer]);
    }
    lock.unlock();
    enqueue(operation, stream, "exchange");
  }

  // As ncclCommAbort: what is queued ends, whatever has moved.
  void abort() {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
  }
  void delay(int rank, Clock::duration time) { ranks_[rank].delay = time; }
  // Changes what arrives.
  void tamper(std::function<void(int from, int to, uint8_t* data, uint64_t bytes)> action) {
    tamper_ = std::move(action);
  }
  void expect_idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int from = 0; from < size_; from++) {
      expect(gathers_[from].empty(), std::string(name_) + ": an all-gather has not happened");
      for (int to = 0; to < size_; to++) {
        expect(channel(from, to).sends.empty() && channel(from, to).receives.empty(),
               std::string(name_) + ": an exchange has not happened");
      }
    }
  }
  Sent sent(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ranks_[rank].sent;
  }

 private:
  struct Operation {
    int rank;
    uint64_t number;
    size_t open = 0;  // transfers that have not happened
    bool arrived = false;
    Clock::time_point when;
  };
  using OperationPtr = std::shared_ptr<Operation>;
  struct End {
    OperationPtr operation;
    uint8_t* data;
    uint64_t bytes;
  };
  struct Channel {
    std::deque<End> sends, receives;
  };
  struct Gather {
    OperationPtr operation;
    const uint8_t* input;
    uint8_t* output;
    uint64_t bytes;
  };
  struct Rank {
    uint64_t operations = 0, done = 0;
    Clock::duration delay = {};
    Sent sent;
  };

  Channel& channel(int from, int to) { return channels_[from * size_ + to]; }

  OperationPtr new_operation(int rank) {
    auto operation = std::make_shared<Operation>();
    operation->rank = rank;
    operation->number = ranks_[rank].operations++;
    return operation;
  }

  // Without the lock: the device holds its own while it asks what is ready.
  void enqueue(const OperationPtr& operation, cudaStream_t stream, const char* what) {
    const std::string label = std::string(name_) + " " + what + " " + std::to_string(operation->number) + " of rank " +
                              std::to_string(operation->rank);
    simt::enqueue(
        stream, [this, operation] { return is_ready(*operation); }, [this, operation] { finish(*operation); },
        label.c_str());
  }

  bool is_ready(Operation& operation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) return true;
    const Rank& rank = ranks_[operation.rank];
    if (serial_ && rank.done != operation.number) return false;
    if (!operation.arrived) operation.when = Clock::now() + rank.delay;
    operation.arrived = true;
    if (operation.when > Clock::now()) return false;
    for (int peer = 0; peer < size_; peer++) {
      move(operation.rank, peer);
      move(peer, operation.rank);
    }
    gather();
    return operation.open == 0;
  }

  void finish(const Operation& operation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranks_[operation.rank].done++;
  }

  static bool is_there(const Operation& operation) { return operation.arrived && operation.when <= Clock::now(); }

  void move(int from, int to) {
    auto& [sends, receives] = channel(from, to);
    while (!sends.empty() && !receives.empty()) {
      const End send = sends.front(), receive = receives.front();
      if (!is_there(*send.operation) || !is_there(*receive.operation)) return;
      if (send.bytes != receive.bytes) {
        die(std::string(name_) + ": rank " + std::to_string(from) + " sends " + std::to_string(send.bytes) +
            " bytes to rank " + std::to_string(to) + ", which receives " + std::to_string(receive.bytes));
      }
      transfer(from, to, send.data, receive.data, send.bytes);
      send.operation->open--;
      receive.operation->open--;
      sends.pop_front();
      receives.pop_front();
    }
  }

  void gather() {
    for (const auto& gathers : gathers_) {
      if (gathers.empty() || !is_there(*gathers.front().operation)) return;
    }
    const uint64_t bytes = gathers_[0].front().bytes;
    for (int to = 0; to < size_; to++) {
      if (gathers_[to].front().bytes != bytes) {
        die(std::string(name_) + ": rank 0 gathers " + std::to_string(bytes) + " bytes, rank " + std::to_string(to) +
            " " + std::to_string(gathers_[to].front().bytes));
      }
      for (int from = 0; from < size_; from++) {
        transfer(from, to, gathers_[from].front().input, gathers_[to].front().output + from * bytes, bytes);
      }
    }
    for (auto& gathers : gathers_) {
      gathers.front().operation->open--;
      gathers.pop_front();
    }
  }

  void transfer(int from, int to, const uint8_t* source, uint8_t* target, uint64_t bytes) {
    std::memmove(target, source, bytes);
    if (from == to) return;
    Sent& sent = ranks_[from].sent;
    sent.bytes += bytes;
    MessageHeader header = {};
    if (bytes >= sizeof header) std::memcpy(&header, source, sizeof header);
    if (header.magic == kMagic && (header.flags & kPlain) == 0) {
      sent.escapes += header.pool_bytes;
      sent.dynamic_bytes += header.low_bytes + beyond_inline(header.pool_bytes, header.inline_bytes);
    }
    if (tamper_) tamper_(from, to, target, bytes);
  }

  const int size_;
  const char* const name_;
  const bool serial_;
  std::mutex mutex_;
  bool aborted_ = false;
  std::vector<Channel> channels_;
  std::vector<std::deque<Gather>> gathers_;
  std::vector<Rank> ranks_;
  std::function<void(int, int, uint8_t*, uint64_t)> tamper_;
};

class EmulatedTransport final : public StreamTransport {
 public:
  EmulatedTransport(Communicator& communicator, int rank, int size)
      : communicator_(communicator), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void exchange(const std::vector<Range>& sends, const std::vector<Range>& receives, cudaStream_t stream) override {
    if (fails) throw std::runtime_error("the transport fails");
    communicator_.exchange(rank_, sends, receives, stream);
  }
  void all_gather(const void* input, void* output, uint64_t bytes, cudaStream_t stream) override {
    if (fails) throw std::runtime_error("the transport fails");
    communicator_.all_gather(rank_, input, output, bytes, stream);
  }
  bool fails = false;

 private:
  Communicator& communicator_;
  const int rank_, size_;
};

// Gone when the stream gets there: what uses it later is a use after free.
std::shared_ptr<uint8_t> device_memory(uint64_t bytes, cudaStream_t stream) {
  void* memory = nullptr;
  check(cudaMallocAsync(&memory, bytes, stream), "cudaMallocAsync");
  return {static_cast<uint8_t*>(memory), [stream](uint8_t* pointer) { cudaFreeAsync(pointer, stream); }};
}

class OrderedMemory final : public StreamMemory {
 public:
  std::shared_ptr<uint8_t> allocate(uint64_t bytes, cudaStream_t stream) override {
    return device_memory(bytes, stream);
  }
};

// ---- Calls

// Exponents of most values lie in one window (normal), all do (few), some do not, enough to overflow the inline pool
// (some), or most do not, so that chunks are raw (raw).
Bytes make_values(const std::string& kind, uint64_t elements, DType dtype, bool low, uint64_t seed) {
  std::mt19937_64 random(seed * 7919 + elements);
  Bytes bytes(elements * element_bytes(dtype));
  for (uint64_t i = 0; i < elements; i++) {
    const uint64_t bits = random();
    uint32_t exponent = 120 - static_cast<uint32_t>(__builtin_ctzll(bits | 1 << 12));
    if (kind == "steps") exponent += 2 * static_cast<uint32_t>(i / kChunkElements % 3);  // each chunk its own window
    const bool outlier = kind == "raw" || (kind == "some" && bits >> 56 < 32);
    if (outlier) exponent = bits >> 48 & 0xff;
    if (exponent == 0xff) exponent = 0xfe;  // no NaN, of whose bits reductions keep none
    uint32_t value = exponent << 23 | static_cast<uint32_t>(bits >> 16 & 0x807f) << 16;
    if (dtype == DType::kFloat32) {
      if (low && i / kChunkElements % 2 == 0) value |= bits >> 32 & 0xffff;
      std::memcpy(&bytes[i * 4], &value, 4);
    } else {
      const auto half = static_cast<uint16_t>(value >> 16);
      std::memcpy(&bytes[i * 2], &half, 2);
    }
  }
  return bytes;
}

// A call as all ranks know it.
struct Plan {
  Collective collective;
  DType dtype;
  std::vector<std::vector<uint64_t>> elements;  // [from][to]
  std::vector<std::string> kinds;               // of each rank's values
  bool low = false;
  bool in_place = false;
  int stream = 0;
  Reduction reduction = Reduction::kSum;
  float divisor = 1;
  Route route = Route::kZip;
  int ranks_per_host = 0;                  // 0: all are on one
  bool planned = false;                    // windows, and of an all-gather room for exactly the escapes, are known
  std::vector<std::vector<Bytes>> values;  // [from][to]; of an all-gather: [from][0]
  std::vector<std::vector<std::vector<int16_t>>> windows;  // likewise
  std::shared_ptr<std::vector<uint32_t>> escapes;
  std::string name;

  int size() const { return static_cast<int>(elements.size()); }
  float scale(int rank) const { return reduction == Reduction::kSum ? 1.0f / static_cast<float>(rank + 2) : 1.0f; }
  const Bytes& sent(int from, int to) const { return values[from][collective == Collective::kAllGather ? 0 : to]; }
  Bytes wanted(int from, int to) const {
    if (collective != Collective::kReduceScatter) return sent(from, to);
    const uint64_t count = elements[0][to];
    const int mates = ranks_per_host == 0 ? size() : ranks_per_host;
    std::vector<float> host(count), total(count);
    for (int rank = 0; rank < size(); rank++) {
      accumulate_values(sent(rank, to).data(), count, dtype, scale(rank),
                        rank % mates == 0 ? Reduction::kStore : reduction, host.data());
      if (rank % mates != mates - 1 && rank != size() - 1) continue;
      accumulate_values(host.data(), count, DType::kFloat32, 1.0f, rank < mates ? Reduction::kStore : reduction,
                        total.data());
    }
    Bytes result(count * element_bytes(dtype));
    finish(total.data(), count, divisor, dtype, result.data());
    return result;
  }
};

Plan make_plan(Collective collective, DType dtype, std::vector<std::vector<uint64_t>> elements,
               std::vector<std::string> kinds) {
  Plan plan;
  plan.collective = collective;
  plan.dtype = dtype;
  plan.elements = std::move(elements);
  plan.kinds = std::move(kinds);
  return plan;
}

void fill(Plan& plan, uint64_t seed) {
  for (int from = 0; from < plan.size(); from++) {
    plan.values.emplace_back();
    for (int to = 0; to < (plan.collective == Collective::kAllGather ? 1 : plan.size()); to++) {
      plan.values[from].push_back(make_values(plan.kinds[from], plan.elements[from][to], plan.dtype, plan.low,
                                              seed * 64 + static_cast<uint64_t>(from * 8 + to)));
    }
  }
  if (plan.planned) {
    if (plan.collective == Collective::kAllGather) plan.escapes = std::make_shared<std::vector<uint32_t>>();
    for (int from = 0; from < plan.size(); from++) {
      plan.windows.emplace_back();
      for (size_t to = 0; to < plan.values[from].size(); to++) {
        const uint64_t elements = plan.elements[from][to];
        std::vector<int16_t> windows(chunk_count(elements), -1);
        std::vector<uint32_t> escapes(windows.size());
        zipccl::plan(plan.values[from][to].data(), elements, plan.dtype, windows.data(), escapes.data());
        plan.windows[from].push_back(std::move(windows));
        if (!plan.escapes) continue;
        plan.escapes->resize(std::max(plan.escapes->size(), escapes.size()));
        for (size_t i = 0; i < escapes.size(); i++) (*plan.escapes)[i] = std::max((*plan.escapes)[i], escapes[i]);
      }
    }
  }
  plan.name = std::string(name(plan.collective)) + " (" + name(plan.route) + ") " + std::to_string(seed) + " on " +
              std::to_string(plan.size()) + " ranks, " + (plan.dtype == DType::kFloat32 ? "fp32" : "bf16") +
              (plan.low ? " with low halves," : ",");
  for (const auto& kind : plan.kinds) plan.name += " " + kind;
}

std::vector<std::vector<uint64_t>> square(int size, uint64_t elements) {
  return std::vector<std::vector<uint64_t>>(size, std::vector<uint64_t>(size, elements));
}

// What the worker told of a call.
struct Outcome {
  std::mutex mutex;
  int told = 0;
  Counters counters;
  std::string error;
};

// A call in flight on one rank.
struct Flight {
  const Plan* plan;
  int runs = 0;                // of exchanges
  std::vector<Bytes> outputs;  // copied on the call's stream right behind it
  std::shared_ptr<Outcome> outcome = std::make_shared<Outcome>();

  bool is_told() const {
    const std::lock_guard<std::mutex> lock(outcome->mutex);
    return outcome->told != 0;
  }
  std::string error() const {
    const std::lock_guard<std::mutex> lock(outcome->mutex);
    return outcome->error;
  }
};

enum class Streams { kOwn, kBlocking, kLegacy };

struct Setup {
  int size = 2;
  int ranks_per_host = 0;  // as in Plan
  ExchangeOptions options;
  std::chrono::milliseconds timeout = 60s;
  Streams streams = Streams::kOwn;
  bool serial = schedule % 2 != 0;

  explicit Setup(int ranks) : size(ranks) { options.min_bytes = 4096; }
};

struct Rank {
  int rank;
  bool failed = false;  // a call did: some memory stays
  std::vector<std::unique_ptr<Flight>> flights;
  std::unique_ptr<EmulatedTransport> transport;
  std::unique_ptr<StreamWorker> worker;
  OrderedMemory memory;
  std::array<cudaStream_t, 2> streams = {};
};

class Group {
 public:
  explicit Group(const Setup& setup)
      : setup_(setup),
        hosts_(hosts_of(setup)),
        callers(setup.size, "callers' transport", setup.serial),
        workers(setup.size, "workers' transport", setup.serial) {
    for (int rank = 0; rank < setup.size; rank++) {
      check(cudaSetDevice(rank), "cudaSetDevice");
      auto one = std::make_unique<Rank>();
      one->rank = rank;
      one->transport = std::make_unique<EmulatedTransport>(callers, rank, setup.size);
      one->worker =
          std::make_unique<StreamWorker>(rank, std::make_unique<EmulatedTransport>(workers, rank, setup.size));
      for (cudaStream_t& stream : one->streams) {
        if (setup.streams == Streams::kLegacy && &stream == &one->streams[0]) continue;
        check(cudaStreamCreateWithFlags(&stream, setup.streams == Streams::kOwn ? cudaStreamNonBlocking : 0),
              "cudaStreamCreateWithFlags");
      }
      ranks.push_back(std::move(one));
    }
    if (simt::config().policy == simt::Policy::kStarve) {
      // One of the callers' streams, or else one that the seed says, such as a worker's.
      const size_t which = schedule % (2 * ranks.size() + 1);
      starve(which == 2 * ranks.size() ? nullptr : ranks[which / 2]->streams[which % 2]);
    }
  }

  // Of a group whose streams all go on.
  ~Group() {
    for (auto& rank : ranks) {
      check(cudaSetDevice(rank->rank), "cudaSetDevice");
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      const bool aborted = rank->worker == nullptr || rank->failed;
      rank->worker.reset();
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      for (cudaStream_t stream : rank->streams) {
        if (stream != nullptr) check(cudaStreamDestroy(stream), "cudaStreamDestroy");
      }
      failed_ = failed_ || aborted;
    }
    starve(nullptr);
    if (!failed_) expect(simt::live_allocations() == allocations_, "memory was not released");
  }

  // What a rank's thread does, all at once.
  void each(const std::function<void(Rank&)>& action) {
    std::vector<std::thread> threads;
    for (auto& rank : ranks) {
      threads.emplace_back([&action, &rank] {
        check(cudaSetDevice(rank->rank), "cudaSetDevice");
        try {
          action(*rank);
        } catch (const std::exception& error) {
          die("rank " + std::to_string(rank->rank) + ": " + error.what());
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }

  // Queues everything: inputs come and outputs go in the stream's order, and so does their memory. Throws as run().
  Flight& issue(Rank& rank, const Plan& plan) {
    rank.flights.push_back(std::make_unique<Flight>());
    Flight& flight = *rank.flights.back();
    flight.plan = &plan;
    const int size = setup_.size, own = rank.rank;
    const cudaStream_t stream = rank.streams[plan.stream];
    const uint64_t width = element_bytes(plan.dtype);
    const auto upload = [&](const Bytes& values, uint8_t* to) {
      check(cudaMemcpyAsync(to, values.data(), values.size(), cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
    };
    struct Array {
      std::shared_ptr<uint8_t> memory;
      uint8_t* data;
      uint64_t bytes;
    };
    std::vector<Array> arrays;
    const auto array = [&](uint64_t bytes) {
      auto memory = device_memory(bytes, stream);
      arrays.push_back({memory, memory.get(), bytes});
      return memory.get();
    };
    StreamExchange exchange(
        *rank.transport, *rank.worker, rank.memory, setup_.options, hosts_, stream, setup_.timeout,
        [this, &rank, outcome = flight.outcome](const Counters& counters, const std::string& error) {
          if (when_told) when_told(rank);
          const std::lock_guard<std::mutex> lock(outcome->mutex);
          outcome->told++;
          outcome->counters += counters;
          if (outcome->error.empty()) outcome->error = error;
        });
    const Call call = {plan.collective, 0, plan.dtype, 0, 0, plan.route, plan.escapes};
    const auto part = [&](const void* data, uint64_t elements, int to) {
      return Part{data, elements, plan.planned ? plan.windows[own][to].data() : nullptr};
    };
    std::vector<void*> outputs;
    std::vector<uint64_t> sizes;
    if (plan.collective == Collective::kAllGather) {
      std::vector<uint64_t> elements;
      for (const auto& row : plan.elements) elements.push_back(row[0]);
      uint8_t* input = nullptr;
      if (plan.in_place) {
        uint64_t total = 0;
        for (uint64_t count : elements) total += count * width;
        uint8_t* all = array(total);
        for (uint64_t count : elements) {
          outputs.push_back(all);
          if (all != nullptr) all += count * width;
        }
        input = static_cast<uint8_t*>(outputs[own]);
      } else {
        for (uint64_t count : elements) outputs.push_back(array(count * width));
        input = array(elements[own] * width);
      }
      upload(plan.sent(own, 0), input);
      for (uint64_t count : elements) sizes.push_back(count * width);
      all_gather(exchange, call, part(input, elements[own], 0), outputs, elements);
    } else {
      std::vector<Part> inputs;
      for (int peer = 0; peer < size; peer++) {
        uint8_t* input = array(plan.elements[own][peer] * width);
        upload(plan.sent(own, peer), input);
        inputs.push_back(part(input, plan.elements[own][peer], peer));
      }
      if (plan.collective == Collective::kAllToAll) {
        std::vector<uint64_t> incoming;
        for (int peer = 0; peer < size; peer++) {
          incoming.push_back(plan.elements[peer][own]);
          sizes.push_back(incoming.back() * width);
          outputs.push_back(array(sizes.back()));
        }
        all_to_all(exchange, call, inputs, outputs, incoming);
      } else {
        sizes.push_back(plan.elements[own][own] * width);
        outputs.push_back(plan.in_place ? const_cast<void*>(inputs[own].data) : array(sizes.back()));
        reduce_scatter(exchange, call, inputs, {plan.reduction, plan.scale(own), plan.divisor}, outputs[0]);
      }
    }
    flight.runs = exchange.runs();
    for (size_t i = 0; i < outputs.size(); i++) {
      flight.outputs.emplace_back(sizes[i]);
      check(cudaMemcpyAsync(flight.outputs[i].data(), outputs[i], sizes[i], cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync");
    }
    for (const Array& one : arrays) check(cudaMemsetAsync(one.data, 0x55, one.bytes, stream), "cudaMemsetAsync");
    return flight;
  }

  void synchronise(Rank& rank) {
    for (cudaStream_t stream : rank.streams) check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }

  void expect_values(const Rank& rank, const Flight& flight) {
    const Plan& plan = *flight.plan;
    const std::string who = plan.name + ", rank " + std::to_string(rank.rank) + ": ";
    expect(flight.outcome->told == flight.runs,
           who + "told " + std::to_string(flight.outcome->told) + " times what became of it");
    expect(flight.error().empty(), who + flight.error());
    for (size_t i = 0; i < flight.outputs.size(); i++) {
      const Bytes wanted = plan.wanted(static_cast<int>(i), rank.rank);
      if (flight.outputs[i] == wanted) continue;
      size_t at = 0;
      while (flight.outputs[i][at] == wanted[at]) at++;
      expect(false, who + "other values from rank " + std::to_string(i) + " at byte " + std::to_string(at));
    }
  }

  void expect_counters(const Rank& rank, const Flight& flight) {
    const Plan& plan = *flight.plan;
    const Counters& told = flight.outcome->counters;
    if (plan.route == Route::kHierarchical) return;  // several exchanges
    const Segments segments(setup_.options, {plan.collective, 0, plan.dtype, 0, 0, plan.route, plan.escapes},
                            setup_.size);
    Counters wanted;
    for (int peer = 0; peer < setup_.size; peer++) {
      const uint64_t part = plan.elements[rank.rank][peer];
      if (peer == rank.rank) continue;
      for (uint64_t k = 0; segments.elements(part, k) != 0; k++) {
        const uint64_t elements = segments.elements(part, k);
        wanted.messages++;
        wanted.raw_bytes += elements * element_bytes(plan.dtype);
        wanted.wire_bytes += segments.static_size(part, k);
        if (!segments.coded(part)) continue;
        wanted.coded_messages++;
        wanted.elements += elements;
      }
    }
    const std::string who = plan.name + ", rank " + std::to_string(rank.rank) + ": ";
    expect(told.messages == wanted.messages, who + "messages");
    expect(told.coded_messages == wanted.coded_messages, who + "coded messages");
    expect(told.raw_bytes == wanted.raw_bytes, who + "raw bytes");
    expect(told.elements == wanted.elements, who + "elements");
    expect(told.wire_bytes == wanted.wire_bytes + told.dynamic_bytes, who + "wire bytes");
    const std::string& kind = plan.kinds[rank.rank];
    const bool crowded = !plan.escapes && (kind == "some" || kind == "raw");
    const bool overflows = wanted.elements != 0 && (crowded || plan.low);
    expect((told.dynamic_bytes != 0) == overflows, who + (overflows ? "did not overflow" : "overflowed"));
    expect(told.encode_seconds >= 0 && told.exchange_seconds >= 0 && told.decode_seconds >= 0, who + "seconds");
  }

  // All calls one after the other, the host never waiting; then what came of them.
  void run(std::vector<Plan>& plans) {
    each([&](Rank& rank) {
      for (const Plan& plan : plans) issue(rank, plan);
      synchronise(rank);
      rank.worker->drain();
      Counters all;
      for (const auto& flight : rank.flights) {
        expect_values(rank, *flight);
        expect_counters(rank, *flight);
        all += flight->outcome->counters;
      }
      // Each message as it was on the wire, and what went after it.
      const Communicator::Sent messages = callers.sent(rank.rank), dynamic = workers.sent(rank.rank);
      const std::string who = "rank " + std::to_string(rank.rank) + ": ";
      expect(all.escapes == messages.escapes, who + "escapes");
      expect(all.dynamic_bytes == messages.dynamic_bytes, who + "dynamic bytes");
      expect(all.dynamic_bytes == dynamic.bytes, who + "dynamic bytes sent");
    });
    callers.expect_idle();
    workers.expect_idle();
  }

 private:
  static void starve(cudaStream_t stream) {
    simt::Config config = simt::config();
    config.starved = stream;
    simt::configure(config);
  }

  static Hosts hosts_of(const Setup& setup) {
    std::vector<std::string> names;
    for (int rank = 0; rank < setup.size; rank++) {
      names.push_back(std::to_string(setup.ranks_per_host == 0 ? 0 : rank / setup.ranks_per_host));
    }
    return Hosts(names);
  }

  const Setup setup_;
  const Hosts hosts_;
  const size_t allocations_ = simt::live_allocations();
  bool failed_ = false;

 public:
  // The ranks go first: their workers may still use them.
  Communicator callers, workers;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::function<void(const Rank&)> when_told;  // by the workers
};

void run(const Setup& setup, std::vector<Plan> plans) {
  for (size_t i = 0; i < plans.size(); i++) fill(plans[i], i);
  Group(setup).run(plans);
}

// ---- Sets

constexpr Collective kCollectives[] = {Collective::kAllGather, Collective::kReduceScatter, Collective::kAllToAll};
constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat32};

std::vector<std::string> kinds_of(int size, const std::string& pattern) {
  std::vector<std::string> kinds(size, pattern == "one" ? "normal" : pattern);
  if (pattern == "one") kinds[size / 2] = "some";
  return kinds;
}

// Each collective with little data, overflowing on no rank, on one, on all.
std::vector<Plan> small_plans(int size, bool in_place) {
  std::vector<Plan> plans;
  for (Collective collective : kCollectives) {
    for (const char* pattern : {"normal", "one", "some", "raw"}) {
      for (DType dtype : kDTypes) {
        const uint64_t elements = 2100 + 3000 * (plans.size() % 3) + plans.size();
        Plan plan = make_plan(collective, dtype, square(size, elements), kinds_of(size, pattern));
        plan.low = dtype == DType::kFloat32 && plans.size() % 4 == 1;
        plan.in_place = in_place;
        plan.stream = static_cast<int>(plans.size() / 2 % 2);
        plan.divisor = plans.size() % 4 == 0 ? 3.0f : 1.0f;
        if (plans.size() % 5 == 4) plan.reduction = plans.size() % 2 == 0 ? Reduction::kMin : Reduction::kMax;
        if (in_place && collective == Collective::kAllToAll) continue;
        plans.push_back(plan);
      }
    }
  }
  return plans;
}

void collectives() {
  for (int size : {1, 2, 3, 4}) run(Setup(size), small_plans(size, false));
}

void in_place() {
  for (int size : {1, 2, 3}) run(Setup(size), small_plans(size, true));
}

void checksum() {
  Setup setup(3);
  setup.options.checksum = true;
  run(setup, small_plans(3, false));
}

void splits() {
  for (int size : {2, 3, 4}) {
    std::vector<Plan> plans;
    std::mt19937 random(static_cast<uint32_t>(size));
    // Empty, plain, and coded parts.
    const uint64_t choices[] = {0, 0, 1, 700, 2048, 5000, 9001};
    for (int i = 0; i < 8; i++) {
      for (Collective collective : kCollectives) {
        const DType dtype = kDTypes[random() % 2];
        const char* const patterns[] = {"normal", "one", "some", "raw"};
        Plan plan = make_plan(collective, dtype, square(size, 0), kinds_of(size, patterns[random() % 4]));
        for (auto& row : plan.elements) {
          for (uint64_t& elements : row) elements = i == 0 ? 0 : choices[random() % 7];
          if (collective == Collective::kAllGather) row.assign(size, row[0]);
          if (collective == Collective::kReduceScatter) row = plan.elements[0];
        }
        plan.low = dtype == DType::kFloat32 && random() % 2 == 0;
        plan.in_place = collective != Collective::kAllToAll && random() % 2 == 0;
        plan.stream = static_cast<int>(random() % 2);
        plans.push_back(plan);
      }
    }
    // Where a plan's ranks have no data of their kind that is coded, overflow is not expected of them.
    run(Setup(size), std::move(plans));
  }
}

// Windows that are known, and where all ranks know the escapes, inline pools of just that size, segment by segment.
void windows() {
  for (int size : {2, 3}) {
    Setup setup(size);
    setup.options.segment_bytes = 1;
    std::vector<Plan> plans;
    for (Collective collective : {Collective::kAllGather, Collective::kAllToAll}) {
      for (const char* pattern : {"steps", "raw"}) {
        for (DType dtype : kDTypes) {
          const uint64_t segment = (128 << 10) / element_bytes(dtype);
          const uint64_t elements = plans.size() % 3 == 0 ? 5000 : segment + 2 * 8192 + 77;
          Plan plan = make_plan(collective, dtype, square(size, elements), kinds_of(size, pattern));
          plan.planned = true;
          plan.low = dtype == DType::kFloat32 && plans.size() % 2 == 1;
          plan.stream = static_cast<int>(plans.size() % 2);
          plans.push_back(plan);
        }
      }
    }
    // What all-gathers send may differ in length: the longest says how much room there is.
    Plan plan = make_plan(Collective::kAllGather, DType::kBFloat16, square(size, 3000), kinds_of(size, "steps"));
    plan.elements[size - 1].assign(size, (64 << 10) + 2 * 8192 + 500);
    plan.planned = true;
    plans.push_back(plan);
    run(setup, std::move(plans));
  }
}

// Two levels of sums; and parts that go through a rank on each host, with and without dynamic parts.
void hosts() {
  for (const auto& [size, ranks_per_host] : {std::pair{4, 2}, std::pair{6, 3}, std::pair{3, 2}}) {
    Setup setup(size);
    setup.ranks_per_host = ranks_per_host;
    std::vector<Plan> plans;
    for (Route route : {Route::kZip, Route::kHierarchical}) {
      if (route == Route::kHierarchical && size % ranks_per_host != 0) continue;
      for (const bool in_place : {false, true}) {
        for (Plan& plan : small_plans(size, in_place)) {
          if (plan.collective == Collective::kAllToAll || (size > 4 && plans.size() % 5 != 0)) continue;
          if (plans.size() % 3 == 2) {  // also none
            for (int from = 0; from < size; from++) {
              for (int to = 0; to < size; to++) {
                const int owner = plan.collective == Collective::kAllGather ? from : to;
                plan.elements[from][to] = owner == 1 ? 0 : 100 + 4000 * static_cast<uint64_t>(owner);
              }
            }
          }
          plan.route = route;
          plan.ranks_per_host = ranks_per_host;
          plans.push_back(plan);
        }
      }
    }
    run(setup, std::move(plans));
  }
}

// Segments of hierarchical calls, each of which is several exchanges.
void segments_by_hosts() {
  Setup setup(4);
  setup.ranks_per_host = 2;
  setup.options.segment_bytes = 1;  // the least there is: 128 KiB for a peer
  std::vector<Plan> plans;
  for (Collective collective : {Collective::kAllGather, Collective::kReduceScatter}) {
    for (const char* pattern : {"normal", "one"}) {
      Plan plan = make_plan(collective, DType::kBFloat16, square(4, (64 << 10) + 30777), kinds_of(4, pattern));
      plan.in_place = true;
      plan.stream = static_cast<int>(plans.size() % 2);
      plan.route = Route::kHierarchical;
      plan.ranks_per_host = 2;
      plans.push_back(plan);
    }
  }
  run(setup, std::move(plans));
}

void segments() {
  for (int size : {2, 3}) {
    Setup setup(size);
    setup.options.segment_bytes = 1;  // the least there is: 128 KiB for a peer
    std::vector<Plan> plans;
    for (Collective collective : kCollectives) {
      for (const char* pattern : {"normal", "one", "some"}) {
        if (size == 3 && std::string(pattern) != "one") continue;
        const DType dtype = std::string(pattern) == "some" ? DType::kFloat32 : DType::kBFloat16;
        const uint64_t segment = (128 << 10) / element_bytes(dtype);
        Plan plan = make_plan(collective, dtype, square(size, 2 * segment + 777), kinds_of(size, pattern));
        plan.low = dtype == DType::kFloat32;
        plan.in_place = collective != Collective::kAllToAll;
        plan.stream = static_cast<int>(plans.size() % 2);
        plans.push_back(plan);
      }
    }
    // Ranks with different numbers of segments.
    Plan plan = make_plan(Collective::kAllToAll, DType::kBFloat16, square(size, 100), kinds_of(size, "some"));
    plan.elements[0][1] = (64 << 10) + 3;
    plan.elements[1][0] = 2048;
    plans.push_back(plan);
    plan = make_plan(Collective::kAllGather, DType::kBFloat16, square(size, 3000), kinds_of(size, "one"));
    plan.elements[size - 1].assign(size, (64 << 10) + 5000);
    plans.push_back(plan);
    run(setup, std::move(plans));
  }
}

// As FSDP does it: all-gathers on one stream, reduce-scatters on the other; more calls than a worker has tickets.
std::vector<Plan> pipeline_plans(int size, int calls) {
  std::vector<Plan> plans;
  for (int i = 0; i < calls; i++) {
    const bool gathers = i % 2 == 0;
    const char* const patterns[] = {"normal", "one", "normal", "some", "normal"};
    Plan plan =
        make_plan(gathers ? Collective::kAllGather : Collective::kReduceScatter, kDTypes[i % 7 == 6],
                  square(size, 2048 + static_cast<uint64_t>(i % 11) * 100), kinds_of(size, patterns[i / 2 % 5]));
    plan.stream = gathers ? 0 : 1;
    plan.in_place = i % 3 == 0;
    plans.push_back(plan);
  }
  return plans;
}

void pipeline() {
  run(Setup(2), pipeline_plans(2, 120));
  run(Setup(3), pipeline_plans(3, 30));
}

// Tickets are taken again all the time: at most two calls are in flight.
void reuse() {
  Setup setup(2);
  std::vector<Plan> plans = pipeline_plans(2, 120);
  for (size_t i = 0; i < plans.size(); i++) fill(plans[i], i);
  Group group(setup);
  group.each([&](Rank& rank) {
    for (size_t i = 0; i < plans.size(); i += 2) {
      for (size_t j = 0; j < 2; j++) group.issue(rank, plans[i + j]);
      group.synchronise(rank);  // the worker may be behind
      if (i % 3 == 0) rank.worker->drain();
    }
    rank.worker->drain();
    for (const auto& flight : rank.flights) group.expect_values(rank, *flight);
  });
}

// Workers, or the callers of one rank, are late.
void slow() {
  for (bool workers : {true, false}) {
    Setup setup(2);
    std::vector<Plan> plans = pipeline_plans(2, 20);
    for (size_t i = 0; i < plans.size(); i++) fill(plans[i], i);
    Group group(setup);
    for (int rank = 0; rank < 2; rank++) {
      if (workers || rank == 1) (workers ? group.workers : group.callers).delay(rank, 3ms);
    }
    group.run(plans);
  }
}

// On the streams that synchronise with each other, and run() does not wait for them.
void other_streams() {
  for (Streams streams : {Streams::kLegacy, Streams::kBlocking, Streams::kOwn}) {
    Setup setup(2);
    setup.streams = streams;
    std::vector<Plan> plans = pipeline_plans(2, 6);
    for (size_t i = 0; i < plans.size(); i++) fill(plans[i], i);
    Group group(setup);
    group.each([&](Rank& rank) {
      auto open = std::make_shared<std::atomic<bool>>(false);
      simt::enqueue(rank.streams[0], [open] { return open->load(); }, [] {}, "gate");
      for (const Plan& plan : plans) group.issue(rank, plan);
      open->store(true);
      group.synchronise(rank);
      rank.worker->drain();
      for (const auto& flight : rank.flights) group.expect_values(rank, *flight);
    });
  }
}

std::string what_run_throws(Group& group, Rank& rank, const Plan& plan) {
  try {
    group.issue(rank, plan);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing";
}

bool is_busy(cudaStream_t stream) {
  const bool busy = cudaStreamQuery(stream) == cudaErrorNotReady;
  cudaGetLastError();
  return busy;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Plan one_plan(Collective collective, int size, uint64_t elements, const std::string& pattern) {
  Plan plan = make_plan(collective, DType::kBFloat16, square(size, elements), kinds_of(size, pattern));
  fill(plan, 1);
  return plan;
}

// A rank that never comes.
void abort_static() {
  for (Collective collective : kCollectives) {
    const Plan plan = one_plan(collective, 2, 3000, "some");
    Group group((Setup(2)));
    Rank& rank = *group.ranks[0];
    check(cudaSetDevice(0), "cudaSetDevice");
    for (int i = 0; i < 3; i++) group.issue(rank, plan);
    std::this_thread::sleep_for(5ms);
    rank.worker->abort("told to stop");
    rank.worker->drain();
    for (const auto& flight : rank.flights) expect(flight->error() == "told to stop", "error: " + flight->error());
    expect(what_run_throws(group, rank, plan) == "told to stop", "run() after abort()");
    expect(is_busy(rank.streams[0]), "the stream did not wait for the peer");
    // The worker may be gone before its streams go on.
    rank.worker.reset();
    group.callers.abort();
    group.synchronise(rank);
  }
}

// The dynamic phase stands still: by abort(), and by the deadline.
void abort_dynamic() {
  for (bool deadline : {false, true}) {
    for (Collective collective : kCollectives) {
      const Plan plan = one_plan(collective, 2, 3000, "some");
      Setup setup(2);
      if (deadline) setup.timeout = 300ms;
      Group group(setup);
      group.workers.delay(0, 1h);
      group.each([&](Rank& rank) {
        rank.failed = true;
        const Flight &first = group.issue(rank, plan), &second = group.issue(rank, plan);
        if (!deadline) {
          std::this_thread::sleep_for(10ms);
          rank.worker->abort("told to stop");
        }
        rank.worker->drain();
        const std::string wanted = deadline ? "timed out" : "told to stop";
        expect(contains(first.error(), wanted), "error: " + first.error());
        expect(contains(second.error(), wanted), "error of the next call: " + second.error());
        expect(contains(what_run_throws(group, rank, plan), wanted), "run() after a failure");
        expect(is_busy(rank.streams[0]), "outputs may still change: the stream must wait");
      });
      group.workers.abort();
      group.callers.abort();
      group.each([&](Rank& rank) { group.synchronise(rank); });
    }
  }
}

void expect_error(const Flight& flight, const std::string& wanted) {
  expect(contains(flight.error(), wanted), "error: " + flight.error());
}

// Of messages with two chunks from rank 0 to rank 1: the second chunk's header changes, or the size of the pool.
bool is_damaged(int from, int to, uint64_t bytes) { return from == 0 && to == 1 && bytes >= 2 * kBodyStride; }
void damage_chunk(int from, int to, uint8_t* data, uint64_t bytes) {
  if (is_damaged(from, to, bytes)) data[chunk_header_offset(1) + offsetof(ChunkHeader, mode)] ^= 0x40;
}
void damage_size(int from, int to, uint8_t* data, uint64_t bytes) {
  if (is_damaged(from, to, bytes)) data[offsetof(MessageHeader, pool_bytes) + 6] ^= 1;
}

// Only rank 1 fails, also where the others wait for its dynamic part.
void corrupt() {
  for (Collective collective : kCollectives) {
    for (int variant = 0; variant < 4; variant++) {
      const bool checksums = variant % 2 != 0;
      Plan plan =
          make_plan(collective, DType::kBFloat16, square(3, 16000), kinds_of(3, variant < 2 ? "normal" : "some"));
      plan.kinds[0] = "normal";
      fill(plan, 1);
      Setup setup(3);
      setup.options.checksum = checksums;
      Group group(setup);
      group.callers.tamper(damage_chunk);
      group.each([&](Rank& rank) {
        const Flight& flight = group.issue(rank, plan);
        group.synchronise(rank);
        while (!flight.is_told()) std::this_thread::sleep_for(20us);
        if (rank.rank != 1) return group.expect_values(rank, flight);
        rank.failed = true;
        const std::string wanted =
            std::string("rank 0 sent a corrupted message: chunk ") + (checksums ? "" : "1: the chunk's header");
        expect_error(flight, wanted);
        expect(contains(what_run_throws(group, rank, plan), "an earlier call of the group failed: rank 0 sent"),
               "run() after a failure");
      });
      group.callers.expect_idle();
    }
  }
}

// Rank 1 does not learn that there is a dynamic part for it. It must not take that of a later call instead.
void after_corrupt() {
  Plan plans[] = {one_plan(Collective::kAllToAll, 2, 16000, "some"), one_plan(Collective::kAllToAll, 2, 4000, "raw")};
  plans[1].stream = 1;
  Setup setup(2);
  setup.timeout = 500ms;
  Group group(setup);
  group.callers.tamper(damage_size);
  group.when_told = [](const Rank& rank) {
    if (rank.rank == 1) std::this_thread::sleep_for(50ms);  // until the second call has settled
  };
  group.each([&](Rank& rank) {
    rank.failed = true;
    for (const Plan& plan : plans) group.issue(rank, plan);
    rank.worker->drain();
    const std::string wanted = rank.rank == 0 ? "timed out" : "rank 0 sent a corrupted message";
    for (const auto& flight : rank.flights) expect_error(*flight, wanted);
  });
  group.workers.abort();
  group.each([&](Rank& rank) { group.synchronise(rank); });
}

// run() throws in the middle of a call.
void failing_transport() {
  for (Collective collective : kCollectives) {
    const Plan plan = one_plan(collective, 2, 3000, "some");
    Group group((Setup(2)));
    Rank& rank = *group.ranks[0];
    check(cudaSetDevice(0), "cudaSetDevice");
    std::atomic<bool> open{false};
    simt::enqueue(rank.streams[0], [&open] { return open.load(); }, [] {}, "gate");
    rank.transport->fails = true;
    expect(what_run_throws(group, rank, plan) == "the transport fails", "run() without a transport");
    rank.worker->drain();
    rank.worker.reset();
    open = true;
    group.synchronise(rank);
  }
}

// The wait is in the way of what it waits for.
void one_queue() {
  simt::Config config = simt::config();
  config.watchdog_seconds = 1;
  simt::configure(config);
  simt::set_connections(1);
  run(Setup(2), {make_plan(Collective::kAllGather, DType::kBFloat16, square(2, 3000), kinds_of(2, "some"))});
}

void can_wait() { expect(streams_can_wait(), "streams cannot wait"); }

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, simt::Policy> policies = {
      {"random", simt::Policy::kRandom}, {"round-robin", simt::Policy::kRoundRobin}, {"starve", simt::Policy::kStarve}};
  const std::map<std::string, std::function<void()>> sets = {
      {"collectives", collectives},
      {"in-place", in_place},
      {"checksum", checksum},
      {"splits", splits},
      {"segments", segments},
      {"windows", windows},
      {"hosts", hosts},
      {"segments-by-hosts", segments_by_hosts},
      {"pipeline", pipeline},
      {"reuse", reuse},
      {"slow", slow},
      {"other-streams", other_streams},
      {"abort-static", abort_static},
      {"abort-dynamic", abort_dynamic},
      {"corrupt", corrupt},
      {"after-corrupt", after_corrupt},
      {"failing-transport", failing_transport},
      {"one-queue", one_queue},
      {"can-wait", can_wait},
  };
  const auto policy = argc < 3 ? policies.end() : policies.find(argv[2]);
  if (policy == policies.end()) return 2;
  schedule = std::strtoull(argv[1], nullptr, 10);
  for (int i = 3; i < argc; i++) {
    const auto found = sets.find(argv[i]);
    if (found == sets.end()) {
      std::printf("unknown set %s; there are:", argv[i]);
      for (const auto& [name, set] : sets) std::printf(" %s", name.c_str());
      std::printf("\n");
      return 2;
    }
    current = found->first;
    simt::reset();
    simt::configure(schedule, policy->second);
    simt::Config config = simt::config();
    config.watchdog_seconds = 5;
    simt::configure(config);
    found->second();
  }
  if (failures != 0) std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
