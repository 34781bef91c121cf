// Encode -> exchange -> decode: the schedule under every zipped collective.
//
// Every rank has a part for every rank (in an all-gather it is the same part) and consumes the parts that the others
// have for it. A part travels in segments, each a message of its own in the wire format: while segment k is on the
// wire, segment k+1 is encoded and segment k-1 decoded, and work memory depends on the segment's size alone.
//
// A call begins with one small message to each peer that says what the sender is about to send. A peer that says
// something else than this rank expects is left out on both sides, the others are served, and the call then fails
// with a text that names both views: nothing hangs, and the next call finds nothing of this one on the wire.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/device.h"
#include "collectives/transport.h"

namespace zipccl {

enum class Collective : uint8_t { kAllGather = 0, kReduceScatter = 1, kAllToAll = 2 };
const char* name(Collective collective);

// What must be the same on all ranks of a group: part of the agreement at its start.
struct ExchangeOptions {
  bool code = true;                   // false: messages travel plain
  uint64_t min_bytes = 64 << 10;      // smaller parts travel plain
  uint64_t segment_bytes = 4 << 20;   // raw bytes that a rank sends to all peers in one segment
  double inline_fraction = 1.0 / 24;  // inline pool bytes per element
  bool checksum = false;
};

// What must be the same on all ranks of a call.
struct Call {
  Collective collective;
  uint64_t sequence;  // counts the calls of the group
  DType dtype;
  uint8_t operation = 0;  // c10d's ReduceOp of a reduce-scatter
};

struct Counters {
  uint64_t raw_bytes = 0;   // what this rank's sends would have been uncoded
  uint64_t wire_bytes = 0;  // what they were
  uint64_t elements = 0;    // coded elements, and
  uint64_t escapes = 0;     // how many bytes their exponents put into the escape pool
  uint64_t dynamic_bytes = 0;
  uint64_t messages = 0;        // segments sent
  uint64_t coded_messages = 0;  // those of them that were coded
  double encode_seconds = 0;
  double exchange_seconds = 0;  // waiting for peers and the wire
  double decode_seconds = 0;
  double total_seconds = 0;
  Counters& operator+=(const Counters& other);
};

// Work memory that lives as long as its group: the same few buffers serve every call.
class Workspace {
 public:
  enum Use { kHello, kSendStatic, kSendDynamic, kReceiveStatic, kReceiveDynamic, kAccumulator };
  explicit Workspace(Device& device) : device_(device) {}
  // At least `bytes` bytes for this use; what was there for the same use is lost when it has to grow.
  uint8_t* get(Use use, int peer, int slot, uint64_t bytes);

 private:
  struct Buffer {
    std::shared_ptr<uint8_t> memory;
    uint64_t bytes = 0;
  };
  Device& device_;
  std::map<std::tuple<Use, int, int>, Buffer> buffers_;
};

struct ExchangeContext {
  Device& device;
  Transport& transport;
  Workspace& workspace;
  const ExchangeOptions& options;
  std::chrono::steady_clock::time_point deadline;
  Counters& counters;
};

// Peers called with other arguments. The transport is still usable.
class MismatchError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Part {
  const void* data = nullptr;
  uint64_t elements = 0;
};

// Called for segment 0 of rank 0, of rank 1, ..., then segment 1 of rank 0, ...: `elements` values from `offset` on of
// what `source` has for this rank, in a message, or null for this rank's own part, which does not travel.
using Consume = std::function<void(int source, uint64_t offset, uint64_t elements, const Message* message)>;

// outgoing[r]: this rank's part for rank r. incoming[r]: elements of what rank r has for this rank.
// Throws TransportError, MismatchError, or FormatError for a message that cannot be decoded; in the last two cases
// after everything that other ranks wait for was sent.
void exchange(const ExchangeContext& context, const Call& call, const std::vector<Part>& outgoing,
              const std::vector<uint64_t>& incoming, float scale, const Consume& consume);

}  // namespace zipccl
