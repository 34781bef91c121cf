// The exchange on processor memory: while segment k is on the wire, segment k+1 is encoded and segment k-1 decoded.
//
// A call begins with a greeting to each peer that says what the sender is about to send. A peer that says something
// else than this rank expects is left out on both sides, the others are served, and the call then fails with a text
// that names both views: nothing hangs, and the next call finds nothing of this one on the wire.
//
// In an all-to-all, each pair of ranks goes on by itself, so that those who are there do not wait for one that is late,
// and nobody waits for a rank with which it exchanges nothing: its greeting is looked at in the next call with it.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <tuple>

#include "collectives/exchange.h"
#include "collectives/transport.h"

namespace zipccl {

// Work memory that lives as long as its group: the same few buffers serve every call.
class Workspace {
 public:
  enum Use { kSendStatic, kSendDynamic, kReceiveStatic, kReceiveDynamic, kAccumulator, kStage };
  // At least `bytes` bytes on a 128-byte boundary for this use; what was there for the same use is lost when it has to
  // grow.
  uint8_t* get(Use use, int peer, int slot, uint64_t bytes);

 private:
  struct Buffer {
    std::shared_ptr<uint8_t> memory;
    uint64_t bytes = 0;
  };
  std::map<std::tuple<Use, int, int>, Buffer> buffers_;
};

struct Greeting;

// What a group's calls on processor memory leave for the next ones.
struct HostState {
  explicit HostState(int size) : of_pairs(size), unanswered(size) {}
  Workspace workspace;
  Workspace of_shares;              // of the second phase of an all-reduce
  std::vector<Workspace> of_pairs;  // by peer: of pairs that go on by themselves
  // By peer: greetings of calls in which nothing was exchanged with it. To be destroyed before their transport.
  std::vector<std::list<std::shared_ptr<Greeting>>> unanswered;
};

// What the exchange needs of its surroundings; both may be null.
struct HostServices {
  // Opens a span of this name in a profiler's trace, which ends with the object.
  std::function<std::shared_ptr<void>(const char* name)> trace;
  // Runs all of them, each on a thread of its own, and returns when they are done. They do not throw.
  std::function<void(const std::vector<std::function<void()>>& tasks)> side_by_side;
};

// run() returns when the call is done. It throws TransportError, MismatchError, or FormatError for a message that
// cannot be decoded; in the last two cases after everything that other ranks wait for was sent. Outputs hold garbage
// then.
class HostExchange final : public Exchange {
 public:
  HostExchange(Transport& transport, HostState& state, const ExchangeOptions& options, const Hosts& hosts,
               std::chrono::steady_clock::time_point deadline, Counters& counters, const HostServices& services)
      : HostExchange(transport, state, state.workspace, options, hosts, deadline, counters, services) {}
  int rank() const override { return transport_.rank(); }
  int size() const override { return transport_.size(); }
  // Also from a call's own hooks.
  void run(const Call& call, const Parts& parts) override;
  bool run_with(const Call& call, const Parts& sums, const Call& next, const Parts& shares) override;
  void agree(const Call& call, const Parts& parts) override;
  uint64_t segments_in_flight() const override { return kSlots; }
  uint8_t* stage(int index, uint64_t bytes) override { return workspace_.get(Workspace::kStage, index, 0, bytes); }
  // Waits for the greetings that no call waited for: peers may still be about to read ours.
  void settle();

 private:
  friend class HostCall;
  HostExchange(Transport& transport, HostState& state, Workspace& workspace, const ExchangeOptions& options,
               const Hosts& hosts, std::chrono::steady_clock::time_point deadline, Counters& counters,
               const HostServices& services)
      : Exchange(options, hosts),
        transport_(transport),
        state_(state),
        workspace_(workspace),
        deadline_(deadline),
        counters_(counters),
        services_(services) {}
  // Counts the time of a call, but for those inside others.
  template <typename Action>
  void timed(const Action& action);
  void run_pairs(const Call& call, const Parts& parts);
  void add_pairs(const std::vector<Counters>& pairs);
  std::chrono::milliseconds time_left() const;  // until the deadline; at least one

  // While one segment is on the wire, others are encoded and decoded.
  static constexpr uint64_t kSlots = 3;
  // Pairs go on by themselves where there are not too many for a thread each, and enough bytes to be worth it.
  static constexpr size_t kMostThreads = 32;
  static constexpr uint64_t kWorthThreads = 256 << 10;

  Transport& transport_;
  HostState& state_;
  Workspace& workspace_;
  const std::chrono::steady_clock::time_point deadline_;
  Counters& counters_;
  const HostServices& services_;
  int depth_ = 0;  // of calls in each other's hooks
};

}  // namespace zipccl
