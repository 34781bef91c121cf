// Runs a kernel: one fiber for each CUDA thread, which goes on until it must wait for others.
#include "simt.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "engine.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Pushes the callee-saved registers, swaps stacks, pops. A jump instead of a return: the return predictor knows nothing
// of the other stack.
extern "C" void simt_switch(void** save, void* load);
asm(R"(
.text
.globl simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  popq %rcx
  jmp *%rcx
.size simt_switch,.-simt_switch
)");

namespace simt {

__thread ThreadContext* context;

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif
constexpr size_t kPage = 4096;
#ifdef SIMT_RACE
constexpr bool kRace = true;
#else
constexpr bool kRace = false;
#endif

struct Random {
  uint64_t state = 1;
  using result_type = uint64_t;
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return ~uint64_t(0) >> 8; }
  uint64_t operator()() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state * 0x2545F4914F6CDD1Dull) >> 8;
  }
};

enum class State : uint8_t { kReady, kAtBarrier, kAtCollective, kExited };

struct Copy {
  char* to;
  const char* from;
  size_t bytes, zero_fill;
  unsigned group;
  bool made;
};

// The accesses of a block that a thread knows to be finished when it publishes something: those before the block's last
// barrier, and those of its warp as far as the warp's clock goes.
struct Release {
  uint32_t barriers = 0;
  std::array<uint32_t, 32> warp_clock{};
};
using Knowledge = std::map<std::pair<uint32_t, uint32_t>, Release>;  // by block and warp

struct Fiber {
  ThreadContext context;
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  struct Block* block = nullptr;
  State state = State::kReady;
  uint64_t result = 0;
  const char* file = nullptr;  // where it waits
  int line = 0;
  unsigned atomics = 0;  // since the last switch
  std::vector<Copy> copies;
  unsigned copy_group = 0;
  uint32_t segment = 0;  // the race detector's name for what runs until the next synchronisation
  std::unique_ptr<Release> release;
};

struct OpenCollective {
  unsigned mask, arrived;
  Collective op;
  const char* file;
  int line;
};

struct Warp {
  std::vector<OpenCollective> open;  // normally none or one
  uint64_t values[32];
  unsigned sources[32];
  unsigned exited;
  std::vector<std::array<uint32_t, 32>> clocks;  // by lane: what it knows of each lane
  Knowledge acquired;
};

struct Cell {
  uint32_t write, write_at, read, read_at;  // segments, and code addresses with flags
};

struct Block {
  Grid* grid = nullptr;
  unsigned index = 0;
  uint32_t number = 0;  // unlike that of any other block, ever
  char* shared = nullptr;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  unsigned live = 0, at_barrier = 0;
  Reduction reduction = Reduction::kNone;
  unsigned votes = 0;
  const char* file = nullptr;  // of the barrier
  int line = 0;
  uint32_t barriers = 0;
  Knowledge acquired;
  std::vector<Cell> shadow;
};

}  // namespace

struct Grid {
  Launch launch;
  Place place;
  Order order;
  Random random;
  std::vector<unsigned> blocks;  // in the order in which they run
  size_t next_block = 0;
  std::vector<std::unique_ptr<Block>> resident;
  std::vector<Block*> finished;
  std::vector<Fiber*> ready, spinning;
  size_t head = 0;  // of ready, in forward order
  uint64_t budget = 0;
  size_t idle = 0;  // switches that only spun, since a thread last got further
  uint32_t number = 0;
  std::string error;
  std::vector<uintptr_t> error_addresses;  // of code
};

