// Zipped calls on CUDA tensors. The interface needs no CUDA headers; builds without CUDA lack make_cuda_calls.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives/exchange.h"
#include "process_group/options.h"
#include "process_group/tensor.h"

namespace zipccl {

// One collective, ready to run as the call of this number: part of a c10d call, or all of it.
using Job = std::function<void(Exchange&, uint64_t sequence)>;

// A c10d call. It is counted as `collective`; its work's result is `outputs`, its future's value `value`.
struct JobList {
  Collective collective = {};
  c10d::OpType type = c10d::OpType::UNKNOWN;
  Tensors inputs;
  Tensors outputs;
  c10::IValue value;
  std::vector<Job> jobs;
  uint64_t sequence = 0;  // of the first job
  std::chrono::milliseconds timeout{0};
};

class CudaCalls {
 public:
  virtual ~CudaCalls() = default;
  // Queues the call on the current stream of the tensors' device, or, if it is asynchronous, on one of its own. The
  // host does not wait. As with ProcessGroupNCCL, an asynchronous call keeps its tensors until its work is waited for.
  virtual c10::intrusive_ptr<c10d::Work> run(JobList call, bool asynchronous) = 0;
  // What is in flight fails as soon as it can. From any thread.
  virtual void abort(const std::string& why) = 0;
  // Returns when nothing is in flight.
  virtual void drain() = 0;
};

// What the calls need of their group.
struct CudaGroup {
  int rank;
  std::string name;
  ExchangeOptions options;
  Hosts hosts;
  std::chrono::milliseconds timeout;
  // Makes or finds a wrapped backend for CUDA tensors: for the callers' threads, and one more for each device's worker.
  // Null: the bytes go through processor memory and `staging`, a backend for CPU tensors.
  std::function<c10::intrusive_ptr<c10d::Backend>()> plain;
  std::function<c10::intrusive_ptr<c10d::Backend>(c10::DeviceIndex device)> exchange;
  c10::intrusive_ptr<c10d::Backend> staging;
  // Told what a call did when it is done, by a thread of its own.
  std::function<void(Collective, const Counters&)> finished;
};

std::unique_ptr<CudaCalls> make_cuda_calls(CudaGroup group);

// Whether a call can be zipped now: not while the current stream is being captured into a graph, as the capture would
// miss what the worker does, nor where streams cannot wait for flags.
bool cuda_calls_possible(c10::DeviceIndex device);

}  // namespace zipccl
