// What tests say to the emulated device besides the CUDA runtime's own functions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace simt {

// Of the threads of a kernel, and of its blocks. Random alone moves each asynchronous copy by a coin flip; forward
// makes them at once, reverse only at the wait.
enum class Order { kForward, kReverse, kRandom };

// Which of the streams that could go on does. Starve: one stream only when no other can.
enum class Policy { kRandom, kRoundRobin, kStarve };

struct Config {
  uint64_t seed = 0;
  Order order = Order::kForward;
  Policy policy = Policy::kRandom;
  cudaStream_t starved = nullptr;  // null: which one depends on the seed
  unsigned resident_blocks = 1;    // of a kernel, at the same time
  unsigned connections = 0;        // hardware queues that streams share, as CUDA_DEVICE_MAX_CONNECTIONS; 0: one each
  int devices = 8;
  int multiprocessors = 4;         // what cudaDeviceGetAttribute says
  double watchdog_seconds = 20;    // without any progress, before the streams are printed and the process exits
  bool exit_on_error = true;       // else synchronising calls return cudaErrorLaunchFailure; see take_error()
  bool strict_warp_order = false;  // only __syncwarp orders memory accesses, not votes and shuffles
  bool check_streams = true;       // look for races between kernels and copies of different streams (race build)
};

// Exit codes of a process that fails: see also the sanitizers'.
constexpr int kExitKernelError = 70;
constexpr int kExitStuck = 71;

// While the device is idle.
void configure(const Config& config);
// A schedule by its number: 0 is forward, 1 reverse, others are random with one to three blocks at a time.
void configure(uint64_t seed, Policy policy);
const Config& config();
void set_connections(unsigned count);
// Waits for the device, forgets errors and the config, and all that the race detector knows.
void reset();

// An operation of a test's own. `ready` is asked, on the device's thread and possibly often, once the operation is at
// the head of its stream; neither may call CUDA.
void enqueue(cudaStream_t stream, std::function<bool()> ready, std::function<void()> action, const char* label);

// What a failed kernel had to say, and empty from then on.
std::string take_error();
// What happened on the host by other means than CUDA calls, such as polling mapped memory, is before what follows.
void host_acquire();
size_t live_allocations();
// Whether this is the race build.
bool detects_races();

}  // namespace simt
