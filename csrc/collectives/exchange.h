// Encode -> exchange -> decode: what every zipped collective is made of.
//
// Every rank has a part for every rank (in an all-gather it is the same part) and consumes the parts that the others
// have for it. A part travels in segments, each a message of its own in the wire format, so that work memory depends on
// the segment's size alone. Which messages there are, and how long their static parts are, is said here, once; how they
// get from rank to rank differs: HostExchange (host_exchange.h) works on processor memory with posted sends and
// receives, StreamExchange (cuda/stream_exchange.h) on GPU memory in stream order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "collectives/hosts.h"

namespace zipccl {

enum class Collective : uint8_t { kAllGather = 0, kReduceScatter = 1, kAllToAll = 2, kAllReduce = 3 };
const char* name(Collective collective);
// The way of a call from rank to rank.
enum class Route : uint8_t {
  kNative = 0,        // the wrapped backend's own collective
  kRaw = 1,           // the exchange, uncoded
  kZip = 2,           // the exchange, coded
  kHierarchical = 3,  // inside each host uncoded, between hosts coded
};
constexpr int kRoutes = 4;
const char* name(Route route);
// What an error of call `sequence` of a group says.
std::string failure_text(Collective collective, uint64_t sequence, const std::string& group, int rank,
                         const std::string& what);

// What must be the same on all ranks of a group: part of the agreement at its start.
struct ExchangeOptions {
  uint64_t min_bytes = 64 << 10;      // smaller parts travel plain
  uint64_t segment_bytes = 1 << 20;   // raw bytes that a rank sends to all peers in one segment
  double inline_fraction = 1.0 / 24;  // inline pool bytes per element
  bool checksum = false;
  // A coded message's static part, whose size is known, goes at once, and its dynamic part, if it has one, follows.
  // Else its size goes first, and then all of it. (Of processor memory; a stream cannot wait for sizes.)
  bool two_phase = true;
};

// What must be the same on all ranks of a call.
struct Call {
  Collective collective;
  uint64_t sequence;  // counts the calls of the group
  DType dtype;
  uint8_t operation = 0;  // c10d's ReduceOp of a reduction
  uint8_t phase = 0;      // of a call that exchanges more than once
  Route route = Route::kZip;
  // What all ranks have agreed that no chunk's escapes exceed, one a chunk of a part; null: unknown. Their inline pools
  // are just as long. More escapes than that travel as any that find no room.
  std::shared_ptr<const std::vector<uint32_t>> escapes = nullptr;
};

// Of what ranks tell each other around messages: greetings, and in which order what is sent.
constexpr int kExchangeVersion = 2;

// The phase of a rank that has nothing to contribute, because an earlier phase failed: its peers, which expect another,
// fail too.
constexpr uint8_t kFailedPhase = 0xff;

// Peers called with other arguments, or sent what cannot be used. The transport is still usable.
class MismatchError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Counters {
  uint64_t raw_bytes = 0;    // what this rank's sends would have been uncoded
  uint64_t wire_bytes = 0;   // what they were
  uint64_t local_bytes = 0;  // those of them that went to ranks of the same host
  uint64_t elements = 0;     // coded elements, and
  uint64_t escapes = 0;      // how many bytes their exponents put into the escape pool
  uint64_t dynamic_bytes = 0;
  uint64_t sampled_chunks = 0;
  uint64_t messages = 0;        // segments sent
  uint64_t coded_messages = 0;  // those of them that were coded
  double encode_seconds = 0;
  double exchange_seconds = 0;  // waiting for peers and the wire,
  double dynamic_seconds = 0;   //   of it for dynamic parts
  double decode_seconds = 0;
  double total_seconds = 0;
  Counters& operator+=(const Counters& other);
};

struct Part {
  const void* data = nullptr;
  uint64_t elements = 0;
  const int16_t* windows = nullptr;  // as EncodeOptions::windows, in processor memory
};

// Element `elements` of `data`; null stays null.
inline uint8_t* at_offset(void* data, uint64_t elements, DType dtype) {
  return data == nullptr ? nullptr : static_cast<uint8_t*>(data) + elements * element_bytes(dtype);
}
inline const uint8_t* at_offset(const void* data, uint64_t elements, DType dtype) {
  return at_offset(const_cast<void*>(data), elements, dtype);
}

// How contributions become a result: each is multiplied by its own rank's `scale`, accumulated in fp32 by `reduction`
// (kSum, kMin or kMax) in the order of `Hosts`, divided by `divisor` and rounded once to the dtype.
struct Reduce {
  Reduction reduction = Reduction::kSum;
  float scale = 1.0f;
  float divisor = 1.0f;
  // On a hierarchical route, the sums of each host's bf16 values travel as bf16: one more rounding a host.
  bool bf16_partial_sums = false;
};

// What one rank has for all, expects of all, and does with it.
struct Parts {
  std::vector<Part> outgoing;      // for rank r; the own rank's does not travel
  std::vector<uint64_t> incoming;  // elements of what rank r has for this rank
  bool same = false;               // all of `outgoing` are one part
  // Rank r's part goes to outputs[r], or, where there are none, all are reduced into `output`.
  std::vector<void*> outputs;
  Reduce reduce;
  void* output = nullptr;
  DType output_dtype = DType::kBytes;  // of a reduction

