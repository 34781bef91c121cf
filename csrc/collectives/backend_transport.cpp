#include "collectives/backend_transport.h"

namespace zipccl {
namespace {

class PostedWork final : public Posted {
 public:
  explicit PostedWork(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  void wait(std::chrono::milliseconds timeout) override { work_->wait(timeout); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

std::vector<at::Tensor> as_tensors(const void* data, uint64_t bytes) {
  return {at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes)}, at::kByte)};
}

template <typename Post>
std::unique_ptr<Posted> posted(const char* what, int peer, Post post) {
  try {
    return std::make_unique<PostedWork>(post());
  } catch (const std::exception& error) {
    throw TransportError(std::string(what) + " rank " + std::to_string(peer) + " failed: " + error.what());
  }
}

}  // namespace

std::unique_ptr<Posted> BackendTransport::send(int peer, int tag, const void* data, uint64_t bytes) {
  auto tensors = as_tensors(data, bytes);
  return posted("sending to", peer, [&] { return backend_->send(tensors, peer, tag); });
}

std::unique_ptr<Posted> BackendTransport::receive(int peer, int tag, void* data, uint64_t bytes) {
  auto tensors = as_tensors(data, bytes);
  return posted("receiving from", peer, [&] { return backend_->recv(tensors, peer, tag); });
}

}  // namespace zipccl
