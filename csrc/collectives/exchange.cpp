#include "collectives/exchange.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace zipccl {
namespace {

using Clock = std::chrono::steady_clock;

enum Tag { kHelloTag = 0, kStaticTag = 1, kDynamicTag = 2 };

// One segment is encoded while the one before is on the wire.
constexpr int kSlots = 2;
// A segment for one peer is not cut smaller than this, however many peers there are.
constexpr uint64_t kLeastSegmentBytes = 128 << 10;

// What a sender tells each peer before anything else.
struct Hello {
  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  Collective collective = {};
  DType dtype = {};
  uint8_t operation = 0;
  uint8_t coded = 0;
  uint16_t reserved0 = 0;
  uint32_t reserved1 = 0;
  uint64_t sequence = 0;
  uint64_t sends = 0;    // elements for the receiver of this hello
  uint64_t expects = 0;  // elements from it. With both, the two ends always find the same verdict.
  uint64_t segment_elements = 0;
  uint64_t inline_bytes = 0;  // of a full segment
};
static_assert(sizeof(Hello) == 56);

const char* name(DType dtype) {
  return dtype == DType::kBFloat16 ? "bfloat16" : dtype == DType::kFloat32 ? "float32" : "bytes";
}

std::string describe(const Hello& hello) {
  std::string text = std::string(name(hello.collective)) + " (its call " + std::to_string(hello.sequence) + ") with " +
                     std::to_string(hello.sends) + " " + name(hello.dtype) + " to send and " +
                     std::to_string(hello.expects) + " to receive";
  if (hello.collective == Collective::kReduceScatter) text += ", ReduceOp " + std::to_string(hello.operation);
  return text + (hello.coded ? ", coded" : ", plain") + " in segments of " + std::to_string(hello.segment_elements);
}

class Stopwatch {
 public:
  explicit Stopwatch(double& seconds) : seconds_(seconds), start_(Clock::now()) {}
  ~Stopwatch() { seconds_ += std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  double& seconds_;
  Clock::time_point start_;
};

class Exchange {
 public:
  Exchange(const ExchangeContext& context, const Call& call, const std::vector<Part>& outgoing,
           const std::vector<uint64_t>& incoming, float scale, const Consume& consume)
      : context_(context),
        call_(call),
        outgoing_(outgoing),
        incoming_(incoming),
        scale_(scale),
        consume_(consume),
        rank_(context.transport.rank()),
        size_(context.transport.size()),
        matched_(size_, true) {
    const uint64_t peers = std::max(size_ - 1, 1);
    const uint64_t bytes = std::max(kLeastSegmentBytes, context_.options.segment_bytes / peers);
    segment_elements_ = std::max<uint64_t>(bytes / element_bytes(call_.dtype) / kChunkElements, 1) * kChunkElements;
    // In an all-gather every peer gets the same part: encode it once.
    same_ = call_.collective == Collective::kAllGather;
    for (int slot = 0; slot < kSlots; slot++) {
      encodings_[slot].resize(size_);
      receives_[slot].resize(size_);
    }
  }

