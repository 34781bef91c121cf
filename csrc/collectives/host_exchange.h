// The exchange on processor memory: while segment k is on the wire, segment k+1 is encoded and segment k-1 decoded.
//
// A call begins with one small message to each peer that says what the sender is about to send. A peer that says
// something else than this rank expects is left out on both sides, the others are served, and the call then fails
// with a text that names both views: nothing hangs, and the next call finds nothing of this one on the wire.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <tuple>

#include "collectives/exchange.h"
#include "collectives/transport.h"

namespace zipccl {

// Work memory that lives as long as its group: the same few buffers serve every call.
class Workspace {
 public:
  enum Use { kHello, kSendStatic, kSendDynamic, kReceiveStatic, kReceiveDynamic, kAccumulator, kStage };
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

// run() returns when the call is done. It throws TransportError, MismatchError, or FormatError for a message that
// cannot be decoded; in the last two cases after everything that other ranks wait for was sent. Outputs hold garbage
// then.
class HostExchange final : public Exchange {
 public:
  HostExchange(Transport& transport, Workspace& workspace, const ExchangeOptions& options, const Hosts& hosts,
               std::chrono::steady_clock::time_point deadline, Counters& counters)
      : Exchange(options, hosts),
        transport_(transport),
        workspace_(workspace),
        deadline_(deadline),
        counters_(counters) {}
  int rank() const override { return transport_.rank(); }
  int size() const override { return transport_.size(); }
  // Also from a call's own hooks.
  void run(const Call& call, const Parts& parts) override;
  void agree(const Call& call, const Parts& parts) override;
  uint64_t segments_in_flight() const override { return kSlots; }
  uint8_t* stage(int index, uint64_t bytes) override { return workspace_.get(Workspace::kStage, index, 0, bytes); }

 private:
  friend class HostCall;
  // While one segment is on the wire, others are encoded and decoded.
  static constexpr uint64_t kSlots = 3;

  Transport& transport_;
  Workspace& workspace_;
  const std::chrono::steady_clock::time_point deadline_;
  Counters& counters_;
  int depth_ = 0;  // of calls in each other's hooks
};

}  // namespace zipccl
