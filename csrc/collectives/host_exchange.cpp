#include "collectives/host_exchange.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <optional>

namespace zipccl {
namespace {

using Clock = std::chrono::steady_clock;

enum Tag { kHelloTag = 0, kStaticTag = 1, kDynamicTag = 2, kSizeTag = 3, kTags = 4 };

// What a sender tells each peer before anything else.
struct Hello {
  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  Collective collective = {};
  DType dtype = {};
  uint8_t operation = 0;
  uint8_t coded = 0;
  uint8_t phase = 0;
  Route route = {};
  uint32_t reserved = 0;
  uint64_t sequence = 0;
  uint64_t sends = 0;    // elements for the receiver of this hello
  uint64_t expects = 0;  // elements from it. With both, the two ends always find the same verdict.
  uint64_t segment_elements = 0;
  uint64_t inline_bytes = 0;  // of all segments of the longer part
};
static_assert(sizeof(Hello) == 56);

const char* name(DType dtype) {
  return dtype == DType::kBFloat16 ? "bfloat16" : dtype == DType::kFloat32 ? "float32" : "bytes";
}

std::string describe(const Hello& hello) {
  std::string text = std::string(name(hello.collective)) + " (its call " + std::to_string(hello.sequence) + ") with " +
                     std::to_string(hello.sends) + " " + name(hello.dtype) + " to send and " +
                     std::to_string(hello.expects) + " to receive";
  if (hello.collective == Collective::kReduceScatter || hello.collective == Collective::kAllReduce) {
    text += ", ReduceOp " + std::to_string(hello.operation);
  }
  if (hello.phase == kFailedPhase) text += ", but without its part of the result, as it failed";
  if (hello.route == Route::kHierarchical) text += ", over the hierarchy of hosts";
  text += hello.coded ? ", coded" : ", plain";
  text += " in segments of " + std::to_string(hello.segment_elements);
  if (hello.coded) text += " with " + std::to_string(hello.inline_bytes) + " bytes for escapes";
  return text;
}

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), start_(Clock::now()) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  double& seconds_;
  Clock::time_point start_;
};

}  // namespace

// What two ranks tell each other of a call, and what this one expects to hear.
struct Greeting {
  Hello mine, theirs, expected;
  std::unique_ptr<Posted> sent, received;
};

class HostCall {
 public:
  HostCall(HostExchange& exchange, const Call& call, const Parts& parts)
      : exchange_(exchange),
        call_(call),
        parts_(parts),
        rank_(exchange.rank()),
        members_(exchange.members(parts)),
        order_(exchange.hosts().order(members_)),
        two_phase_(exchange.options_.two_phase),
        first_tag_((call.phase & 1) * kTags),
        // Both ends of a pair cut alike, whether it goes on by itself or not.
        segments_(exchange.options_, call,
                  call.collective == Collective::kAllToAll ? exchange.size() : members_.size()),
        count_(segments_.count(parts)),
        matched_(exchange.size(), true) {
    const auto own = std::find(members_.begin(), members_.end(), rank_);
    receivers_.assign(own + 1, members_.end());
    receivers_.insert(receivers_.end(), members_.begin(), own);
    senders_.assign(receivers_.rbegin(), receivers_.rend());
    for (uint64_t slot = 0; slot < kSlots; slot++) {
      encodings_[slot].resize(exchange.size());
      incoming_[slot].resize(exchange.size());
    }
  }

  void agree() {
    post_greetings();
    check_greetings();
    flush();
    raise();
  }

  // Greets a rank with which nothing is exchanged. Whether it agrees is found in a later call.
  void greet_only(int peer) {
    answer_earlier(peer, kUnanswered);
    exchange_.state_.unanswered[peer].push_back(greet(peer));
    if (!mismatches_.empty()) throw MismatchError(mismatches_);
  }

  // Waits for all but so many of the greetings that calls with nothing to exchange have left.
  void answer_earlier(int peer, size_t but) {
    auto& earlier = exchange_.state_.unanswered[peer];
    while (earlier.size() > but) {
      is_answered(peer, *earlier.front());
      wait(earlier.front()->sent, "sending to", peer);
      earlier.pop_front();
    }
  }

  void run() {
    begin();
    for (uint64_t k = 0; k < steps(); k++) step(k);
    flush();
    raise();
  }

