// `selftest CASE SEED...`: runs a case of the table below under each schedule. Exit code 1: a wrong result.
#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "runtime.h"
#include "selftest_kernels.cuh"

using namespace selftest;

namespace {

#define CHECK_CUDA(call)                                                                                \
  do {                                                                                                  \
    if ((call) != cudaSuccess) {                                                                        \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorName(cudaPeekAtLastError())); \
      std::_Exit(2);                                                                                    \
    }                                                                                                   \
  } while (false)

template <class T>
class Buffer {
 public:
  explicit Buffer(size_t n, T value = T{}) : n_(n) {
    CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&data_), n * sizeof(T)));
    for (size_t i = 0; i < n; ++i) data_[i] = value;
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  T* data() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }
  size_t size() const { return n_; }

 private:
  T* data_ = nullptr;
  size_t n_;
};

class Stream {
 public:
  Stream() { CHECK_CUDA(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking)); }
  Stream(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(handle_); }
  operator cudaStream_t() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

bool finished() {
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaGetLastError());
  return true;
}

bool run_primitives(Bug) {
  Buffer<int> line(1, 1 << 30);
  ZIPCCL_LAUNCH(primitives, dim3(2, 3), dim3(4, 4, 8), sizeof(RotateShared), nullptr, line.data());
  finished();
  if (line[0] != 1 << 30) std::fprintf(stderr, "selftest_kernels.cuh:%d\n", line[0]);
  return line[0] == 1 << 30;
}

bool run_rotate(Bug bug) {
  constexpr unsigned kBlocks = 3;
  Buffer<unsigned> out(kBlocks * kThreads);
  const size_t shared = bug == Bug::kTooLittleShared ? sizeof(RotateShared) - 4 : sizeof(RotateShared);
  ZIPCCL_LAUNCH(rotate, kBlocks, kThreads, shared, nullptr, out.data(), bug);
  finished();
  for (unsigned i = 0; i < out.size(); ++i) {
    if (out[i] != 1000 + 2 * ((i % kThreads + 33) % kThreads + i / kThreads)) return false;
  }
  return true;
}

bool run_rotate_warp(Bug bug) {
  Buffer<unsigned> out(kThreads);
  ZIPCCL_LAUNCH(rotate_warp, 1, kThreads, sizeof(RotateShared), nullptr, out.data(), bug);
  finished();
  for (unsigned i = 0; i < kThreads; ++i) {
    if (out[i] != 3 * ((i & ~31u) + (i + 1) % 32)) return false;
  }
  return true;
}

bool run_strict_warp(Bug bug) {
  simt::Config config = simt::config();
  config.strict_warp_order = true;
  simt::configure(config);
  return run_rotate_warp(bug);
}

bool run_pipeline(Bug bug) {
  for (const size_t n : {size_t(8), size_t(kTile), size_t(5 * kTile + 13)}) {
    Buffer<uint16_t> in(n), out(n);
    for (size_t i = 0; i < n; ++i) in[i] = uint16_t(i * 31 + 7);
    if (bug == Bug::kCopyInFlight) {
      if (n < kTile) continue;
      ZIPCCL_LAUNCH(leave_copy, 1, kThreads, sizeof(PipelineShared), nullptr, in.data());
    } else {
      ZIPCCL_LAUNCH((pipeline<true>), dim3(2), dim3(kThreads), sizeof(PipelineShared), nullptr, in.data(), n,
                    out.data(), bug);
    }
    finished();
    for (size_t i = 0; i < n; ++i) {
      if (out[i] != uint16_t(~in[i])) return false;
    }
  }
  return true;
}

bool run_fill(Bug bug) {
  Buffer<uint16_t> out(1003);
  ZIPCCL_LAUNCH(fill, 4, 64, 0, nullptr, out.data(), out.size(), bug);
  finished();
  return std::accumulate(out.data(), out.data() + out.size(), 0u) == out.size();
}

bool run_vote(Bug bug) {
  Buffer<unsigned> out(kThreads);
  ZIPCCL_LAUNCH(vote, 1, kThreads, 0, nullptr, out.data(), bug);
  finished();
  for (unsigned i = 0; i < kThreads; ++i) {
    if (out[i] != 0x41041041u) return false;
  }
  return true;
}

