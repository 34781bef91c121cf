// The exchange on GPU memory: everything is queued on the caller's stream, and the host does not wait.
//
// On the stream S of a call, for each segment: encode; exchange of the static parts; decode, or reduce; settle, which
// sets the call's flag if nothing is left to do; then S waits for the flag. So work that is queued on S later reads
// finished outputs, and memory that is freed in S's order is free to be used again.
//
// If a message has a dynamic part (more escapes than its inline pool holds, or low halves of fp32), nothing on S can
// know its size. A worker thread, which sees the sizes in pinned memory, exchanges the dynamic parts on a stream and
// through a transport of its own, in the order of the calls, which is the same on all ranks; it finishes the decoding
// and sets the flag. A fault is reported by the worker too, which then sets the flag to let S go on.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "codec/cuda/batch.h"
#include "collectives/exchange.h"

namespace zipccl {

struct Range {
  void* data = nullptr;
  uint64_t bytes = 0;
};

// Moves bytes between the ranks' GPU memory, ordered on a stream. On every rank, calls come in the same order.
class StreamTransport {
 public:
  virtual ~StreamTransport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Sends sends[r] to rank r and receives receives[r] from it. Both ends of a pair pass the same size; pairs of size
  // zero, and the own rank's entries, are nothing.
  virtual void exchange(const std::vector<Range>& sends, const std::vector<Range>& receives, cudaStream_t stream) = 0;
  // Rank r's `bytes` bytes go to output + r * bytes, the own rank's too.
  virtual void all_gather(const void* input, void* output, uint64_t bytes, cudaStream_t stream) = 0;
  // Makes what the host waits for in these calls, if it does, fail. From any thread.
  virtual void abort() {}
};

// Memory of the current device that may be released when the work that uses it has been queued on `stream`.
class StreamMemory {
 public:
  virtual ~StreamMemory() = default;
  // On a 128-byte boundary at least.
  virtual std::shared_ptr<uint8_t> allocate(uint64_t bytes, cudaStream_t stream) = 0;
};

// Whether a stream may wait for a flag that another stream sets: the driver must know how, and streams must not share
// one hardware queue, where the wait would hold up what sets the flag (CUDA_DEVICE_MAX_CONNECTIONS=1,
// CUDA_LAUNCH_BLOCKING=1).
bool streams_can_wait();

// What became of a call, told by the worker when all of it is done. `error` is empty if it went well.
using Finished = std::function<void(const Counters& counters, const std::string& error)>;

// One segment of a call in flight.
struct Ticket;

// Finishes the segments of a group's calls on one device, in the order in which they were queued. The thread ends with
// the object, after all that was queued is done.
class StreamWorker {
 public:
  // `transport` is used by the worker's thread alone.
  StreamWorker(int device, std::unique_ptr<StreamTransport> transport);
  ~StreamWorker();
  // Everything in flight fails with this text as soon as it can, and everything later at once. From any thread.
  void abort(const std::string& why);
  // Returns when nothing is in flight.
  void drain();

 private:
  friend class StreamExchange;
  friend class StreamCall;
  std::unique_ptr<Ticket> take_ticket();
  void submit(std::unique_ptr<Ticket> ticket);
  void loop();
  std::string finish(Ticket& ticket);
  std::string finish_dynamic(Ticket& ticket);
  std::string wait(cudaEvent_t event, const Ticket& ticket);
  void check_aborted();

  const int device_;
  const std::unique_ptr<StreamTransport> transport_;
  cudaStream_t stream_ = nullptr;
  cudaMemPool_t memory_ = nullptr;
  cudaStream_t setup_stream_ = nullptr;  // of new tickets
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Ticket>> queue_;
  std::vector<std::unique_ptr<Ticket>> free_;
  size_t in_flight_ = 0;
  bool stopping_ = false;
  std::string aborted_;
  std::thread thread_;
};

// run() returns when the call is queued. It throws std::runtime_error if it could not be, and after abort().
class StreamExchange final : public Exchange {
 public:
  // `transport` is used on the calling thread. The current device must be the worker's, and `stream` on it.
  StreamExchange(StreamTransport& transport, StreamWorker& worker, StreamMemory& memory, const ExchangeOptions& options,
                 const Hosts& hosts, cudaStream_t stream, std::chrono::milliseconds timeout, Finished finished)
      : Exchange(options, hosts),
        transport_(transport),
        worker_(worker),
        memory_(memory),
        stream_(stream),
        timeout_(timeout),
        finished_(std::move(finished)) {}
  int rank() const override { return transport_.rank(); }
  int size() const override { return transport_.size(); }
  // Also from a call's own hooks.
  void run(const Call& call, const Parts& parts) override;
  // As with NCCL, what calls do not agree about is not found.
  void agree(const Call&, const Parts&) override {}
  uint64_t segments_in_flight() const override { return 1; }
  uint8_t* stage(int index, uint64_t bytes) override;
  // How often run() was called: as often is `finished`, unless it throws.
  int runs() const { return runs_; }

 private:
  friend class StreamCall;
  int runs_ = 0;
  StreamTransport& transport_;
  StreamWorker& worker_;
  StreamMemory& memory_;
  const cudaStream_t stream_;
  const std::chrono::milliseconds timeout_;
  const Finished finished_;
  std::map<int, std::shared_ptr<uint8_t>> stages_;
};

}  // namespace zipccl