  // As run(), and then `shares`, the all-gather of what this reduce-scatter results in, of as many segments; but each
  // of these moves as soon as its sums are there. Its greetings come behind the last sums and tell whether all are
  // right.
  void run_with(HostCall& shares) {
    Call failed = shares.call_;
    failed.phase = kFailedPhase;
    begin();
    shares.matched_ = matched_;
    shares.post_first_receives();
    std::optional<HostCall> verdict;
    for (uint64_t k = 0; k < steps() + kLag; k++) {
      if (k < steps()) step(k);
      if (k + 1 == steps()) {
        const bool right = !error_ && mismatches_.empty();
        verdict.emplace(exchange_, right ? shares.call_ : failed, shares.parts_).post_greetings();
      }
      if (k >= kLag) shares.step(k - kLag);
    }
    flush();
    shares.flush();
    verdict->check_greetings();
    verdict->flush();
    raise();
    shares.raise();
    verdict->raise();
  }

 private:
  static constexpr uint64_t kSlots = HostExchange::kSlots;
  static constexpr uint64_t kLag = kSlots - 1;  // steps until what was sent is consumed
  static constexpr size_t kUnanswered = 64;     // greetings that may be open at once

  void begin() {
    if (!parts_.agreed) post_greetings();
    if (count_ > 0) encode_segment(0);  // hides the greetings' round trip
    check_greetings();
    post_first_receives();
  }

  void post_first_receives() {
    for (uint64_t k = 0; k < std::min(kSlots, count_); k++) post_receives(k);
  }

  uint64_t steps() const { return count_ + kLag; }

  // A dynamic part, of which only the static one tells, moves while the next segment is encoded.
  void step(uint64_t k) {
    if (k < count_) {
      if (k >= encoded_) encode_segment(k);
      send_segment(k);
    }
    if (k >= 1 && k - 1 < count_) receive_statics(k - 1);
    if (k >= kLag) {
      consume_segment(k - kLag);
      if (k + 1 < count_) post_receives(k + 1);
    }
  }

  void flush() {
    for (uint64_t slot = 0; slot < kSlots; slot++) finish_sends(slot);
    for (auto& [peer, greeting] : greetings_) wait(greeting->sent, "sending to", peer);
  }

  void raise() {
    if (error_) std::rethrow_exception(error_);
    if (!mismatches_.empty()) throw MismatchError(mismatches_);
  }

  // A segment ready to be sent.
  struct Encoding {
    uint64_t elements = 0;
    uint8_t* statics = nullptr;
    uint64_t static_size = 0;
    uint8_t* dynamic = nullptr;
    Encoded encoded;
    uint64_t size = 0;  // of both together
  };

  // A message that arrives: its static part, and then its dynamic part, is posted; with one phase its size, and then
  // all of it.
  struct Incoming {
    std::unique_ptr<Posted> posted;
    Message message{};
    uint64_t size = 0;
    bool dynamic = false;  // is what is posted
  };

  std::shared_ptr<void> span(const char* name) const {
    return exchange_.services_.trace ? exchange_.services_.trace(name) : nullptr;
  }

  void wait(std::unique_ptr<Posted>& posted, const char* what, int peer, bool dynamic = false) {
    if (!posted) return;
    double unused = 0;
    const Stopwatch stopwatch(exchange_.counters_.exchange_seconds);
    const Stopwatch dynamic_stopwatch(dynamic ? exchange_.counters_.dynamic_seconds : unused);
    const auto traced = span(dynamic ? "zipccl:dynamic" : "zipccl:static");
    try {
      posted->wait(exchange_.time_left());
    } catch (const std::exception& error) {
      throw TransportError(std::string(what) + " rank " + std::to_string(peer) +
                           " failed; is it alive, and did it make the same call with the same sizes? " + error.what());
    }
    posted.reset();
  }

  Hello hello(uint64_t sends, uint64_t expects) const {
    Hello hello;
    hello.collective = call_.collective;
    hello.dtype = call_.dtype;
    hello.operation = call_.operation;
    hello.phase = call_.phase;
    hello.route = call_.route;
    hello.coded = segments_.coded(sends);
    hello.sequence = call_.sequence;
    hello.sends = sends;
    hello.expects = expects;
    hello.segment_elements = segments_.elements();
    const uint64_t longest = std::max(sends, expects);
    for (uint64_t k = 0; hello.coded && segments_.elements(longest, k) != 0; k++) {
      hello.inline_bytes += segments_.inline_bytes(k, segments_.elements(longest, k));
    }
    return hello;
  }