  void run() {
    Stopwatch total(context_.counters.total_seconds);
    uint64_t most = 0;
    for (int r = 0; r < size_; r++) most = std::max({most, outgoing_[r].elements, incoming_[r]});
    const uint64_t segments = (most + segment_elements_ - 1) / segment_elements_;

    post_hellos();
    if (segments > 0) encode_segment(0);  // hides the hellos' round trip
    check_hellos();
    for (uint64_t k = 0; k < std::min<uint64_t>(kSlots, segments); k++) post_receives(k);
    for (uint64_t k = 0; k < segments + kSlots - 1; k++) {
      if (k < segments) {
        if (k > 0) encode_segment(k);
        send_segment(k);
      }
      if (k >= kSlots - 1) {
        consume_segment(k - (kSlots - 1));
        if (k + 1 < segments) post_receives(k + 1);
      }
    }
    for (int slot = 0; slot < kSlots; slot++) finish_sends(slot);
    for (auto& [peer, posted] : hello_sends_) wait(posted, "sending to", peer);
    if (!mismatches_.empty()) throw MismatchError(mismatches_);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  // A segment ready to be sent.
  struct Encoding {
    uint64_t elements = 0;
    uint8_t* statics = nullptr;
    uint64_t static_size = 0;
    uint8_t* dynamic = nullptr;
    Encoded encoded;
  };

  // Both ends of a pair know the part's size, so both know whether it is coded.
  bool coded(uint64_t part_elements) const {
    return context_.options.code && call_.dtype != DType::kBytes &&
           part_elements * element_bytes(call_.dtype) >= context_.options.min_bytes;
  }
  uint64_t inline_bytes(uint64_t elements) const {
    const auto wanted = static_cast<uint64_t>(static_cast<double>(elements) * context_.options.inline_fraction);
    return std::min(round_up(wanted, kAlignment), pool_bound(elements));
  }
  uint64_t static_size(uint64_t part_elements, uint64_t segment_elements) const {
    return coded(part_elements) ? static_bytes(segment_elements, inline_bytes(segment_elements))
                                : plain_bytes(segment_elements, call_.dtype);
  }
  // Elements of segment k of a part; 0 past its end.
  uint64_t segment_size(uint64_t part_elements, uint64_t k) const {
    const uint64_t offset = k * segment_elements_;
    return offset < part_elements ? std::min(segment_elements_, part_elements - offset) : 0;
  }

  void wait(std::unique_ptr<Posted>& posted, const char* what, int peer) {
    if (!posted) return;
    Stopwatch stopwatch(context_.counters.exchange_seconds);
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(context_.deadline - Clock::now());
    try {
      posted->wait(std::max(left, std::chrono::milliseconds(1)));
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
    hello.coded = coded(sends);
    hello.sequence = call_.sequence;
    hello.sends = sends;
    hello.expects = expects;
    hello.segment_elements = segment_elements_;
    hello.inline_bytes = inline_bytes(segment_elements_);
    return hello;
  }

  void post_hellos() {
    for (int step = 1; step < size_; step++) {
      const int peer = (rank_ + step) % size_;
      uint8_t* in = context_.workspace.get(Workspace::kHello, peer, 0, sizeof(Hello));
      hello_receives_.emplace_back(peer, context_.transport.receive(peer, kHelloTag, in, sizeof(Hello)));
      uint8_t* out = context_.workspace.get(Workspace::kHello, peer, 1, sizeof(Hello));
      const Hello mine = hello(outgoing_[peer].elements, incoming_[peer]);
      std::memcpy(out, &mine, sizeof mine);
      hello_sends_.emplace_back(peer, context_.transport.send(peer, kHelloTag, out, sizeof(Hello)));
      context_.counters.wire_bytes += sizeof(Hello);
    }
  }

  void check_hellos() {
    for (auto& [peer, posted] : hello_receives_) {
      wait(posted, "hearing from", peer);
      Hello theirs;
      std::memcpy(&theirs, context_.workspace.get(Workspace::kHello, peer, 0, sizeof(Hello)), sizeof theirs);
      const Hello expected = hello(incoming_[peer], outgoing_[peer].elements);
      if (std::memcmp(&theirs, &expected, sizeof theirs) == 0) continue;
      matched_[peer] = false;
      mismatches_ += (mismatches_.empty() ? "" : "; ") + std::string("rank ") + std::to_string(peer) + " calls ";
      if (theirs.magic != kMagic || theirs.version != kVersion) {
        mismatches_ += "something that is not version " + std::to_string(kVersion) + " of zipccl's exchange";
      } else {
        mismatches_ += describe(theirs);
      }
      mismatches_ += ", but rank " + std::to_string(rank_) + " expects of it " + describe(expected);
    }
  }

  void encode_segment(uint64_t k) {
    const int slot = static_cast<int>(k % kSlots);
    finish_sends(slot);
    Stopwatch stopwatch(context_.counters.encode_seconds);
    int first = -1;
    for (int step = 1; step < size_; step++) {
      const int peer = (rank_ + step) % size_;
      const Part& part = outgoing_[peer];
      Encoding& encoding = encodings_[slot][peer];
      encoding = {};
      encoding.elements = segment_size(part.elements, k);
      if (encoding.elements == 0) continue;
      if (same_ && first >= 0) {
        encoding = encodings_[slot][first];
        continue;
      }
      first = peer;
      EncodeOptions options;
      options.plain = !coded(part.elements);
      options.checksum = context_.options.checksum;
      options.scale = scale_;
      const uint64_t pool = inline_bytes(encoding.elements);
      const uint64_t dynamic = options.plain ? 0 : dynamic_bound(encoding.elements, call_.dtype, pool);
      encoding.static_size = static_size(part.elements, encoding.elements);
      encoding.statics = context_.workspace.get(Workspace::kSendStatic, peer, slot, encoding.static_size);
      encoding.dynamic = context_.workspace.get(Workspace::kSendDynamic, peer, slot, dynamic);
      const auto* data = static_cast<const uint8_t*>(part.data) + k * segment_elements_ * element_bytes(call_.dtype);
      encoding.encoded = context_.device.encode(data, encoding.elements, call_.dtype, options, pool, encoding.statics,
                                                encoding.dynamic);
    }
  }

  void send_segment(uint64_t k) {
    const int slot = static_cast<int>(k % kSlots);
    for (int step = 1; step < size_; step++) {
      const int peer = (rank_ + step) % size_;
      const Encoding& encoding = encodings_[slot][peer];
      if (encoding.elements == 0 || !matched_[peer]) continue;
      sends_[slot].emplace_back(peer,
                                context_.transport.send(peer, kStaticTag, encoding.statics, encoding.static_size));
      const uint64_t dynamic_size = encoding.encoded.dynamic_bytes;
      if (dynamic_size != 0) {
        sends_[slot].emplace_back(peer, context_.transport.send(peer, kDynamicTag, encoding.dynamic, dynamic_size));
      }
      Counters& counters = context_.counters;
      counters.messages++;
      counters.raw_bytes += encoding.elements * element_bytes(call_.dtype);
      counters.wire_bytes += encoding.static_size + dynamic_size;
      counters.dynamic_bytes += dynamic_size;
      if (coded(outgoing_[peer].elements)) {
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
    for (int step = 1; step < size_; step++) {
      const int peer = (rank_ + size_ - step) % size_;
      const uint64_t elements = segment_size(incoming_[peer], k);
      if (elements == 0 || !matched_[peer]) continue;
      const uint64_t bytes = static_size(incoming_[peer], elements);
      uint8_t* memory = context_.workspace.get(Workspace::kReceiveStatic, peer, slot, bytes);
      receives_[slot][peer] = context_.transport.receive(peer, kStaticTag, memory, bytes);
    }
  }

  void consume_segment(uint64_t k) {
    const int slot = static_cast<int>(k % kSlots);
    for (int source = 0; source < size_; source++) {
      const uint64_t elements = segment_size(incoming_[source], k);
      if (elements == 0 || !matched_[source]) continue;
      const uint64_t offset = k * segment_elements_;
      if (source == rank_) {
        guarded(source, [&] { consume_(source, offset, elements, nullptr); });
        continue;
      }
      wait(receives_[slot][source], "receiving from", source);
      const Message message = receive_message(source, slot, elements);
      guarded(source, [&] { consume_(source, offset, elements, &message); });
    }
  }

  // The static part is here: reads from it whether a dynamic part follows, and waits for that.
  Message receive_message(int source, int slot, uint64_t elements) {
    Message message{};
    message.static_size = static_size(incoming_[source], elements);
    message.statics = context_.workspace.get(Workspace::kReceiveStatic, source, slot, message.static_size);
    MessageHeader header;
    try {
      header = read_header(message.statics, message.static_size);
      if (header.elements != elements || header.dtype != call_.dtype) {
        throw FormatError("the header is of another message than was announced");
      }
    } catch (const FormatError& error) {
      // How much follows is unknown, so nothing after it can be received.
      throw TransportError("rank " + std::to_string(source) + " sent a corrupted message: " + error.what());
    }
    if ((header.flags & kPlain) == 0) {
      message.dynamic_size = dynamic_bytes(header.pool_bytes, header.inline_bytes, header.low_bytes);
    }
    if (message.dynamic_size == 0) return message;
    uint8_t* memory = context_.workspace.get(Workspace::kReceiveDynamic, source, 0, message.dynamic_size);
    auto posted = context_.transport.receive(source, kDynamicTag, memory, message.dynamic_size);
    wait(posted, "receiving from", source);
    message.dynamic = memory;
    return message;
  }

  // A message that cannot be decoded must not keep the other ranks from what they wait for: it is reported at the end.
  template <typename Function>
  void guarded(int source, Function function) {
    Stopwatch stopwatch(context_.counters.decode_seconds);
    if (error_) return;
    try {
      function();
    } catch (const FormatError& error) {
      error_ = std::make_exception_ptr(
          FormatError("rank " + std::to_string(source) + " sent a corrupted message: " + error.what()));
    }
  }

  const ExchangeContext& context_;
  const Call& call_;
  const std::vector<Part>& outgoing_;
  const std::vector<uint64_t>& incoming_;
  const float scale_;
  const Consume& consume_;
  const int rank_;
  const int size_;
  uint64_t segment_elements_;
  bool same_;
  std::vector<bool> matched_;
  std::string mismatches_;
  std::exception_ptr error_;

  using PeerPosted = std::pair<int, std::unique_ptr<Posted>>;
  std::vector<PeerPosted> hello_sends_;
  std::vector<PeerPosted> hello_receives_;
  std::vector<Encoding> encodings_[kSlots];
  std::vector<PeerPosted> sends_[kSlots];
  std::vector<std::unique_ptr<Posted>> receives_[kSlots];
};

}  // namespace

const char* name(Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllToAll:
      return "all_to_all";
  }
  return "unknown collective";
}

Counters& Counters::operator+=(const Counters& other) {
  raw_bytes += other.raw_bytes;
  wire_bytes += other.wire_bytes;
  elements += other.elements;
  escapes += other.escapes;
  dynamic_bytes += other.dynamic_bytes;
  messages += other.messages;
  coded_messages += other.coded_messages;
  encode_seconds += other.encode_seconds;
  exchange_seconds += other.exchange_seconds;
  decode_seconds += other.decode_seconds;
  total_seconds += other.total_seconds;
  return *this;
}

uint8_t* Workspace::get(Use use, int peer, int slot, uint64_t bytes) {
  Buffer& buffer = buffers_[{use, peer, slot}];
  if (buffer.bytes < bytes) {
    buffer = {};
    buffer = {device_.allocate(bytes), bytes};
  }
  return buffer.memory.get();
}

void exchange(const ExchangeContext& context, const Call& call, const std::vector<Part>& outgoing,
              const std::vector<uint64_t>& incoming, float scale, const Consume& consume) {
  Exchange(context, call, outgoing, incoming, scale, consume).run();
}

}  // namespace zipccl
