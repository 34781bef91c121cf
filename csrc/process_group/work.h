// The Work of calls that run on a group's worker thread.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace zipccl {

class WorkZipCCL final : public c10d::Work {
 public:
  // `title` is the name of the profiler event, `outputs` what result() and the future hold.
  WorkZipCCL(int rank, c10d::OpType type, const std::string& title, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> outputs, uint64_t sequence, std::chrono::milliseconds timeout);

  // Throws the call's exception; a timeout of the caller's own ends the waiting, not the call.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}  // CPU memory is ready when the work is
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }

  // Called once, by the worker.
  void complete(std::exception_ptr exception);

  const std::string& title() const { return title_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  const std::string title_;
  const std::vector<at::Tensor> outputs_;
  const uint64_t sequence_;
  const std::chrono::milliseconds timeout_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace zipccl