  std::unique_ptr<Greeting> greet(int peer) {
    auto greeting = std::make_unique<Greeting>();
    const uint64_t sends = parts_.outgoing[peer].elements, expects = parts_.incoming[peer];
    greeting->mine = hello(sends, expects);
    greeting->expected = hello(expects, sends);
    greeting->received = exchange_.transport_.receive(peer, kHelloTag, &greeting->theirs, sizeof(Hello));
    greeting->sent = exchange_.transport_.send(peer, kHelloTag, &greeting->mine, sizeof(Hello));
    exchange_.counters_.wire_bytes += sizeof(Hello);
    if (exchange_.is_local(peer)) exchange_.counters_.local_bytes += sizeof(Hello);
    return greeting;
  }

  void post_greetings() {
    for (int peer : receivers_) greetings_.emplace_back(peer, greet(peer));
  }

  void check_greetings() {
    for (auto& [peer, greeting] : greetings_) {
      answer_earlier(peer, 0);
      matched_[peer] = is_answered(peer, *greeting);
    }
  }

  // Whether the peer says what this rank expects.
  bool is_answered(int peer, Greeting& greeting) {
    wait(greeting.received, "hearing from", peer);
    const Hello &theirs = greeting.theirs, &expected = greeting.expected;
    if (std::memcmp(&theirs, &expected, sizeof theirs) == 0) return true;
    mismatches_ += (mismatches_.empty() ? "" : "; ") + std::string("rank ") + std::to_string(peer) + " calls ";
    if (theirs.magic != kMagic || theirs.version != kVersion) {
      mismatches_ += "something that is not version " + std::to_string(kVersion) + " of zipccl's exchange";
    } else {
      mismatches_ += describe(theirs);
    }
    mismatches_ += ", but rank " + std::to_string(rank_) + " expects of it " + describe(expected);
    return false;
  }

  void encode_segment(uint64_t k) {
    const int slot = static_cast<int>(k % kSlots);
    finish_sends(slot);
    encoded_ = k + 1;
    produce(k);
    const Stopwatch stopwatch(exchange_.counters_.encode_seconds);
    const auto traced = span("zipccl:encode");
    int first = -1;
    for (int peer : receivers_) {
      const Part& part = parts_.outgoing[peer];
      Encoding& encoding = encodings_[slot][peer];
      encoding = {};
      encoding.elements = segments_.elements(part.elements, k);
      if (encoding.elements == 0) continue;
      if (parts_.same && first >= 0) {
        encoding = encodings_[slot][first];
        continue;
      }
      first = peer;
      EncodeOptions options;
      options.plain = !segments_.coded(part.elements);
      options.checksum = exchange_.options_.checksum;
      options.scale = parts_.reduce.scale;
      if (part.windows != nullptr) options.windows = part.windows + k * segments_.elements() / kChunkElements;
      const uint64_t pool = segments_.inline_bytes(k, encoding.elements);
      const uint64_t dynamic = options.plain ? 0 : dynamic_bound(encoding.elements, call_.dtype, pool);
      Workspace& workspace = exchange_.workspace_;
      encoding.static_size = segments_.static_size(part.elements, k);
      if (two_phase_) {
        encoding.statics = workspace.get(Workspace::kSendStatic, peer, slot, encoding.static_size);
        encoding.dynamic = workspace.get(Workspace::kSendDynamic, peer, slot, dynamic);
      } else {
        encoding.statics = workspace.get(Workspace::kSendStatic, peer, slot, encoding.static_size + dynamic);
        encoding.dynamic = encoding.statics + encoding.static_size;
      }
      const uint8_t* data = parts_.source(peer, k, k * segments_.elements(), call_.dtype);
      encoding.encoded =
          encode(data, encoding.elements, call_.dtype, options, pool, encoding.statics, encoding.dynamic);
      encoding.size = encoding.static_size + encoding.encoded.dynamic_bytes;
    }
  }