namespace {

__thread Fiber* self;
__thread void* scheduler;  // its stack pointer, while fibers run
#if defined(__SANITIZE_ADDRESS__)
__thread const void* scheduler_stack;
__thread size_t scheduler_stack_bytes;
#endif
std::vector<Fiber*> pool;

__attribute__((format(printf, 1, 2))) std::string format(const char* text, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(line, sizeof line, text, arguments);
  va_end(arguments);
  return line;
}

std::string name_of(const Fiber* fiber) {
  const ThreadContext& c = fiber->context;
  return format("block %u thread %u", fiber->block->index, c.linear);
}

Fiber* pick(Grid* grid) {
  if (!grid->error.empty() || !grid->finished.empty() || grid->budget == 0) return nullptr;
  if (grid->idle > 1000 + 8 * grid->spinning.size()) return nullptr;
  --grid->budget;
  std::vector<Fiber*>& ready = grid->ready;
  if (grid->head == ready.size()) {
    ready.clear();
    grid->head = 0;
    ready.swap(grid->spinning);
    if (ready.empty()) return nullptr;
  }
  Fiber* fiber;
  if (grid->order == Order::kForward) {
    fiber = ready[grid->head++];
    if (grid->head >= 2048) {
      ready.erase(ready.begin(), ready.begin() + ptrdiff_t(grid->head));
      grid->head = 0;
    }
  } else {
    if (grid->order == Order::kRandom) std::swap(ready[grid->random() % ready.size()], ready.back());
    fiber = ready.back();
    ready.pop_back();
  }
  return fiber;
}

// From the scheduler (from == nullptr) or a fiber to a fiber or the scheduler. A fiber that exits never comes back.
void switch_to(Fiber* from, Fiber* to, bool exits) {
  self = to;
  context = to ? &to->context : nullptr;
  void* load = to ? to->stack_pointer : scheduler;
  void** save = from ? &from->stack_pointer : &scheduler;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(exits ? nullptr : &fake, to ? to->stack : scheduler_stack,
                                 to ? kStackBytes : scheduler_stack_bytes);
  simt_switch(save, load);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
  (void)exits;
  simt_switch(save, load);
#endif
}

void leave(bool exits = false) {
  Fiber* fiber = self;
  fiber->atomics = 0;
  Fiber* next = pick(fiber->block->grid);
  if (next != fiber) switch_to(fiber, next, exits);
}

void set_error(Grid* grid, const std::string& text, std::vector<uintptr_t> addresses) {
  if (!grid->error.empty()) return;
  grid->error = text;
  grid->error_addresses = std::move(addresses);
}

// Records the kernel's fault and gives the thread up for good.
void fail(const std::string& text) {
  set_error(self->block->grid, text, {});
  leave();
}

void wake(Fiber* fiber) {
  fiber->state = State::kReady;
  fiber->segment = 0;
  fiber->block->grid->ready.push_back(fiber);
}

void merge(Knowledge& into, const Knowledge& from);

void release_barrier(Block* block) {
  uint64_t result = 0;
  if (block->reduction == Reduction::kCount) result = block->votes;
  if (block->reduction == Reduction::kOr) result = block->votes != 0;
  if (block->reduction == Reduction::kAnd) result = block->votes == block->at_barrier;
  block->at_barrier = block->votes = 0;
  ++block->barriers;
  block->grid->idle = 0;
  if (kRace) {
    for (Warp& warp : block->warps) {
      merge(block->acquired, warp.acquired);
      warp.acquired.clear();
    }
  }
  for (Fiber* fiber : block->fibers) {
    if (fiber->state != State::kAtBarrier) continue;
    fiber->result = result;
    wake(fiber);
  }
}

// The participants learn of each other's accesses so far.
void join_clocks(Warp& warp, unsigned mask) {
  std::array<uint32_t, 32> all{};
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    for (unsigned i = 0; i < 32; ++i) all[i] = std::max(all[i], warp.clocks[lane][i]);
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    warp.clocks[lane] = all;
    ++warp.clocks[lane][lane];
  }
}

void finish_collective(Block* block, unsigned warp_index, size_t which) {
  Warp& warp = block->warps[warp_index];
  const OpenCollective open = warp.open[which];
  warp.open.erase(warp.open.begin() + ptrdiff_t(which));
  block->grid->idle = 0;
  const unsigned mask = open.arrived;
  if (kRace && (open.op == Collective::kSync || !config().strict_warp_order)) join_clocks(warp, mask);

  uint64_t all = open.op == Collective::kMin || open.op == Collective::kAnd ? ~uint64_t(0) : 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const uint64_t value = warp.values[lane];
    switch (open.op) {
      case Collective::kBallot:
        all |= value << lane;
        break;
      case Collective::kAdd:
        all += value;
        break;
      case Collective::kMin:
        all = std::min(all, value);
        break;
      case Collective::kMax:
        all = std::max(all, value);
        break;
      case Collective::kAnd:
        all &= value;
        break;
      case Collective::kOr:
        all |= value;
        break;
      case Collective::kXor:
        all ^= value;
        break;
      case Collective::kSync:
      case Collective::kShuffle:
      case Collective::kMatch:
        break;
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    Fiber* fiber = block->fibers[warp_index * 32 + lane];
    fiber->result = all;
    if (open.op == Collective::kShuffle) {
      const unsigned source = warp.sources[lane];
      // From a lane that takes no part, CUDA gives anything.
      fiber->result = mask >> source & 1 ? warp.values[source] : 0xDEADBEEFDEADBEEFull ^ block->grid->random();
    } else if (open.op == Collective::kMatch) {
      fiber->result = 0;
      for (unsigned i = 0; i < 32; ++i) {
        if (mask >> i & 1 && warp.values[i] == warp.values[lane]) fiber->result |= uint64_t(1) << i;
      }
    }
    wake(fiber);
  }
}

// A collective waits for the lanes of its mask that have not exited.
void finish_collectives(Block* block, unsigned warp_index) {
  Warp& warp = block->warps[warp_index];
  for (size_t i = 0; i < warp.open.size();) {
    if ((warp.open[i].mask & ~warp.exited) == warp.open[i].arrived) {
      finish_collective(block, warp_index, i);
    } else {
      ++i;
    }
  }
}

void run_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  Fiber* fiber = self;
  Block* block = fiber->block;
  block->grid->launch.body();
  if (!fiber->copies.empty()) fail(name_of(fiber) + " exits with asynchronous copies in flight");
  fiber->state = State::kExited;
  fiber->file = nullptr;
  block->grid->idle = 0;
  block->warps[fiber->context.warp].exited |= 1u << fiber->context.lane;
  if (--block->live == 0) {
    block->grid->finished.push_back(block);
  } else {
    finish_collectives(block, fiber->context.warp);
    if (block->at_barrier && block->at_barrier == block->live) release_barrier(block);
  }
  leave(true);
  std::abort();
}

