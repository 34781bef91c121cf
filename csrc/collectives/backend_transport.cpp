#include "collectives/backend_transport.h"

namespace zipccl {
namespace {

class PostedWork final : public Posted {
 public:
  PostedWork(BackendTransport& transport, c10::intrusive_ptr<c10d::Work> work)
      : transport_(transport), work_(std::move(work)) {}
  void wait(std::chrono::milliseconds timeout) override { transport_.wait(*work_, timeout); }

 private:
  BackendTransport& transport_;
  c10::intrusive_ptr<c10d::Work> work_;
};

std::vector<at::Tensor> as_tensors(const void* data, uint64_t bytes) {
  return {at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte)};
}

template <typename Post>
std::unique_ptr<Posted> posted(BackendTransport& transport, const char* what, int peer, Post post) {
  try {
    return std::make_unique<PostedWork>(transport, post());
  } catch (const std::exception& error) {
    throw TransportError(std::string(what) + " rank " + std::to_string(peer) + " failed: " + error.what());
  }
}

}  // namespace

std::unique_ptr<Posted> BackendTransport::send(int peer, int tag, const void* data, uint64_t bytes) {
  auto tensors = as_tensors(data, bytes);
  const std::lock_guard<std::mutex> lock(posting_);
  return posted(*this, "sending to", peer, [&] { return backend_->send(tensors, peer, tag); });
}

std::unique_ptr<Posted> BackendTransport::receive(int peer, int tag, void* data, uint64_t bytes) {
  auto tensors = as_tensors(data, bytes);
  const std::lock_guard<std::mutex> lock(posting_);
  return posted(*this, "receiving from", peer, [&] { return backend_->recv(tensors, peer, tag); });
}

void BackendTransport::wait(c10d::Work& work, std::chrono::milliseconds timeout) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) throw TransportError("the group was aborted");
    waiting_.insert(&work);
  }
  bool arrived = false;
  std::exception_ptr error;
  try {
    arrived = work.wait(timeout);  // false after Work::abort
  } catch (...) {
    error = std::current_exception();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.erase(&work);
  left_.notify_all();
  if (!arrived && aborted_) throw TransportError("the group was aborted");
  if (error) std::rethrow_exception(error);
  if (!arrived) throw TransportError("the wait was aborted");
}

void BackendTransport::abort() {
  std::unique_lock<std::mutex> lock(mutex_);
  aborted_ = true;
  // Again and again: an abort before the wait has really begun has no effect.
  while (!waiting_.empty()) {
    for (c10d::Work* work : waiting_) work->abort();
    left_.wait_for(lock, std::chrono::milliseconds(10));
  }
}

}  // namespace zipccl