  void send_segment(uint64_t k) {
    const int slot = static_cast<int>(k % kSlots);
    for (int peer : receivers_) {
      const Encoding& encoding = encodings_[slot][peer];
      if (encoding.elements == 0 || !matched_[peer]) continue;
      const bool coded = segments_.coded(parts_.outgoing[peer].elements);
      const uint64_t dynamic_size = encoding.encoded.dynamic_bytes;
      const auto send = [&](Tag tag, const void* data, uint64_t bytes) {
        sends_[slot].emplace_back(peer, exchange_.transport_.send(peer, first_tag_ + tag, data, bytes));
      };
      Counters& counters = exchange_.counters_;
      if (two_phase_ || !coded) {
        send(kStaticTag, encoding.statics, encoding.static_size);
        if (dynamic_size != 0) send(kDynamicTag, encoding.dynamic, dynamic_size);
      } else {
        send(kSizeTag, &encoding.size, sizeof encoding.size);
        send(kStaticTag, encoding.statics, encoding.size);
        counters.wire_bytes += sizeof encoding.size;
      }
      counters.messages++;
      counters.raw_bytes += encoding.elements * element_bytes(call_.dtype);
      counters.wire_bytes += encoding.static_size + dynamic_size;
      if (exchange_.is_local(peer)) counters.local_bytes += encoding.static_size + dynamic_size;
      counters.dynamic_bytes += dynamic_size;
      counters.sampled_chunks += encoding.encoded.sampled_chunks;
      if (coded) {
        counters.coded_messages++;
        counters.elements += encoding.elements;
        counters.escapes += encoding.encoded.escapes;
      }
    }
  }

  void finish_sends(int slot) {
    for (auto& [peer, posted] : sends_[slot]) wait(posted, "sending to", peer);
    sends_[slot].clear();
  }

  void post_receives(uint64_t k) {
    const int slot = static_cast<int>(k % kSlots);
    for (int peer : senders_) {
      const uint64_t elements = segments_.elements(parts_.incoming[peer], k);
      if (elements == 0 || !matched_[peer]) continue;
      Incoming& incoming = incoming_[slot][peer];
      incoming.dynamic = false;
      if (!two_phase_ && segments_.coded(parts_.incoming[peer])) {
        incoming.posted =
            exchange_.transport_.receive(peer, first_tag_ + kSizeTag, &incoming.size, sizeof incoming.size);
        continue;
      }
      const uint64_t bytes = segments_.static_size(parts_.incoming[peer], k);
      uint8_t* memory = exchange_.workspace_.get(Workspace::kReceiveStatic, peer, slot, bytes);
      incoming.posted = exchange_.transport_.receive(peer, first_tag_ + kStaticTag, memory, bytes);
    }
  }

  void receive_statics(uint64_t k) {
    for (int peer : senders_) {
      const uint64_t elements = segments_.elements(parts_.incoming[peer], k);
      if (elements == 0 || !matched_[peer]) continue;
      if (two_phase_ || !segments_.coded(parts_.incoming[peer])) {
        receive_static(peer, k, elements);
      } else {
        receive_size(peer, k, elements);
      }
    }
  }

  void consume_segment(uint64_t k) {
    const int slot = static_cast<int>(k % kSlots);
    host_sum_ = total_ = nullptr;
    for (const auto& run : order_) {
      for (int source : run) {
        const uint64_t elements = segments_.elements(parts_.incoming[source], k);
        if (elements == 0 || !matched_[source]) continue;
        if (source == rank_) {
          guarded(source, [&] { consume(source, k, elements, nullptr); });
          continue;
        }
        Incoming& incoming = incoming_[slot][source];
        wait(incoming.posted, "receiving from", source, incoming.dynamic);
        if (!two_phase_ && segments_.coded(parts_.incoming[source])) {
          read_announced(source, elements, incoming.message);
          if (incoming.message.static_size + incoming.message.dynamic_size != incoming.size) {
            corrupted(source, "it has another size than was announced");
          }
        }
        guarded(source, [&] { consume(source, k, elements, &incoming.message); });
      }
      if (parts_.outputs.empty()) end_of_host(k);
    }
    const uint64_t offset = k * segments_.elements();
    if (parts_.outputs.empty() && total_ != nullptr && !error_) {
      Stopwatch stopwatch(exchange_.counters_.decode_seconds);
      finish(total_, segments_.elements(parts_.incoming[rank_], k), parts_.reduce.divisor, parts_.output_dtype,
             at_offset(parts_.output, offset, parts_.output_dtype));
    }
    if (!parts_.deliver) return;
    try {
      parts_.deliver(offset, segments_.elements(), error_ || !mismatches_.empty());
    } catch (const MismatchError&) {
      if (mismatches_.empty()) remember_error();
    } catch (const FormatError&) {
      remember_error();
    }
  }

