// A thread that runs a group's calls one after the other, in the order in which they were submitted.
#pragma once

#include <ATen/ThreadLocalState.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "process_group/work.h"

namespace zipccl {

class Worker {
 public:
  Worker();
  ~Worker();
  // Finishes what was submitted. The GIL must not be held: a job's last reference to a tensor may need it.
  void stop();

  void submit(c10::intrusive_ptr<WorkZipCCL> work, std::function<void()> job);
  // Returns when nothing is queued or running.
  void drain();
  // Jobs that have not started fail with this text, now and from now on.
  void refuse(const std::string& why);

 private:
  struct Item {
    c10::intrusive_ptr<WorkZipCCL> work;
    std::function<void()> job;
    at::ThreadLocalState state;
  };
  void loop();
  void run(Item item);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  bool busy_ = false;
  bool stopping_ = false;
  std::string refusal_;
  std::thread thread_;
};

// Threads that run tasks side by side; they start when they are first needed.
class Crew {
 public:
  ~Crew();
  // Returns when all tasks are done; they do not throw. By one thread at a time.
  void run(const std::vector<std::function<void()>>& tasks);

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<const std::function<void()>*> queue_;
  size_t open_ = 0;                            // tasks that are not done
  std::optional<at::ThreadLocalState> state_;  // of the caller
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace zipccl
