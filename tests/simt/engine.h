// Between the engine, which runs one kernel (simt.cpp), and the device, which runs streams of them (runtime.cpp).
#pragma once

#include <string>
#include <vector>

#include "runtime.h"
#include "simt.h"

namespace simt {

struct Error {
  std::string text;
};

struct Launch {
  std::string name;
  dim3 grid, block;
  size_t shared_bytes = 0;
  std::function<void()> body;
};

// How far each stream has come, by the stream's number.
using Clock = std::vector<uint64_t>;

// Which work comes before this one, for the race detector.
struct Place {
  size_t stream = 0;
  uint64_t sequence = 0;
  Clock before;
};

enum class Progress { kDone, kMore, kSpinning };

struct Grid;
Grid* start(Launch launch, const Place& place, uint64_t seed);
// Runs for about so many switches between threads. Throws Error, and then the grid can only be destroyed.
Progress advance(Grid* grid, uint64_t switches);
std::string describe(const Grid* grid);
void destroy(Grid* grid);

// A copy by the device itself.
void check_access(const std::string& name, const Place& place, const void* data, size_t bytes, bool write);
// Frees what untrack() left behind; on the device's thread, between operations.
void collect_untracked();
void forget_accesses();

}  // namespace simt