  // What cannot be produced must not be taken for a result, and the peers, which wait for it, cannot be told but by the
  // connections' end.
  void produce(uint64_t k) {
    if (!parts_.produce) return;
    try {
      parts_.produce(k, k * segments_.elements(), segments_.elements());
    } catch (const MismatchError& error) {
      throw TransportError(error.what());
    } catch (const FormatError& error) {
      throw TransportError(error.what());
    }
  }

  void remember_error() {
    if (!error_) error_ = std::current_exception();
  }

  // Posts the receive of a message whose size has come.
  void receive_size(int source, uint64_t k, uint64_t elements) {
    const int slot = static_cast<int>(k % kSlots);
    Incoming& incoming = incoming_[slot][source];
    wait(incoming.posted, "receiving from", source);
    Message& message = incoming.message;
    message = {};
    message.static_size = segments_.static_size(parts_.incoming[source], k);
    const uint64_t dynamic = dynamic_bound(elements, call_.dtype, segments_.inline_bytes(k, elements));
    if (incoming.size < message.static_size || incoming.size - message.static_size > dynamic) {
      corrupted(source, "an impossible size of " + std::to_string(incoming.size) + " bytes was announced");
    }
    uint8_t* memory = exchange_.workspace_.get(Workspace::kReceiveStatic, source, slot, message.static_size + dynamic);
    message.statics = memory;
    message.dynamic = memory + message.static_size;
    incoming.posted = exchange_.transport_.receive(source, first_tag_ + kStaticTag, memory, incoming.size);
  }

  // How much follows such a message is unknown, so nothing after it can be received.
  [[noreturn]] static void corrupted(int source, const std::string& what) {
    throw TransportError("rank " + std::to_string(source) + " sent a corrupted message: " + what);
  }

  // Reads from the header of the announced message how long its dynamic part is.
  void read_announced(int source, uint64_t elements, Message& message) const {
    try {
      const MessageHeader header = read_header(message.statics, message.static_size);
      if (header.elements != elements || header.dtype != call_.dtype) {
        throw FormatError("the header is of another message than was announced");
      }
      if ((header.flags & kPlain) != 0) return;
      message.dynamic_size = dynamic_bytes(header.pool_bytes, header.inline_bytes, header.low_bytes);
    } catch (const FormatError& error) {
      corrupted(source, error.what());
    }
  }

  // Reads from the static part whether a dynamic part follows, which then takes its place as what is posted.
  void receive_static(int source, uint64_t k, uint64_t elements) {
    const int slot = static_cast<int>(k % kSlots);
    auto& [posted, message, size, dynamic] = incoming_[slot][source];
    wait(posted, "receiving from", source);
    message = {};
    message.static_size = segments_.static_size(parts_.incoming[source], k);
    message.statics = exchange_.workspace_.get(Workspace::kReceiveStatic, source, slot, message.static_size);
    read_announced(source, elements, message);
    if (message.dynamic_size == 0) return;
    uint8_t* memory = exchange_.workspace_.get(Workspace::kReceiveDynamic, source, slot, message.dynamic_size);
    posted = exchange_.transport_.receive(source, first_tag_ + kDynamicTag, memory, message.dynamic_size);
    dynamic = true;
    message.dynamic = memory;
  }

  // A message that cannot be decoded must not keep the other ranks from what they wait for: it is reported at the end.
  template <typename Function>
  void guarded(int source, Function function) {
    const Stopwatch stopwatch(exchange_.counters_.decode_seconds);
    const auto traced = span("zipccl:decode");
    if (error_) return;
    try {
      function();
    } catch (const FormatError& error) {
      error_ = std::make_exception_ptr(
          FormatError("rank " + std::to_string(source) + " sent a corrupted message: " + error.what()));
    }
  }