bool run_publish(Bug bug) {
  simt::Config config = simt::config();
  config.resident_blocks = 2;
  simt::configure(config);
  Buffer<Mail> mail(1);
  Buffer<unsigned> out(kThreads);
  ZIPCCL_LAUNCH(publish, 2, kThreads, 0, nullptr, mail.data(), out.data(), bug);
  finished();
  for (unsigned i = 0; i < kThreads; ++i) {
    if (out[i] != 7 * i) return false;
  }
  return true;
}

bool run_chain(Bug) {
  constexpr unsigned kBlocks = 9;
  simt::Config config = simt::config();
  config.resident_blocks = kBlocks;
  simt::configure(config);
  Buffer<Mail> mail(kBlocks);
  Buffer<unsigned> sum(kThreads);
  ZIPCCL_LAUNCH(chain, kBlocks, kThreads, 0, nullptr, mail.data(), sum.data());
  finished();
  for (unsigned i = 0; i < kThreads; ++i) {
    if (sum[i] != kBlocks * (kBlocks - 1) / 2 + kBlocks * i) return false;
  }
  return true;
}

bool run_count(Bug bug) {
  Buffer<unsigned> counter(1);
  ZIPCCL_LAUNCH(count, 5, kThreads, 0, nullptr, counter.data(), bug);
  finished();
  return counter[0] == 5 * kThreads;
}

bool run_parameters(Bug) {
  Buffer<unsigned> out(1);
  Parameters parameters;
  for (unsigned i = 0; i < 1000; ++i) parameters.values[i] = i;
  ZIPCCL_LAUNCH(sum_parameters, 1, kThreads, 0, nullptr, parameters, out.data());
  parameters.values[3] = 1000000;  // the launch has its own
  finished();
  return out[0] == 999 * 1000 / 2;
}

// Two streams change the same memory, one after the other by an event.
bool run_events(bool wait) {
  constexpr size_t kCount = 200;
  Stream a, b;
  Buffer<unsigned> data(kCount);
  std::vector<unsigned> source(kCount, 5), result(kCount);
  cudaEvent_t event;
  CHECK_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  for (int round = 0; round < 3; ++round) {
    CHECK_CUDA(cudaMemcpyAsync(data.data(), source.data(), kCount * 4, cudaMemcpyHostToDevice, a));
    ZIPCCL_LAUNCH(add, 2, 128, 0, a, data.data(), kCount, 1u);
    CHECK_CUDA(cudaEventRecord(event, a));
    if (wait) CHECK_CUDA(cudaStreamWaitEvent(b, event, 0));
    ZIPCCL_LAUNCH(add, 2, 128, 0, b, data.data(), kCount, 10u);
    CHECK_CUDA(cudaMemcpyAsync(result.data(), data.data(), kCount * 4, cudaMemcpyDeviceToHost, b));
    CHECK_CUDA(cudaEventRecord(event, b));
    CHECK_CUDA(cudaEventSynchronize(event));
    for (const unsigned value : result) {
      if (value != 16) return false;
    }
  }
  CHECK_CUDA(cudaEventDestroy(event));
  return finished();
}
bool run_events(Bug) { return run_events(true); }
bool run_missing_wait(Bug) { return run_events(false); }

using WaitValue = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

WaitValue memory_operation(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK_CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) std::_Exit(2);
  return reinterpret_cast<WaitValue>(function);
}

// A stream waits for the host, and another one for that stream, by numbers that wrap around.
bool run_gate(Bug) {
  const WaitValue wait = memory_operation("cuStreamWaitValue32"), write = memory_operation("cuStreamWriteValue32");
  Stream a, b;
  uint32_t* flags;
  CHECK_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&flags), 8, cudaHostAllocMapped));
  flags[0] = flags[1] = 0xfffffff0u;
  Buffer<unsigned> data(1);
  const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(flags);
  if (wait(b, address + 4, 3, CU_STREAM_WAIT_VALUE_GEQ)) return false;
  ZIPCCL_LAUNCH(add, 1, 32, 0, b, data.data(), size_t(1), 10u);
  if (wait(a, address, 2, CU_STREAM_WAIT_VALUE_GEQ)) return false;
  ZIPCCL_LAUNCH(add, 1, 32, 0, a, data.data(), size_t(1), 1u);
  if (write(a, address + 4, 3, 0)) return false;
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (data[0] != 0 || cudaStreamQuery(a) != cudaErrorNotReady || cudaGetLastError() != cudaErrorNotReady) return false;
  __atomic_store_n(flags, 1, __ATOMIC_RELEASE);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  if (data[0] != 0) return false;
  __atomic_store_n(flags, 2, __ATOMIC_RELEASE);
  CHECK_CUDA(cudaStreamSynchronize(b));
  const bool right = data[0] == 11;
  CHECK_CUDA(cudaFreeHost(flags));
  return right && finished();
}

