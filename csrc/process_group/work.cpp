#include "process_group/work.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <thread>

namespace zipccl {

WorkZipCCL::WorkZipCCL(int rank, c10d::OpType type, const std::string& title, const std::vector<at::Tensor>& inputs,
                       std::vector<at::Tensor> outputs, c10::IValue value, uint64_t sequence,
                       std::chrono::milliseconds timeout)
    : c10d::Work(rank, type, title.c_str(), inputs),
      title_(title),
      outputs_(std::move(outputs)),
      value_(std::move(value)),
      sequence_(sequence),
      timeout_(timeout),
      future_(c10::make_intrusive<c10::ivalue::Future>(value_.type())) {}

bool WorkZipCCL::wait(std::chrono::milliseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [this] { return completed_; };
  if (timeout == kNoTimeout) {
    cv_.wait(lock, done);  // the call has a deadline of its own
  } else if (!cv_.wait_for(lock, timeout, done)) {
    TORCH_CHECK_WITH(DistBackendError, false, title_, " timed out: it was not done after ", timeout.count(), " ms");
  }
  if (exception_) std::rethrow_exception(exception_);
  return true;
}

std::vector<at::Tensor> WorkZipCCL::result() {
  TORCH_CHECK(isCompleted(), title_, " is not done: wait for it before asking for its result");
  return outputs_;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkZipCCL::getFuture() {
  std::lock_guard<std::mutex> lock(mutex_);
  future_asked_ = true;
  return future_;
}

void WorkZipCCL::complete_future(std::exception_ptr exception) {
  if (exception) {
    future_->setError(exception);
  } else {
    future_->markCompleted(value_);
  }
}

void WorkZipCCL::complete(const c10::intrusive_ptr<WorkZipCCL>& work, std::exception_ptr exception) {
  {
    std::lock_guard<std::mutex> lock(work->mutex_);
    // Nobody has the future, so no callback can run here.
    if (!work->future_asked_) work->complete_future(exception);
  }
  if (work->future_->completed()) {
    work->finish(exception);
    return;
  }
  // A callback may call and wait for another collective of the group, for which the worker must be free.
  std::thread([work, exception] {
    work->complete_future(exception);
    work->finish(exception);
  }).detach();
}

WorkGroup::WorkGroup(std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> outputs,
                     std::optional<c10::Device> device)
    : c10d::Work(-1, c10d::OpType::COALESCED),
      works_(std::move(works)),
      outputs_(std::move(outputs)),
      device_(device) {}

bool WorkGroup::isCompleted() {
  if (c10d::Work::isCompleted()) return true;
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool WorkGroup::wait(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(waiting_);
  if (device_) waited_ = 0;
  while (waited_ < works_.size()) {
    if (!works_[waited_]->wait(timeout)) return false;
    waited_++;
  }
  if (!device_ && !c10d::Work::isCompleted()) finish();
  return true;
}

void WorkGroup::synchronize() {
  if (device_) wait(kNoTimeout);
}

int WorkGroup::sourceRank() const {
  TORCH_CHECK(works_.size() == 1, "only a single receive has a source rank");
  return works_[0]->sourceRank();
}

c10::intrusive_ptr<c10::ivalue::Future> WorkGroup::getFuture() {
  if (device_) wait(kNoTimeout);  // the current stream's order is what the future then knows
  const bool done = c10d::Work::isCompleted();
  std::lock_guard<std::mutex> lock(mutex_);
  if (future_) return future_;
  const c10::IValue value(outputs_);
  if (device_) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(value.type(), std::vector<c10::Device>{*device_});
    future_->markCompleted(value);
    return future_;
  }
  future_ = c10::make_intrusive<c10::ivalue::Future>(value.type());
  if (done) {
    future_->markCompleted(value);
    return future_;
  }
  auto self = c10::intrusive_ptr<WorkGroup>::unsafe_reclaim_from_nonowning(this);
  std::thread([self, value, future = future_] {
    try {
      self->wait(kNoTimeout);
    } catch (...) {
      future->setError(std::current_exception());
      return;
    }
    future->markCompleted(value);
  }).detach();
  return future_;
}

}  // namespace zipccl