  // `elements` values of segment k of what `source` has for this rank, in a message, or null for this rank's own part.
  void consume(int source, uint64_t k, uint64_t elements, const Message* message) {
    const DType dtype = call_.dtype;
    const uint64_t offset = k * segments_.elements();
    const uint8_t* own = parts_.source(rank_, k, offset, dtype);
    if (!parts_.outputs.empty()) {
      uint8_t* output = at_offset(parts_.outputs[source], offset, dtype);
      if (message) {
        decode(*message, elements, dtype, output);
      } else if (own != output) {
        std::memcpy(output, own, elements * element_bytes(dtype));
      }
      return;
    }
    // Ranks that called with other arguments are left out, so that the host's first need not be the first.
    Reduction reduction = parts_.reduce.reduction;
    if (host_sum_ == nullptr) {
      reduction = Reduction::kStore;
      host_sum_ = accumulator(total_ == nullptr ? 0 : 1, elements);
    }
    if (message) {
      accumulate(*message, elements, dtype, reduction, host_sum_);
    } else {
      accumulate_values(own, elements, dtype, parts_.reduce.scale, reduction, host_sum_);
    }
  }

  float* accumulator(int which, uint64_t elements) {
    return reinterpret_cast<float*>(
        exchange_.workspace_.get(Workspace::kAccumulator, 0, which, elements * sizeof(float)));
  }

  void end_of_host(uint64_t k) {
    if (host_sum_ == nullptr) return;
    if (total_ == nullptr) {
      total_ = host_sum_;
    } else {
      Stopwatch stopwatch(exchange_.counters_.decode_seconds);
      accumulate_values(host_sum_, segments_.elements(parts_.incoming[rank_], k), DType::kFloat32, 1.0f,
                        parts_.reduce.reduction, total_);
    }
    host_sum_ = nullptr;
  }

  HostExchange& exchange_;
  const Call& call_;
  const Parts& parts_;
  const int rank_;
  const std::vector<int> members_;
  const std::vector<std::vector<int>> order_;
  const bool two_phase_;
  // Of its messages: those of the second phase of an all-reduce go between those of the first.
  const int first_tag_;
  // The peers, each rank's in another order, so that not all turn to one.
  std::vector<int> receivers_, senders_;
  const Segments segments_;
  const uint64_t count_;  // of segments
  uint64_t encoded_ = 0;
  // Of the segment that is consumed: what the host's ranks, and what all hosts before have contributed.
  float* host_sum_ = nullptr;
  float* total_ = nullptr;
  std::vector<bool> matched_;
  std::string mismatches_;
  std::exception_ptr error_;

  using PeerPosted = std::pair<int, std::unique_ptr<Posted>>;
  std::vector<std::pair<int, std::unique_ptr<Greeting>>> greetings_;
  std::vector<Encoding> encodings_[kSlots];
  std::vector<PeerPosted> sends_[kSlots];
  std::vector<Incoming> incoming_[kSlots];
};

uint8_t* Workspace::get(Use use, int peer, int slot, uint64_t bytes) {
  Buffer& buffer = buffers_[{use, peer, slot}];
  if (buffer.bytes < bytes) {
    const std::align_val_t alignment{kAlignment};
    buffer = {};
    buffer.memory = {static_cast<uint8_t*>(::operator new(bytes, alignment)),
                     [alignment](uint8_t* memory) { ::operator delete(memory, alignment); }};
    buffer.bytes = bytes;
  }
  return buffer.memory.get();
}

template <typename Action>
void HostExchange::timed(const Action& action) {
  double inner = 0;
  const Stopwatch total(depth_ == 0 ? counters_.total_seconds : inner);
  depth_++;
  try {
    action();
  } catch (...) {
    depth_--;
    throw;
  }
  depth_--;
}

void HostExchange::run(const Call& call, const Parts& parts) {
  timed([&] {
    if (call.collective == Collective::kAllToAll) {
      run_pairs(call, parts);
    } else {
      HostCall(*this, call, parts).run();
    }
  });
}