// Kernels of two streams at once: the first one polls what the second one writes.
bool run_concurrent(Bug) {
  Stream a, b;
  Buffer<unsigned> flag(1);
  ZIPCCL_LAUNCH(wait_flag, 2, 32, 0, a, flag.data());
  std::this_thread::sleep_for(std::chrono::milliseconds(3));
  if (cudaStreamQuery(a) != cudaErrorNotReady) return false;
  cudaGetLastError();
  ZIPCCL_LAUNCH(set_flag, 1, 1, 0, b, flag.data());
  return finished();
}

// An exchange that begins when all ranks have arrived, each rank's host in a thread of its own.
bool run_exchange(unsigned connections) {
  constexpr size_t kRanks = 3;
  simt::set_connections(connections);
  std::vector<std::thread> ranks;
  std::atomic<int> arrived{0}, right{0};
  std::vector<Buffer<unsigned>*> sent(kRanks), received(kRanks);
  for (size_t rank = 0; rank < kRanks; ++rank) {
    sent[rank] = new Buffer<unsigned>(64);
    received[rank] = new Buffer<unsigned>(64);
  }
  for (size_t rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      CHECK_CUDA(cudaSetDevice(int(rank)));
      Stream stream;
      ZIPCCL_LAUNCH(add, 1, 64, 0, stream, sent[rank]->data(), size_t(64), unsigned(rank + 1));
      bool here = false;
      simt::enqueue(
          stream,
          [&arrived, here]() mutable {
            if (!here) ++arrived;
            here = true;
            return arrived == int(kRanks);
          },
          [&, rank] {
            for (size_t from = 0; from < kRanks; ++from) (*received[rank])[from] = (*sent[from])[from];
          },
          "exchange");
      ZIPCCL_LAUNCH(add, 1, 64, 0, stream, received[rank]->data(), size_t(64), 100u);
      finished();
      bool all = true;
      for (size_t from = 0; from < kRanks; ++from) all = all && (*received[rank])[from] == 101 + from;
      right += all;
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (size_t rank = 0; rank < kRanks; ++rank) {
    delete sent[rank];
    delete received[rank];
  }
  return right == int(kRanks) && simt::live_allocations() == 0;
}
bool run_exchange(Bug) { return run_exchange(0); }
bool run_one_connection(Bug) { return run_exchange(1); }

bool run_use_after_free(Bug) {
  Stream stream;
  unsigned* data;
  CHECK_CUDA(cudaMalloc(reinterpret_cast<void**>(&data), 64));
  uint32_t* gate;
  CHECK_CUDA(cudaMallocHost(reinterpret_cast<void**>(&gate), 4));
  *gate = 0;
  memory_operation("cuStreamWaitValue32")(stream, reinterpret_cast<CUdeviceptr>(gate), 1, CU_STREAM_WAIT_VALUE_EQ);
  ZIPCCL_LAUNCH(add, 1, 16, 0, stream, data, size_t(16), 1u);
  CHECK_CUDA(cudaFree(data));
  __atomic_store_n(gate, 1, __ATOMIC_RELEASE);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaFreeHost(gate));
  return true;
}

// What CUDA refuses, and an error in a kernel that the process outlives.
bool run_errors(Bug) {
  Buffer<unsigned> out(kThreads);
  ZIPCCL_LAUNCH(add, 0, 32, 0, nullptr, out.data(), size_t(1), 1u);
  if (cudaGetLastError() != cudaErrorInvalidConfiguration || cudaGetLastError() != cudaSuccess) return false;
  ZIPCCL_LAUNCH(add, 1, 32, 50000, nullptr, out.data(), size_t(1), 1u);
  if (cudaGetLastError() != cudaErrorInvalidValue) return false;
  CHECK_CUDA(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(add), cudaFuncAttributeMaxDynamicSharedMemorySize, 50000));
  ZIPCCL_LAUNCH(add, 1, 32, 50000, nullptr, out.data(), size_t(1), 1u);
  finished();
  CHECK_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(add), cudaFuncAttributeMaxDynamicSharedMemorySize, 0));
  simt::Config config = simt::config();
  config.exit_on_error = false;
  simt::configure(config);
  ZIPCCL_LAUNCH(vote, 1, kThreads, 0, nullptr, out.data(), Bug::kMaskWithoutCaller);
  if (cudaDeviceSynchronize() != cudaErrorLaunchFailure) return false;
  if (cudaMemset(out.data(), 0, 4) != cudaErrorLaunchFailure) return false;
  if (simt::take_error().find("lacks the lane") == std::string::npos) return false;
  cudaGetLastError();
  ZIPCCL_LAUNCH(vote, 1, kThreads, 0, nullptr, out.data(), Bug::kNone);
  return finished() && out[0] == 0x41041041u;
}