  // The ranks that take part, ascending; empty: all. The others have no elements.
  std::vector<int> members;
  // The members have found by agree() that they make the same call.
  bool agreed = false;
  // Elements of the longest part among all ranks that must go through as many segments; 0: of this rank's.
  uint64_t longest = 0;
  // Makes elements [offset, offset + count) of all outgoing parts, which are segment k, before they are needed.
  // outgoing[r].data then holds `stages` segments, one every `stage_elements`, and segment k is the (k % stages)-th.
  std::function<void(uint64_t k, uint64_t offset, uint64_t count)> produce;
  uint64_t stages = 1;  // as many as are in flight
  uint64_t stage_elements = 0;
  // Called when these elements of all outputs are there; `failed`: some of them are not what they should be.
  std::function<void(uint64_t offset, uint64_t count, bool failed)> deliver;

  // Elements of the own part from segment k on, which has this offset.
  const uint8_t* source(int rank, uint64_t k, uint64_t offset, DType dtype) const {
    return at_offset(outgoing[rank].data, produce ? k % stages * stage_elements : offset, dtype);
  }
};

// The messages of a call: pure functions of what both ends of a pair know.
class Segments {
 public:
  // `members`: how many ranks take part.
  Segments(const ExchangeOptions& options, const Call& call, size_t members)
      : options_(options), dtype_(call.dtype), code_(call.route != Route::kRaw), escapes_(call.escapes) {
    const uint64_t peers = std::max<uint64_t>(members, 2) - 1;
    const uint64_t bytes = std::max(kLeastBytes, options_.segment_bytes / peers);
    elements_ = std::max<uint64_t>(bytes / element_bytes(dtype_) / kChunkElements, 1) * kChunkElements;
  }
  // Of a full segment.
  uint64_t elements() const { return elements_; }
  uint64_t count(const Parts& parts) const {
    uint64_t most = parts.longest;
    for (const Part& part : parts.outgoing) most = std::max(most, part.elements);
    for (uint64_t elements : parts.incoming) most = std::max(most, elements);
    return (most + elements_ - 1) / elements_;
  }
  // Elements of segment k of a part; 0 past its end.
  uint64_t elements(uint64_t part_elements, uint64_t k) const {
    const uint64_t offset = k * elements_;
    return offset < part_elements ? std::min(elements_, part_elements - offset) : 0;
  }
  bool coded(uint64_t part_elements) const {
    return code_ && dtype_ != DType::kBytes && part_elements * element_bytes(dtype_) >= options_.min_bytes;
  }
  // Of segment k, which has so many elements.
  uint64_t inline_bytes(uint64_t k, uint64_t segment_elements) const {
    const uint64_t first = k * elements_ / kChunkElements, chunks = chunk_count(segment_elements);
    auto wanted = static_cast<uint64_t>(static_cast<double>(segment_elements) * options_.inline_fraction);
    if (escapes_ != nullptr && first + chunks <= escapes_->size()) {
      const auto begin = escapes_->begin() + static_cast<int64_t>(first);
      wanted = std::accumulate(begin, begin + static_cast<int64_t>(chunks), uint64_t{0});
    }
    return std::min(round_up(wanted, kAlignment), pool_bound(segment_elements));
  }
  uint64_t static_size(uint64_t part_elements, uint64_t k) const {
    const uint64_t segment_elements = elements(part_elements, k);
    return coded(part_elements) ? static_bytes(segment_elements, inline_bytes(k, segment_elements))
                                : plain_bytes(segment_elements, dtype_);
  }
  // Of all segments of a part.
  uint64_t largest_static_size(uint64_t part_elements) const {
    uint64_t largest = 0;
    for (uint64_t k = 0; elements(part_elements, k) != 0; k++)
      largest = std::max(largest, static_size(part_elements, k));
    return largest;
  }

 private:
  // A segment for one peer is not cut smaller than this, however many peers there are.
  static constexpr uint64_t kLeastBytes = 128 << 10;

  const ExchangeOptions& options_;
  const DType dtype_;
  const bool code_;
  const std::shared_ptr<const std::vector<uint32_t>> escapes_;
  uint64_t elements_;
};

class Exchange {
 public:
  explicit Exchange(const ExchangeOptions& options, const Hosts& hosts) : options_(options), hosts_(hosts) {}
  virtual ~Exchange() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  const Hosts& hosts() const { return hosts_; }
  // The ranks that take part.
  std::vector<int> members(const Parts& parts) const { return parts.members.empty() ? hosts_.all() : parts.members; }
  // Whether what goes to this rank stays on the host.
  bool is_local(int peer) const { return hosts_.of(peer) == hosts_.of(rank()); }
  virtual void run(const Call& call, const Parts& parts) = 0;
  // Runs a reduce-scatter and, as `next`, the all-gather of its results, segment by segment; false: it cannot.
  virtual bool run_with(const Call&, const Parts& /*sums*/, const Call& /*next*/, const Parts& /*shares*/) {
    return false;
  }
  // Throws MismatchError where a peer calls something else, if run() would. Nothing but that is exchanged.
  virtual void agree(const Call& call, const Parts& parts) = 0;
  virtual uint64_t segments_in_flight() const = 0;
  // Work memory of this call; another request with this index may release what the one before got.
  virtual uint8_t* stage(int index, uint64_t bytes) = 0;
  // Elements of a full segment of an exchange of so many ranks.
  uint64_t segment_elements(const Call& call, size_t members) const {
    return Segments(options_, call, members).elements();
  }

 protected:
  const ExchangeOptions& options_;
  const Hosts& hosts_;
};

}  // namespace zipccl
