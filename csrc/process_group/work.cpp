#include "process_group/work.h"

#include <ATen/core/jit_type.h>

namespace zipccl {

WorkZipCCL::WorkZipCCL(int rank, c10d::OpType type, const std::string& title, const std::vector<at::Tensor>& inputs,
                       std::vector<at::Tensor> outputs, uint64_t sequence, std::chrono::milliseconds timeout)
    : c10d::Work(rank, type, title.c_str(), inputs),
      title_(title),
      outputs_(std::move(outputs)),
      sequence_(sequence),
      timeout_(timeout),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

bool WorkZipCCL::wait(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [this] { return completed_; };
  if (timeout == kNoTimeout) {
    cv_.wait(lock, done);  // the call has a deadline of its own
  } else if (!cv_.wait_for(lock, timeout, done)) {
    TORCH_CHECK_WITH(DistBackendError, false, title_, " was not done after ", timeout.count(), " ms");
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

std::vector<at::Tensor> WorkZipCCL::result() {
  TORCH_CHECK(isCompleted(), title_, " is not done: wait for it before asking for its result");
  return outputs_;
}

void WorkZipCCL::complete(std::exception_ptr exception) {
  finish(exception);
  // After finish(), so that a callback of the future finds the work completed.
  if (exception) {
    future_->setError(exception);
  } else {
    future_->markCompleted(c10::IValue(outputs_));
  }
}

}  // namespace zipccl