Fiber* new_fiber() {
  if (pool.empty()) {
    constexpr size_t kCount = 32;
    char* memory = static_cast<char*>(mmap(nullptr, kCount * (kStackBytes + kPage), PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED) std::abort();
    for (size_t i = 0; i < kCount; ++i, memory += kStackBytes + kPage) {
      mprotect(memory, kPage, PROT_NONE);
      pool.push_back(new Fiber);
      pool.back()->stack = memory + kPage;
    }
  }
  Fiber* fiber = pool.back();
  pool.pop_back();
  return fiber;
}

// ---- The race detector: for each byte of tracked memory, the last write and the last reads.

// What one thread does between two synchronisations.
struct Segment {
  uint32_t block, thread, barriers, warp_clock;
};
struct BlockName {
  uint32_t launch, index;
};
struct LaunchName {
  std::string name;
  size_t stream;
  uint64_t sequence;
};
std::vector<Segment> segments(1);  // 0 stands for none
std::vector<BlockName> block_names;
std::vector<LaunchName> launch_names;
std::unordered_map<uintptr_t, Knowledge> published;  // by the address of the atomic

struct Region {
  const char* data;
  size_t bytes;
  std::string name;
  Cell* cells;
};
using Regions = std::vector<Region*>;  // sorted
std::mutex regions_mutex;              // of writers; the device's thread only reads, and frees what is retired
std::atomic<const Regions*> regions{new Regions};
// What the last access was to; until either may be freed.
__thread const Regions* last_table;
__thread const Region* last_region;
std::vector<const Regions*> retired_tables;
std::vector<Region*> retired_regions;
std::unordered_map<uintptr_t, uint32_t> code_numbers;
std::vector<uintptr_t> code_addresses(1);

// In Cell::read_at and write_at, above the number of the code address.
constexpr uint32_t kAtomic = 1u << 31;
// Readers that no synchronisation orders: of several blocks, warps of one block, lanes of one warp.
constexpr uint32_t kBlocks = 1u << 30, kWarps = 1u << 29, kLanes = 1u << 28;
constexpr uint32_t kFlags = kAtomic | kBlocks | kWarps | kLanes;

uint32_t add_block(Grid* grid, unsigned index) {
  block_names.push_back({grid->number, index});
  return uint32_t(block_names.size());
}

uint32_t add_launch(const std::string& name, const Place& place) {
  launch_names.push_back({name, place.stream, place.sequence});
  return uint32_t(launch_names.size());
}

const BlockName& name_of_block(uint32_t number) { return block_names[number - 1]; }

bool knows(const Knowledge& knowledge, const Segment& segment) {
  const auto found = knowledge.find({segment.block, segment.thread / 32});
  if (found != knowledge.end()) {
    const Release& release = found->second;
    if (segment.barriers < release.barriers) return true;
    if (segment.barriers == release.barriers && segment.warp_clock <= release.warp_clock[segment.thread % 32])
      return true;
  }
  // Another warp of the block may have published after a barrier.
  for (auto i = knowledge.lower_bound({segment.block, 0}); i != knowledge.end() && i->first.first == segment.block;
       ++i) {
    if (segment.barriers < i->second.barriers) return true;
  }
  return false;
}

bool is_before(const Segment& segment, const Fiber* fiber) {
  const Block* block = fiber->block;
  const Warp& warp = block->warps[fiber->context.warp];
  if (segment.block == block->number) {
    if (segment.barriers != block->barriers || segment.thread == fiber->context.linear) return true;
    if (segment.thread / 32 != fiber->context.warp) return false;
    return warp.clocks[fiber->context.lane][segment.thread % 32] >= segment.warp_clock;
  }
  const uint32_t launch = name_of_block(segment.block).launch;
  if (launch != block->grid->number) {
    if (!config().check_streams) return true;
    const LaunchName& other = launch_names[launch - 1];
    const Clock& before = block->grid->place.before;
    if (other.stream < before.size() && before[other.stream] >= other.sequence) return true;
  }
  if (warp.acquired.empty() && block->acquired.empty()) return false;
  return knows(warp.acquired, segment) || knows(block->acquired, segment);
}

uint32_t segment_of(Fiber* fiber) {
  if (fiber->segment == 0) {
    const Block* block = fiber->block;
    const ThreadContext& c = fiber->context;
    fiber->segment = uint32_t(segments.size());
    segments.push_back({block->number, c.linear, block->barriers, block->warps[c.warp].clocks[c.lane][c.lane]});
  }
  return fiber->segment;
}

uint32_t code_number(uintptr_t address) {
  uint32_t& number = code_numbers[address];
  if (number == 0) {
    number = uint32_t(code_addresses.size());
    code_addresses.push_back(address);
  }
  return number;
}

// Whether a reader is not before the fiber's write.
bool misses_reader(const Cell& cell, const Fiber* fiber) {
  const Segment& reader = segments[cell.read];
  const Block* block = fiber->block;
  const ThreadContext& c = fiber->context;
  if (!is_before(reader, fiber)) return true;
  const bool same_phase = reader.block == block->number && reader.barriers == block->barriers;
  if (cell.read_at & kWarps && same_phase) return true;
  if (cell.read_at & kLanes && same_phase && reader.thread == c.linear) {
    return block->warps[c.warp].clocks[c.lane][c.lane] == reader.warp_clock;
  }
  return cell.read_at & kBlocks && name_of_block(reader.block).launch == block->grid->number &&
         block->acquired.empty() && block->warps[c.warp].acquired.empty();
}

void note_read(Cell& cell, Fiber* fiber, uint32_t segment, uint32_t at) {
  uint32_t flags = 0;
  if (cell.read) {
    const Segment& last = segments[cell.read];
    const bool same_block = last.block == fiber->block->number;
    if (!is_before(last, fiber)) {
      if (at & kAtomic && !(cell.read_at & kAtomic)) return;  // the plain read says more
      flags = cell.read_at & (kBlocks | kWarps | kLanes);
      flags |= !same_block ? kBlocks : last.thread / 32 != fiber->context.warp ? kWarps : kLanes;
    } else {
      if (name_of_block(last.block).launch == fiber->block->grid->number) flags |= cell.read_at & kBlocks;
      if (same_block && last.barriers == fiber->block->barriers) flags |= cell.read_at & kWarps;
      if (cell.read == segment) flags |= cell.read_at & kLanes;
    }
  }
  cell.read = segment;
  cell.read_at = at | flags;
}

void report_race(Fiber* fiber, const char* kind, const std::string& where, uint32_t segment, uint32_t at,
                 uintptr_t address) {
  const Segment& other = segments[segment];
  const BlockName& block = name_of_block(other.block);
  set_error(fiber->block->grid,
            format("data race (%s) on %s: %s block %u thread %u at %%0, %s block %u thread %u at %%1", kind,
                   where.c_str(), fiber->block->grid->launch.name.c_str(), fiber->block->index, fiber->context.linear,
                   launch_names[block.launch - 1].name.c_str(), block.index, other.thread),
            {address, code_addresses[at & ~kFlags]});
  if (self) leave();  // else it is the device's own copy
}

void note_cells(Fiber* fiber, Cell* cells, size_t offset, size_t bytes, const std::string* name, bool write,
                bool atomic, uintptr_t address) {
  const uint32_t segment = segment_of(fiber);
  uint32_t at = 0;
  for (size_t i = offset; i < offset + bytes; ++i) {
    Cell& cell = cells[i];
    if (!atomic && (write ? cell.write == segment && cell.read == 0 && !(cell.write_at & kAtomic)
                          : cell.read == segment && !(cell.read_at & kAtomic))) {
      continue;
    }
    const auto where = [&] { return format("%s+%zu", name ? name->c_str() : "shared memory", i); };
    if (cell.write && !(atomic && cell.write_at & kAtomic) && !is_before(segments[cell.write], fiber)) {
      report_race(fiber, write ? "write after write" : "read after write", where(), cell.write, cell.write_at, address);
      return;
    }
    if (write && cell.read && !(atomic && cell.read_at & kAtomic) && misses_reader(cell, fiber)) {
      report_race(fiber, "write after read", where(), cell.read, cell.read_at, address);
      return;
    }
    if (at == 0) at = code_number(address) | (atomic ? kAtomic : 0);
    if (write) {
      cell = {segment, at, 0, 0};
    } else {
      note_read(cell, fiber, segment, at);
    }
  }
}

void note(Fiber* fiber, const void* data, size_t bytes, bool write, bool atomic, uintptr_t address) {
  Block* block = fiber->block;
  const char* begin = static_cast<const char*>(data);
  const size_t shared_offset = size_t(begin - block->shared);
  if (block->shared && shared_offset < block->shadow.size()) {
    bytes = std::min(bytes, block->shadow.size() - shared_offset);
    note_cells(fiber, block->shadow.data(), shared_offset, bytes, nullptr, write, atomic, address);
    return;
  }
  const Regions* now = regions.load(std::memory_order_acquire);
  if (now != last_table) last_region = nullptr;
  last_table = now;
  if (!last_region || size_t(begin - last_region->data) >= last_region->bytes) {
    size_t low = 0, high = now->size();
    while (low < high) {
      const size_t middle = (low + high) / 2;
      if ((*now)[middle]->data + (*now)[middle]->bytes <= begin) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low == now->size() || begin < (*now)[low]->data) return;
    last_region = (*now)[low];
  }
  const size_t offset = size_t(begin - last_region->data);
  note_cells(fiber, last_region->cells, offset, std::min(bytes, last_region->bytes - offset), &last_region->name, write,
             atomic, address);
}

void merge(Knowledge& into, const Knowledge& from) {
  for (const auto& [key, release] : from) {
    Release& mine = into[key];
    if (mine.barriers < release.barriers) {
      mine = release;
    } else if (mine.barriers == release.barriers) {
      for (unsigned i = 0; i < 32; ++i) mine.warp_clock[i] = std::max(mine.warp_clock[i], release.warp_clock[i]);
    }
  }
}

// An atomic access publishes what a fence before it has ordered, and takes over what others published there.
void synchronise(Fiber* fiber, const void* data, bool write) {
  Block* block = fiber->block;
  Warp& warp = block->warps[fiber->context.warp];
  if (!fiber->release && published.empty()) return;
  const uintptr_t key = reinterpret_cast<uintptr_t>(data);
  const auto found = published.find(key);
  if (found != published.end()) merge(warp.acquired, found->second);
  if (write && fiber->release) {
    Knowledge& knowledge = published[key];
    merge(knowledge, {{{block->number, fiber->context.warp}, *fiber->release}});
    merge(knowledge, warp.acquired);
    merge(knowledge, block->acquired);
  }
}

void note_here(const void* data, size_t bytes, bool write, bool atomic, void* return_address) {
  Fiber* fiber = self;
  if (!fiber) return;
  note(fiber, data, bytes, write, atomic, reinterpret_cast<uintptr_t>(return_address) - 1);
  if (atomic) synchronise(fiber, data, write);
}

void note_copy(const Copy& copy, void* return_address) {
  if (!kRace) return;
  note_here(copy.from, copy.bytes - copy.zero_fill, false, false, return_address);
  note_here(copy.to, copy.bytes, true, false, return_address);
}

// ---- Blocks.

void start_block(Grid* grid, Block* block) {
  const dim3 size = grid->launch.block, blocks = grid->launch.grid;
  const unsigned threads = size.x * size.y * size.z;
  const unsigned index = grid->blocks[grid->next_block++];
  block->grid = grid;
  block->index = index;
  block->live = threads;
  block->at_barrier = block->votes = block->barriers = 0;
  block->acquired.clear();
  // As large as the launch says: AddressSanitizer guards what lies behind.
  void* shared = nullptr;
  if (posix_memalign(&shared, 128, std::max<size_t>(grid->launch.shared_bytes, 1))) std::abort();
  block->shared = static_cast<char*>(shared);
  std::memset(shared, 0xCD, grid->launch.shared_bytes);
  block->warps.resize((threads + 31) / 32);
  for (size_t i = 0; i < block->warps.size(); ++i) {
    Warp& warp = block->warps[i];
    warp.open.clear();
    const size_t lanes = std::min<size_t>(threads - i * 32, 32);
    warp.exited = lanes == 32 ? 0 : ~0u << lanes;
    if (kRace) {
      warp.clocks.assign(32, {});
      for (unsigned lane = 0; lane < 32; ++lane) warp.clocks[lane][lane] = 1;
      warp.acquired.clear();
    }
  }
  if (kRace) {
    block->number = add_block(grid, index);
    block->shadow.assign(grid->launch.shared_bytes, {});
  }
  while (block->fibers.size() < threads) block->fibers.push_back(new_fiber());
  for (unsigned i = 0; i < threads; ++i) {
    Fiber* fiber = block->fibers[i];
    fiber->block = block;
    fiber->context = {{i % size.x, i / size.x % size.y, i / (size.x * size.y)},
                      {index % blocks.x, index / blocks.x % blocks.y, index / (blocks.x * blocks.y)},
                      size,
                      blocks,
                      i,
                      i % 32,
                      i / 32};
    fiber->copies.clear();
    fiber->copy_group = 0;
    fiber->file = nullptr;
    fiber->release.reset();
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(fiber->stack, kStackBytes);  // whoever had it before left without returning
#endif
    // Stacks that all end at the same place in a page would share a few cache sets.
    void** top = reinterpret_cast<void**>(fiber->stack + kStackBytes - (i * 5 % 60) * 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(run_fiber);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fiber->stack_pointer = top;
    wake(fiber);
  }
}

void free_block(Block* block) {
  free(block->shared);
  block->shared = nullptr;
}

// The line of the kernel: the innermost one of inlined code that is not an intrinsic's.
std::string symbolise(uintptr_t address) {
  extern const char start asm("__executable_start");
  // A program that is not tied to an address counts its own from 0.
  const uintptr_t base = reinterpret_cast<uintptr_t>(&start);
  const std::string command = format("addr2line -i -e /proc/%d/exe 0x%zx 2>/dev/null", int(getpid()),
                                     size_t(address - (base > 0x10000000 ? base : 0)));
  std::string found = format("code at %#zx", size_t(address));
  FILE* out = popen(command.c_str(), "r");
  if (!out) return found;
  char line[512];
  while (fgets(line, sizeof line, out)) {
    const std::string text(line, strcspn(line, " \n"));  // without the discriminator
    if (text.compare(0, 2, "??") == 0) continue;
    found = text;
    if (text.find("/simt.h:") == std::string::npos) break;
  }
  while (fgets(line, sizeof line, out)) {
  }
  pclose(out);
  return found;
}

// The error, with lines for addresses; not on a fiber's small stack.
std::string explain(const Grid* grid) {
  std::string text = grid->error;
  for (size_t i = 0; i < grid->error_addresses.size(); ++i) {
    const std::string mark = "%" + std::to_string(i);
    const uintptr_t address = grid->error_addresses[i];
    text.replace(text.find(mark), mark.size(), address ? symbolise(address) : "the device's own copy");
  }
  return text;
}

}  // namespace

// ---- What kernels call.

void* shared_memory(size_t bytes, size_t alignment, const char* file, int line) {
  const size_t have = self->block->grid->launch.shared_bytes;
  if (bytes > have) fail(format("%s:%d: %zu bytes of shared memory, launched with %zu", file, line, bytes, have));
  if (alignment > 128) fail(format("%s:%d: shared memory is aligned to 128 bytes, not %zu", file, line, alignment));
  return self->block->shared;
}

int barrier(Reduction reduction, bool predicate, const char* file, int line) {
  Fiber* fiber = self;
  Block* block = fiber->block;
  fiber->file = file;
  fiber->line = line;
  if (block->at_barrier == 0) {
    block->reduction = reduction;
    block->file = file;
    block->line = line;
  } else if (block->line != line || std::strcmp(block->file, file) != 0) {
    fail(format("barrier divergence: %s at %s:%d, others at %s:%d", name_of(fiber).c_str(), file, line, block->file,
                block->line));
  }
  block->votes += predicate;
  fiber->state = State::kAtBarrier;
  if (++block->at_barrier == block->live) release_barrier(block);
  leave();
  return int(fiber->result);
}

uint64_t collective(Collective op, unsigned mask, uint64_t value, unsigned source_lane, const char* file, int line) {
  Fiber* fiber = self;
  Block* block = fiber->block;
  const unsigned lane = fiber->context.lane;
  Warp& warp = block->warps[fiber->context.warp];
  fiber->file = file;
  fiber->line = line;
  if (!(mask >> lane & 1)) {
    fail(format("%s:%d: mask %08x lacks the lane that calls, %u (%s)", file, line, mask, lane, name_of(fiber).c_str()));
  }
  size_t which = warp.open.size();
  for (size_t i = 0; i < warp.open.size(); ++i) {
    const OpenCollective& open = warp.open[i];
    if (open.mask == mask) {
      which = i;
      if (open.op == op && open.line == line && std::strcmp(open.file, file) == 0) continue;
      fail(format("divergent warp collective: %s, lane %u at %s:%d, others at %s:%d", name_of(fiber).c_str(), lane,
                  file, line, open.file, open.line));
    } else if (open.arrived & mask && open.mask >> lane & 1) {
      // Each waits for the other.
      fail(format("%s:%d: mask %08x meets mask %08x at %s:%d (%s)", file, line, mask, open.mask, open.file, open.line,
                  name_of(fiber).c_str()));
    }
  }
  if (which == warp.open.size()) warp.open.push_back({mask, 0, op, file, line});
  warp.open[which].arrived |= 1u << lane;
  warp.values[lane] = value;
  warp.sources[lane] = source_lane;
  fiber->state = State::kAtCollective;
  finish_collectives(block, fiber->context.warp);
  leave();
  return fiber->result;
}

void spin(const char* file, int line) {
  Grid* grid = self->block->grid;
  self->file = file;
  self->line = line;
  grid->spinning.push_back(self);
  ++grid->idle;
  leave();
}

void async_copy(void* to, const void* from, size_t bytes, size_t zero_fill, const char* file, int line) {
  Fiber* fiber = self;
  Grid* grid = fiber->block->grid;
  const char* shared = fiber->block->shared;
  const ptrdiff_t offset = static_cast<char*>(to) - shared;
  if ((bytes != 4 && bytes != 8 && bytes != 16) || zero_fill > bytes || reinterpret_cast<uintptr_t>(to) % bytes ||
      reinterpret_cast<uintptr_t>(from) % bytes) {
    fail(format("%s:%d: asynchronous copy of %zu bytes, %zu of them zero, from %p to shared memory + %td: misaligned",
                file, line, bytes, zero_fill, from, offset));
  }
  if (offset < 0 || size_t(offset) + bytes > grid->launch.shared_bytes) {
    fail(format("%s:%d: asynchronous copy to shared memory + %td, of %zu bytes", file, line, offset,
                grid->launch.shared_bytes));
  }
  Copy copy{static_cast<char*>(to), static_cast<const char*>(from), bytes, zero_fill, fiber->copy_group, false};
  note_copy(copy, __builtin_return_address(0));
  const bool late = grid->order == Order::kReverse || (grid->order == Order::kRandom && grid->random() & 1);
  if (late) {
    std::memset(to, 0xA5, bytes);  // nobody may rely on what was there
  } else {
    std::memcpy(to, from, bytes - zero_fill);
    std::memset(copy.to + bytes - zero_fill, 0, zero_fill);
    copy.made = true;
  }
  fiber->copies.push_back(copy);
}

void async_commit() { ++self->copy_group; }

void async_wait(size_t prior) {
  Fiber* fiber = self;
  size_t done = 0;
  for (Copy& copy : fiber->copies) {
    if (copy.group + prior >= fiber->copy_group) break;
    if (!copy.made) {
      std::memcpy(copy.to, copy.from, copy.bytes - copy.zero_fill);
      std::memset(copy.to + copy.bytes - copy.zero_fill, 0, copy.zero_fill);
    }
    note_copy(copy, __builtin_return_address(0));  // the copy lasts from the issue to the wait
    ++done;
  }
  fiber->copies.erase(fiber->copies.begin(), fiber->copies.begin() + ptrdiff_t(done));
}

void before_atomic(const void* address, size_t bytes, void* code) {
  Fiber* fiber = self;
  Grid* grid = fiber->block->grid;
  if (++fiber->atomics >= 64) {
    grid->spinning.push_back(fiber);  // a loop that waits with atomics alone must let others run
    ++grid->idle;
    leave();
  } else if (grid->order == Order::kRandom && grid->random() % 4 == 0) {
    grid->ready.push_back(fiber);
    leave();
  }
  if (kRace) note_here(address, bytes, true, true, code);
}

void fence() {
  if (!kRace) return;
  Fiber* fiber = self;
  const Block* block = fiber->block;
  fiber->release = std::make_unique<Release>(
      Release{block->barriers, block->warps[fiber->context.warp].clocks[fiber->context.lane]});
}

void track(const void* data, size_t bytes, const char* name) {
  if (!kRace || bytes == 0) return;
  void* cells =
      mmap(nullptr, bytes * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (cells == MAP_FAILED) std::abort();
  Region* region = new Region{static_cast<const char*>(data), bytes, name, static_cast<Cell*>(cells)};
  const std::lock_guard<std::mutex> lock(regions_mutex);
  const Regions* old = regions.load();
  Regions* table = new Regions(*old);
  table->insert(std::upper_bound(table->begin(), table->end(), region,
                                 [](const Region* a, const Region* b) { return a->data < b->data; }),
                region);
  retired_tables.push_back(old);
  regions.store(table, std::memory_order_release);
}

void untrack(const void* data) {
  if (!kRace) return;
  const std::lock_guard<std::mutex> lock(regions_mutex);
  const Regions* old = regions.load();
  const auto found = std::find_if(old->begin(), old->end(), [data](const Region* r) { return r->data == data; });
  if (found == old->end()) return;
  Regions* table = new Regions(*old);
  table->erase(table->begin() + (found - old->begin()));
  retired_regions.push_back(*found);
  retired_tables.push_back(old);
  regions.store(table, std::memory_order_release);
}

// ---- What the device calls.

bool detects_races() { return kRace; }

void collect_untracked() {
  if (!kRace) return;
  const std::lock_guard<std::mutex> lock(regions_mutex);
  last_table = nullptr;
  for (const Regions* table : retired_tables) delete table;
  for (Region* region : retired_regions) {
    munmap(region->cells, region->bytes * sizeof(Cell));
    delete region;
  }
  retired_tables.clear();
  retired_regions.clear();
}

void forget_accesses() {
  if (!kRace) return;
  const std::lock_guard<std::mutex> lock(regions_mutex);
  for (const Region* region : *regions.load()) madvise(region->cells, region->bytes * sizeof(Cell), MADV_DONTNEED);
  segments.resize(1);
  block_names.clear();
  launch_names.clear();
  published.clear();
}

void check_access(const std::string& name, const Place& place, const void* data, size_t bytes, bool write) {
  if (!kRace || bytes == 0) return;
  Grid grid;
  grid.launch.name = name;
  grid.place = place;
  grid.number = add_launch(name, place);
  Block block;
  block.grid = &grid;
  block.number = add_block(&grid, 0);
  block.warps.resize(1);
  block.warps[0].clocks.assign(32, {});
  Fiber fiber;
  fiber.block = &block;
  fiber.context = {};
  note(&fiber, data, bytes, write, false, 0);
  if (!grid.error.empty()) throw Error{explain(&grid)};
}

Grid* start(Launch launch, const Place& place, uint64_t seed) {
  auto grid = std::make_unique<Grid>();
  grid->launch = std::move(launch);
  grid->place = place;
  grid->order = config().order;
  grid->random.state = (seed * 0x9E3779B97F4A7C15ull + 0x1234567) | 1;
  const dim3 size = grid->launch.grid;
  const size_t count = size_t(size.x) * size.y * size.z;
  grid->blocks.resize(count);
  for (size_t i = 0; i < count; ++i) grid->blocks[i] = unsigned(grid->order == Order::kReverse ? count - 1 - i : i);
  if (grid->order == Order::kRandom) std::shuffle(grid->blocks.begin(), grid->blocks.end(), grid->random);
  if (kRace) grid->number = add_launch(grid->launch.name, place);
  for (size_t i = 0; i < std::min<size_t>(std::max(config().resident_blocks, 1u), count); ++i) {
    grid->resident.push_back(std::make_unique<Block>());
    start_block(grid.get(), grid->resident.back().get());
  }
  return grid.release();
}

Progress advance(Grid* grid, uint64_t switches) {
#if defined(__SANITIZE_ADDRESS__)
  if (!scheduler_stack) {
    pthread_attr_t attributes;
    void* stack = nullptr;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &stack, &scheduler_stack_bytes);
    pthread_attr_destroy(&attributes);
    scheduler_stack = stack;
  }
#endif
  grid->budget = switches;
  for (;;) {
    for (Block* block : grid->finished) {
      free_block(block);
      if (grid->next_block < grid->blocks.size()) start_block(grid, block);
    }
    grid->finished.clear();
    if (std::none_of(grid->resident.begin(), grid->resident.end(), [](const auto& block) { return block->live; })) {
      return Progress::kDone;
    }
    Fiber* fiber = pick(grid);
    if (fiber) {
      switch_to(nullptr, fiber, false);
    } else if (grid->budget == 0) {
      return grid->idle == 0 ? Progress::kMore : Progress::kSpinning;
    } else if (grid->head < grid->ready.size() || !grid->spinning.empty()) {
      grid->idle = 1;
      return Progress::kSpinning;
    } else {
      throw Error{"deadlock in " + describe(grid)};
    }
    if (!grid->error.empty()) throw Error{explain(grid)};
  }
}

std::string describe(const Grid* grid) {
  std::map<std::string, std::pair<size_t, const Fiber*>> places;
  for (const auto& block : grid->resident) {
    for (const Fiber* fiber : block->fibers) {
      if (!block->live) continue;
      std::string place = fiber->state == State::kAtBarrier      ? "at the barrier"
                          : fiber->state == State::kAtCollective ? "at the warp collective"
                          : fiber->state == State::kExited       ? "exited"
                                                                 : "running, last seen";
      if (fiber->file) place += format(" %s:%d", fiber->file, fiber->line);
      auto& entry = places[place];
      if (!entry.first++) entry.second = fiber;
    }
  }
  std::string text = format("kernel %s <<<(%u, %u, %u), (%u, %u, %u)>>>:", grid->launch.name.c_str(),
                            grid->launch.grid.x, grid->launch.grid.y, grid->launch.grid.z, grid->launch.block.x,
                            grid->launch.block.y, grid->launch.block.z);
  for (const auto& [place, entry] : places) {
    text += format("\n  %zu threads %s, first %s", entry.first, place.c_str(), name_of(entry.second).c_str());
  }
  return text;
}

void destroy(Grid* grid) {
  for (const auto& block : grid->resident) {
    free_block(block.get());
    pool.insert(pool.end(), block->fibers.begin(), block->fibers.end());
  }
  delete grid;
}

}  // namespace simt

