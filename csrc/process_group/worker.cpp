#include "process_group/worker.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/thread_name.h>

namespace zipccl {

Worker::Worker() : thread_([this] { loop(); }) {}

Worker::~Worker() { stop(); }

void Worker::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Worker::submit(c10::intrusive_ptr<WorkZipCCL> work, std::function<void()> job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!stopping_, work->title(), ": the group's worker has ended");
    queue_.push_back({std::move(work), std::move(job), at::ThreadLocalState()});
  }
  changed_.notify_all();
}

void Worker::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

void Worker::refuse(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (refusal_.empty()) refusal_ = why;
}

void Worker::loop() {
  c10::setThreadName("zipccl_worker");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Item item = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    run(std::move(item));
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void Worker::run(Item item) {
  at::ThreadLocalStateGuard state(item.state);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::string refusal;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    refusal = refusal_;
  }
  std::exception_ptr exception;
  try {
    TORCH_CHECK_WITH(DistBackendError, refusal.empty(), item.work->title(), ": ", refusal);
    item.job();
  } catch (...) {
    exception = std::current_exception();
  }
  // Before anyone can see the completion: whoever waits may hold the GIL next, which releasing a tensor may need.
  item.job = nullptr;
  WorkZipCCL::complete(item.work, exception);
}

Crew::~Crew() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Crew::run(const std::vector<std::function<void()>>& tasks) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    state_.emplace();
    open_ = tasks.size();
    for (size_t i = 1; i < tasks.size(); i++) queue_.push_back(&tasks[i]);
    while (threads_.size() + 1 < tasks.size()) threads_.emplace_back([this] { loop(); });
  }
  changed_.notify_all();
  tasks[0]();
  std::unique_lock<std::mutex> lock(mutex_);
  open_--;
  changed_.wait(lock, [this] { return open_ == 0; });
}

void Crew::loop() {
  c10::setThreadName("zipccl_pair");
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const auto* task = queue_.front();
    queue_.pop_front();
    const at::ThreadLocalState state = *state_;
    lock.unlock();
    {
      const at::ThreadLocalStateGuard guard(state);
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      (*task)();
    }
    lock.lock();
    if (--open_ == 0) changed_.notify_all();
  }
}

}  // namespace zipccl