bool HostExchange::run_with(const Call& call, const Parts& sums, const Call& next, const Parts& shares) {
  timed([&] {
    HostExchange second(transport_, state_, state_.of_shares, options_, hosts_, deadline_, counters_, services_);
    HostCall share(second, next, shares);
    HostCall(*this, call, sums).run_with(share);
  });
  return true;
}

void HostExchange::run_pairs(const Call& call, const Parts& parts) {
  const int own = rank();
  Parts others = parts;
  others.outgoing[own].elements = others.incoming[own] = 0;
  std::vector<int> peers;
  uint64_t elements = 0;
  std::string mismatches;
  // What a peer calls otherwise must not keep the others from theirs: it is reported at the end.
  const auto noting = [&mismatches](const auto& action) {
    try {
      action();
    } catch (const MismatchError& mismatch) {
      mismatches += (mismatches.empty() ? "" : "; ") + std::string(mismatch.what());
    }
  };
  for (int peer = 0; peer < size(); peer++) {
    if (peer == own) continue;
    const uint64_t exchanged = parts.outgoing[peer].elements + parts.incoming[peer];
    elements += exchanged;
    if (exchanged != 0) {
      peers.push_back(peer);
      continue;
    }
    noting([&] { HostCall(*this, call, others).greet_only(peer); });
  }
  const Part& kept = parts.outgoing[own];
  if (kept.elements != 0 && kept.data != parts.outputs[own]) {
    std::memcpy(parts.outputs[own], kept.data, kept.elements * element_bytes(call.dtype));
  }

  std::exception_ptr failure;
  if (peers.size() > 1 && peers.size() <= kMostThreads && elements * element_bytes(call.dtype) >= kWorthThreads &&
      services_.side_by_side) {
    std::vector<Counters> counters(peers.size());
    std::vector<std::exception_ptr> failures(peers.size());
    std::vector<std::function<void()>> tasks;
    for (size_t i = 0; i < peers.size(); i++) {
      tasks.emplace_back([&, i] {
        try {
          Parts pair = others;
          pair.members = {std::min(own, peers[i]), std::max(own, peers[i])};
          HostExchange exchange(transport_, state_, state_.of_pairs[peers[i]], options_, hosts_, deadline_, counters[i],
                                services_);
          const Stopwatch total(counters[i].total_seconds);
          HostCall(exchange, call, pair).run();
        } catch (...) {
          failures[i] = std::current_exception();
        }
      });
    }
    services_.side_by_side(tasks);
    add_pairs(counters);
    // What ends the connections comes first, then what is wrong with a message.
    for (const auto& one : failures) {
      if (!one) continue;
      try {
        noting([&] { std::rethrow_exception(one); });
      } catch (const FormatError&) {
        if (!failure) failure = one;
      }
    }
  } else if (!peers.empty()) {
    others.members = peers;
    others.members.insert(std::lower_bound(peers.begin(), peers.end(), own) - peers.begin() + others.members.begin(),
                          own);
    noting([&] { HostCall(*this, call, others).run(); });
  }
  if (failure) std::rethrow_exception(failure);
  if (!mismatches.empty()) throw MismatchError(mismatches);
}

// Bytes of all pairs; the seconds of the one that took longest, as they went side by side.
void HostExchange::add_pairs(const std::vector<Counters>& pairs) {
  const Counters* longest = &pairs[0];
  for (const Counters& pair : pairs) {
    if (pair.total_seconds > longest->total_seconds) longest = &pair;
  }
  for (const Counters& pair : pairs) {
    Counters added = pair;
    if (&pair != longest) {
      added.encode_seconds = added.exchange_seconds = added.dynamic_seconds = added.decode_seconds = 0;
    }
    added.total_seconds = 0;  // run() counts it
    counters_ += added;
  }
}

void HostExchange::agree(const Call& call, const Parts& parts) { HostCall(*this, call, parts).agree(); }

std::chrono::milliseconds HostExchange::time_left() const {
  return std::max(std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - Clock::now()),
                  std::chrono::milliseconds(1));
}

void HostExchange::settle() {
  for (int peer = 0; peer < size(); peer++) {
    for (auto& greeting : state_.unanswered[peer]) {
      greeting->received->wait(time_left());
      greeting->sent->wait(time_left());
    }
    state_.unanswered[peer].clear();
  }
}

}  // namespace zipccl