// ---- What `g++ -fsanitize=thread` calls for each access of a kernel; there is no ThreadSanitizer runtime here.
#ifdef SIMT_RACE

#define SIMT_NOTE(name, bytes, write, atomic) \
  void __tsan_##name(void* data) { simt::note_here(data, bytes, write, atomic, __builtin_return_address(0)); }
#define SIMT_NOTES(bytes)                                       \
  SIMT_NOTE(read##bytes, bytes, false, false)                   \
  SIMT_NOTE(write##bytes, bytes, true, false)                   \
  SIMT_NOTE(unaligned_read##bytes, bytes, false, false)         \
  SIMT_NOTE(unaligned_write##bytes, bytes, true, false)         \
  SIMT_NOTE(volatile_read##bytes, bytes, false, true)           \
  SIMT_NOTE(volatile_write##bytes, bytes, true, true)           \
  SIMT_NOTE(unaligned_volatile_read##bytes, bytes, false, true) \
  SIMT_NOTE(unaligned_volatile_write##bytes, bytes, true, true)

// Host code in the same file has atomics too.
#define SIMT_ATOMICS(bits)                                                                                            \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* p, int) {                                  \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                      \
  }                                                                                                                   \
  void __tsan_atomic##bits##_store(volatile uint##bits##_t* p, uint##bits##_t v, int) {                               \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                                         \
  }                                                                                                                   \
  uint##bits##_t __tsan_atomic##bits##_exchange(volatile uint##bits##_t* p, uint##bits##_t v, int) {                  \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                                               \
  }                                                                                                                   \
  uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile uint##bits##_t* p, uint##bits##_t v, int) {                 \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                                                \
  }                                                                                                                   \
  uint##bits##_t __tsan_atomic##bits##_fetch_sub(volatile uint##bits##_t* p, uint##bits##_t v, int) {                 \
    return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST);                                                                \
  }                                                                                                                   \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t* p, uint##bits##_t* old,                 \
                                                     uint##bits##_t v, int, int) {                                    \
    return __atomic_compare_exchange_n(p, old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                         \
  }                                                                                                                   \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile uint##bits##_t* p, uint##bits##_t* old, uint##bits##_t v, \
                                                   int, int) {                                                        \
    return __atomic_compare_exchange_n(p, old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                         \
  }

extern "C" {
SIMT_NOTES(1)
SIMT_NOTES(2)
SIMT_NOTES(4)
SIMT_NOTES(8)
SIMT_NOTES(16)
SIMT_ATOMICS(8)
SIMT_ATOMICS(32)
SIMT_ATOMICS(64)
void __tsan_read_range(void* data, size_t bytes) {
  simt::note_here(data, bytes, false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* data, size_t bytes) {
  simt::note_here(data, bytes, true, false, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
#endif
