// A transport over the sends and receives of a c10d backend.
#pragma once

#include <condition_variable>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "collectives/transport.h"

namespace zipccl {

// For backends on CPU memory, such as ProcessGroupGloo. Nobody else may use `backend` meanwhile.
class BackendTransport final : public Transport {
 public:
  explicit BackendTransport(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)) {}
  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  std::unique_ptr<Posted> send(int peer, int tag, const void* data, uint64_t bytes) override;
  std::unique_ptr<Posted> receive(int peer, int tag, void* data, uint64_t bytes) override;
  void abort() override;

  void wait(c10d::Work& work, std::chrono::milliseconds timeout);

 private:
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex mutex_;
  std::condition_variable left_;  // a wait that was going on has ended
  std::set<c10d::Work*> waiting_;
  bool aborted_ = false;
  std::mutex posting_;  // a backend expects one caller at a time
};

}  // namespace zipccl
