// The Work of calls that run on a group's worker thread.
#pragma once

#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace zipccl {

class WorkZipCCL final : public c10d::Work {
 public:
  // `title` is the name of the profiler event, `outputs` what result() holds, `value` what the future does.
  WorkZipCCL(int rank, c10d::OpType type, const std::string& title, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> outputs, c10::IValue value, uint64_t sequence, std::chrono::milliseconds timeout);

  // Throws the call's exception; a timeout of the caller's own ends the waiting, not the call.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}  // CPU memory is ready when the work is
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }
#ifdef C10D_BACKEND_HAS_HOOKS
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif

  // Called once, by the worker.
  static void complete(const c10::intrusive_ptr<WorkZipCCL>& work, std::exception_ptr exception);

  const std::string& title() const { return title_; }

 private:
  void complete_future(std::exception_ptr exception);

  const std::string title_;
  const std::vector<at::Tensor> outputs_;
  const c10::IValue value_;
  const uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_asked_ = false;  // guarded by mutex_
};

// Works of the wrapped backend as one, with what they may lack: a future, the caller's own tensors as the result, and
// any number of waits, by anyone. (Gloo's sends and receives do not end a second wait.)
class WorkGroup final : public c10d::Work {
 public:
  // `device`: of works in stream order, whose waits make the current stream wait and not the host: each wait counts.
  explicit WorkGroup(std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> outputs = {},
                     std::optional<c10::Device> device = std::nullopt);
  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
#ifdef C10D_BACKEND_HAS_HOOKS
  void blockCurrentStream() override { synchronize(); }
#endif
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  const std::vector<at::Tensor> outputs_;
  const std::optional<c10::Device> device_;
  std::mutex waiting_;
  size_t waited_ = 0;                               // works that are known to be done, guarded by waiting_
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // made when it is asked for, guarded by mutex_
};

}  // namespace zipccl