// Speed: `selftest speed SEED` says how many elements a second the pipeline moves.
bool run_speed(Bug) {
  const size_t n = 4 << 20;
  Buffer<uint16_t> in(n), out(n);
  const auto start = std::chrono::steady_clock::now();
  ZIPCCL_LAUNCH((pipeline<false>), dim3(64), dim3(kThreads), sizeof(PipelineShared), nullptr, in.data(), n, out.data(),
                Bug::kNone);
  finished();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%.1f M elements/s\n", double(n) / seconds.count() / 1e6);
  return true;
}

struct Case {
  const char* name;
  bool (*run)(Bug);
  Bug bug = Bug::kNone;
};

const Case kCases[] = {
    {"primitives", run_primitives},
    {"rotate", run_rotate},
    {"rotate-no-barrier-before-read", run_rotate, Bug::kNoBarrierBeforeRead},
    {"rotate-no-barrier-before-write", run_rotate, Bug::kNoBarrierBeforeWrite},
    {"rotate-shared-index", run_rotate, Bug::kSharedIndex},
    {"rotate-too-little-shared", run_rotate, Bug::kTooLittleShared},
    {"warp", run_rotate_warp},
    {"warp-no-sync", run_rotate_warp, Bug::kNoWarpSync},
    {"warp-vote", run_rotate_warp, Bug::kVoteForSync},
    {"warp-vote-strict", run_strict_warp, Bug::kVoteForSync},
    {"pipeline", run_pipeline},
    {"pipeline-no-wait", run_pipeline, Bug::kNoCopyWait},
    {"pipeline-no-barrier", run_pipeline, Bug::kNoBarrierAfterCopy},
    {"pipeline-tail", run_pipeline, Bug::kTailOverRead},
    {"pipeline-in-flight", run_pipeline, Bug::kCopyInFlight},
    {"fill", run_fill},
    {"fill-misaligned", run_fill, Bug::kMisalignedStore},
    {"fill-behind-end", run_fill, Bug::kStoreBehindEnd},
    {"vote", run_vote},
    {"vote-divergent", run_vote, Bug::kDivergentBallot},
    {"vote-mask-without-caller", run_vote, Bug::kMaskWithoutCaller},
    {"vote-overlapping-masks", run_vote, Bug::kOverlappingMasks},
    {"vote-barrier-divergence", run_vote, Bug::kBarrierDivergence},
    {"vote-deadlock", run_vote, Bug::kDeadlock},
    {"publish", run_publish},
    {"publish-early-flag", run_publish, Bug::kEarlyFlag},
    {"publish-no-fence", run_publish, Bug::kNoFence},
    {"publish-no-flag", run_publish, Bug::kFlagNeverSet},
    {"chain", run_chain},
    {"count", run_count},
    {"count-plain", run_count, Bug::kPlainCounter},
    {"parameters", run_parameters},
    {"events", run_events},
    {"events-no-wait", run_missing_wait},
    {"gate", run_gate},
    {"concurrent", run_concurrent},
    {"exchange", run_exchange},
    {"exchange-one-connection", run_one_connection},
    {"use-after-free", run_use_after_free},
    {"errors", run_errors},
    {"speed", run_speed},
};

}  // namespace

int main(int argc, char** argv) {
  for (const Case& one : kCases) {
    if (argc < 3 || one.name != std::string(argv[1])) continue;
    for (int i = 2; i < argc; ++i) {
      const uint64_t seed = std::strtoull(argv[i], nullptr, 10);
      for (const auto policy : {simt::Policy::kRandom, simt::Policy::kRoundRobin, simt::Policy::kStarve}) {
        simt::reset();
        simt::Config config;
        config.watchdog_seconds = 1;
        simt::configure(config);
        simt::configure(seed, policy);
        if (one.run(one.bug)) continue;
        std::fprintf(stderr, "wrong result with seed %s, policy %d\n", argv[i], int(policy));
        return 1;
      }
    }
    return 0;
  }
  std::fprintf(stderr, "no such case\n");
  return 2;
}
