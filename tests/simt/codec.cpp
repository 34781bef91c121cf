// The GPU codec on the emulator, against the CPU codec: what one encodes the other decodes, bit for bit.
// Usage: codec SCHEDULE SET..., where a set is a name below and SCHEDULE as for simt::configure. Says what differs and
// exits with 1.
#include "codec/codec.h"

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "codec/cuda/batch.h"
#include "runtime.h"

using namespace zipccl;

namespace {

std::string current;
int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  std::printf("%s: %s\n", current.c_str(), what.c_str());
  failures++;
}

// Device memory of exactly this size, `offset` bytes behind a 128-byte boundary.
class Buffer {
 public:
  explicit Buffer(uint64_t bytes, uint64_t offset = 0) : bytes_(bytes) {
    cudaMalloc(&memory_, bytes + offset);
    data_ = static_cast<uint8_t*>(memory_) + offset;
    if (bytes != 0) std::memset(data_, 0xee, bytes);
  }
  ~Buffer() { cudaFree(memory_); }
  Buffer(const Buffer&) = delete;
  uint8_t* data() { return data_; }
  uint64_t bytes() const { return bytes_; }
  void fill(const void* from, uint64_t bytes) {
    if (bytes != 0) std::memcpy(data_, from, bytes);
  }

 private:
  void* memory_ = nullptr;
  uint8_t* data_;
  uint64_t bytes_;
};
using BufferPtr = std::unique_ptr<Buffer>;

BufferPtr buffer(uint64_t bytes, uint64_t offset = 0) { return std::make_unique<Buffer>(bytes, offset); }

uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Values by kind, as bytes.
const char* const kKinds[] = {"normal", "random", "relu", "zeros", "escapes", "mixed"};

std::vector<uint8_t> make_values(const std::string& kind, uint64_t elements, DType dtype, bool low, uint32_t seed) {
  std::mt19937 random(seed * 7919 + static_cast<uint32_t>(elements));
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<uint8_t> bytes(elements * element_bytes(dtype));
  for (uint64_t i = 0; i < elements; i++) {
    std::string own = kind;
    if (kind == "mixed") own = kKinds[i / 5000 % 5];
    uint32_t bits = float_bits(normal(random)) & 0xffff0000;
    if (own == "random") bits = random() & 0xffff0000;
    if (own == "relu" && bits >> 31) bits = 0;
    if (own == "zeros") bits = 0;
    if (own == "escapes") bits = (random() % 2 != 0 ? 40u : 200u) << 23 | (random() & 0x807f0000);
    if (dtype == DType::kFloat32) {
      // Every other chunk has low halves, or in some messages only its last element.
      const bool last = i % kChunkElements == kChunkElements - 1 || i == elements - 1;
      if (low && i / kChunkElements % 2 == 0 && (seed % 3 != 0 || last)) bits |= random() & 0xffff;
      std::memcpy(&bytes[i * 4], &bits, 4);
    } else {
      const auto half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(&bytes[i * 2], &half, 2);
    }
  }
  return bytes;
}

struct Case {
  std::string kind;
  uint64_t elements;
  DType dtype;
  bool low = false;
  bool plain = false;
  bool checksum = false;
  int top = -1;  // of all chunks; -1: sampled
  uint64_t inline_bytes = 0;
  uint64_t offset = 0;  // elements by which values and outputs are off a 128-byte boundary
  float scale = 1;

  std::string name() const {
    return kind + " " + std::to_string(elements) + (dtype == DType::kFloat32 ? " fp32" : " bf16") +
           (low ? " low" : "") + (plain ? " plain" : "") + (checksum ? " checksum" : "") + " top " +
           std::to_string(top) + " inline " + std::to_string(inline_bytes) + " offset " + std::to_string(offset);
  }
};

// A message in device memory, as it is sent and received.
struct Sent {
  Case what;
  std::vector<uint8_t> values;
  BufferPtr input, statics, pool, low, tops;
  cuda::Outgoing outgoing = {};
  cuda::Incoming incoming = {};
  BufferPtr output, sum;

  uint64_t bytes() const { return values.size(); }
  uint64_t static_size() const {
    return what.plain ? plain_bytes(what.elements, what.dtype) : static_bytes(what.elements, what.inline_bytes);
  }
  MessageHeader header() {
    MessageHeader header;
    std::memcpy(&header, statics->data(), sizeof header);
    return header;
  }
};

std::unique_ptr<Sent> prepare(const Case& what, uint32_t seed) {
  auto sent = std::make_unique<Sent>();
  sent->what = what;
  sent->values = make_values(what.kind, what.elements, what.dtype, what.low, seed);
  const uint64_t offset = what.offset * element_bytes(what.dtype);
  sent->input = buffer(sent->bytes(), offset);
  sent->input->fill(sent->values.data(), sent->bytes());
  sent->output = buffer(sent->bytes(), offset);
  sent->statics = buffer(sent->static_size());
  const uint64_t bound = what.plain ? 0 : pool_bound(what.elements);
  sent->pool = buffer(beyond_inline(bound, what.inline_bytes));
  sent->low = buffer(what.plain ? 0 : low_bound(what.elements, what.dtype));
  cuda::Outgoing& outgoing = sent->outgoing;
  outgoing.values = sent->input->data();
  outgoing.elements = what.elements;
  outgoing.statics = sent->statics->data();
  outgoing.pool = sent->pool->data();
  outgoing.low = sent->low->data();
  outgoing.inline_bytes = what.inline_bytes;
  outgoing.scale = what.scale;
  outgoing.plain = what.plain;
  if (what.top >= 0) {
    const std::vector<int16_t> tops(chunk_count(what.elements), static_cast<int16_t>(what.top));
    sent->tops = buffer(tops.size() * sizeof(int16_t));
    sent->tops->fill(tops.data(), tops.size() * sizeof(int16_t));
    outgoing.windows = reinterpret_cast<const int16_t*>(sent->tops->data());
  }
  cuda::Incoming& incoming = sent->incoming;
  incoming.statics = sent->statics->data();
  incoming.output = sent->output->data();
  incoming.elements = what.elements;
  incoming.inline_bytes = what.inline_bytes;
  incoming.plain = what.plain;
  return sent;
}

uint64_t beyond_inline(const MessageHeader& header) {
  return zipccl::beyond_inline(header.pool_bytes, header.inline_bytes);
}

// The dynamic part as it would lie behind the static one.
std::vector<uint8_t> dynamic_part(Sent& sent) {
  const MessageHeader header = sent.header();
  std::vector<uint8_t> dynamic(dynamic_bytes(header.pool_bytes, header.inline_bytes, header.low_bytes));
  if (beyond_inline(header) != 0) std::memcpy(dynamic.data(), sent.pool->data(), beyond_inline(header));
  if (header.low_bytes != 0) {
    std::memcpy(dynamic.data() + dynamic_low_offset(header.pool_bytes, header.inline_bytes), sent.low->data(),
                header.low_bytes);
  }
  return dynamic;
}

// Fills the message by the CPU's encoder.
void encode_on_cpu(Sent& sent) {
  const Case& what = sent.what;
  EncodeOptions options;
  const std::vector<int16_t> tops(chunk_count(what.elements), static_cast<int16_t>(what.top));
  if (what.top >= 0) options.windows = tops.data();
  options.plain = what.plain;
  options.checksum = what.checksum;
  options.scale = what.scale;
  std::vector<uint8_t> dynamic(what.plain ? 0 : dynamic_bound(what.elements, what.dtype, what.inline_bytes));
  std::memset(sent.statics->data(), 0, sent.static_size());
  encode(sent.values.data(), what.elements, what.dtype, options, what.inline_bytes, sent.statics->data(),
         dynamic.data());
  const MessageHeader header = sent.header();
  sent.pool->fill(dynamic.data(), beyond_inline(header));
  if (header.low_bytes != 0) {
    sent.low->fill(dynamic.data() + dynamic_low_offset(header.pool_bytes, header.inline_bytes), header.low_bytes);
  }
}

// Exactly what was used of the dynamic part, in memory of its own: reading further is an error that ASan sees.
void receive_dynamic(Sent& sent) {
  const MessageHeader header = sent.header();
  auto pool = buffer(beyond_inline(header)), low = buffer(header.low_bytes);
  pool->fill(sent.pool->data(), pool->bytes());
  low->fill(sent.low->data(), low->bytes());
  sent.pool = std::move(pool);
  sent.low = std::move(low);
  sent.incoming.pool = sent.pool->data();
  sent.incoming.pool_room = sent.pool->bytes();
  sent.incoming.low = sent.low->data();
  sent.incoming.low_room = sent.low->bytes();
}

struct Found {
  BufferPtr memory = buffer(sizeof(cuda::Findings));
  cuda::Findings* get() { return reinterpret_cast<cuda::Findings*>(memory->data()); }
  Found() { clear(); }
  void clear() { std::memset(memory->data(), 0, sizeof(cuda::Findings)); }
};

void synchronise() { cudaDeviceSynchronize(); }

using Batch = std::vector<std::unique_ptr<Sent>>;

std::vector<cuda::Outgoing> outgoing_of(Batch& batch) {
  std::vector<cuda::Outgoing> list;
  for (auto& sent : batch) list.push_back(sent->outgoing);
  return list;
}
std::vector<cuda::Incoming> incoming_of(Batch& batch) {
  std::vector<cuda::Incoming> list;
  for (auto& sent : batch) list.push_back(sent->incoming);
  return list;
}

void check_outputs(Batch& batch, const char* how) {
  for (auto& sent : batch) {
    current = sent->what.name();
    expect(sent->bytes() == 0 || std::memcmp(sent->output->data(), sent->values.data(), sent->bytes()) == 0,
           std::string(how) + ": other values");
  }
}

// All cases of one dtype and checksum choice in one batch.
void gpu_to_cpu(const std::vector<Case>& cases) {
  Batch batch;
  for (const Case& what : cases) batch.push_back(prepare(what, static_cast<uint32_t>(batch.size())));
  const bool checksum = cases[0].checksum;
  auto sums = buffer(batch.size() * sizeof(uint64_t));
  cuda::encode(outgoing_of(batch), cases[0].dtype, checksum ? reinterpret_cast<uint64_t*>(sums->data()) : nullptr, 0);
  synchronise();
  for (auto& sent : batch) {
    current = "gpu to cpu: " + sent->what.name();
    const MessageHeader header = sent->header();
    const std::vector<uint8_t> dynamic = dynamic_part(*sent);
    expect(((header.flags & kChecksum) != 0) == checksum, "checksum flag");
    expect(header.scale == sent->what.scale, "scale");
    try {
      std::vector<uint8_t> output(sent->bytes());
      decode({sent->statics->data(), sent->static_size(), dynamic.data(), dynamic.size()}, sent->what.elements,
             sent->what.dtype, output.data());
      expect(output == sent->values, "other values");
    } catch (const FormatError& error) {
      expect(false, error.what());
    }
    if (sent->what.plain || sent->what.elements == 0) continue;
    // As the CPU's encoder: as many escapes, where windows are given, and the same bytes but for the pool's order.
    auto other = prepare(sent->what, static_cast<uint32_t>(&sent - batch.data()));
    encode_on_cpu(*other);
    const MessageHeader wanted = other->header();
    expect(header.low_bytes == wanted.low_bytes, "size of low halves");
    const bool same_windows = chunk_count(sent->what.elements) == 1 || sent->what.top >= 0;
    if (same_windows) {
      expect(header.pool_bytes == wanted.pool_bytes,
             "pool of " + std::to_string(header.pool_bytes) + ", not " + std::to_string(wanted.pool_bytes));
      const uint64_t first = body_offset(sent->what.elements, 0), last = pool_offset(sent->what.elements);
      expect(std::memcmp(sent->statics->data() + first, other->statics->data() + first, last - first) == 0,
             "other bodies");
    } else {
      expect(header.pool_bytes <= wanted.pool_bytes + wanted.pool_bytes / 8 + 64 * chunk_count(sent->what.elements),
             "far more escapes than the CPU's encoder");
    }
    if (chunk_count(sent->what.elements) == 1 && !checksum) {
      expect(std::memcmp(sent->statics->data(), other->statics->data(),
                         pool_offset(sent->what.elements) + std::min(wanted.pool_bytes, wanted.inline_bytes)) == 0,
             "other bytes");
    }
  }
}

void cpu_to_gpu(const std::vector<Case>& cases) {
  Batch batch;
  for (const Case& what : cases) {
    batch.push_back(prepare(what, static_cast<uint32_t>(batch.size())));
    encode_on_cpu(*batch.back());
  }
  Found findings;
  const DType dtype = cases[0].dtype;
  // First without the dynamic parts: what needs none is decoded, the rest is put off.
  cuda::decode(incoming_of(batch), dtype, findings.get(), 0);
  synchronise();
  bool needs = false;
  for (auto& sent : batch) {
    const MessageHeader header = sent->header();
    const bool own = beyond_inline(header) != 0 || header.low_bytes != 0;
    needs = needs || own;
    current = "cpu to gpu, static part: " + sent->what.name();
    const std::vector<uint8_t> untouched(sent->bytes(), 0xee);
    expect(sent->bytes() == 0 ||
               std::memcmp(sent->output->data(), own ? untouched.data() : sent->values.data(), sent->bytes()) == 0,
           own ? "written, not put off" : "other values");
  }
  current = "cpu to gpu";
  expect((findings.get()->deferred != 0) == needs, "put off or not");
  expect(findings.get()->fault == 0, std::string("fault: ") +
                                         describe(static_cast<cuda::Fault>(findings.get()->fault)) + " in " +
                                         cases[findings.get()->message % cases.size()].name());
  findings.clear();
  auto sums = buffer(batch.size() * sizeof(uint64_t));
  for (auto& sent : batch) receive_dynamic(*sent);
  cuda::sum_messages(incoming_of(batch), dtype, reinterpret_cast<uint64_t*>(sums->data()), 0);
  for (size_t i = 0; i < batch.size(); i++) {
    batch[i]->incoming.sum = reinterpret_cast<uint64_t*>(sums->data()) + i;
    if (batch[i]->bytes() != 0) std::memset(batch[i]->output->data(), 0xee, batch[i]->bytes());
  }
  cuda::decode(incoming_of(batch), dtype, findings.get(), 0);
  synchronise();
  check_outputs(batch, "cpu to gpu");
  current = "cpu to gpu, all of it";
  expect(findings.get()->deferred == 0, "put off");
  expect(findings.get()->fault == 0, std::string("fault: ") +
                                         describe(static_cast<cuda::Fault>(findings.get()->fault)) + " in " +
                                         cases[findings.get()->message % cases.size()].name());
}

// Arithmetic may return any NaN for a NaN in fp32; in bf16 it is 0x7fc0.
bool same_but_for_nans(const uint8_t* got, const std::vector<uint8_t>& wanted, DType dtype) {
  if (dtype != DType::kFloat32) return wanted.empty() || std::memcmp(got, wanted.data(), wanted.size()) == 0;
  for (size_t i = 0; i < wanted.size(); i += 4) {
    float a, b;
    std::memcpy(&a, got + i, 4);
    std::memcpy(&b, &wanted[i], 4);
    if (float_bits(a) != float_bits(b) && !(std::isnan(a) && std::isnan(b))) return false;
  }
  return true;
}

// Ranks' contributions of one size, one of them the own values, in rank order.
void reduce(const std::vector<Case>& cases, size_t own, Reduction reduction, float divisor, bool in_place,
            DType output_dtype) {
  Batch batch;
  const uint64_t elements = cases[0].elements;
  const DType dtype = cases[0].dtype;
  std::vector<float> accumulator(elements);
  for (size_t i = 0; i < cases.size(); i++) {
    batch.push_back(prepare(cases[i], static_cast<uint32_t>(i)));
    Sent& sent = *batch.back();
    accumulate_values(sent.values.data(), elements, dtype, cases[i].scale, i == 0 ? Reduction::kStore : reduction,
                      accumulator.data());
    if (i == own) {
      sent.incoming.values = sent.input->data();
      sent.incoming.scale = cases[i].scale;
    } else {
      encode_on_cpu(sent);
    }
  }
  std::vector<uint8_t> wanted(elements * element_bytes(output_dtype));
  finish(accumulator.data(), elements, divisor, output_dtype, wanted.data());
  auto output = buffer(wanted.size(), cases[0].offset * element_bytes(output_dtype));
  auto spilled = buffer(cases.size() > cuda::kBatch ? elements * sizeof(float) : 0);
  uint8_t* target = in_place ? batch[own]->input->data() : output->data();
  const cuda::Reducing reducing = {reduction, divisor,      elements, reinterpret_cast<float*>(spilled->data()),
                                   target,    output_dtype, 0,        false};
  Found findings;
  cuda::reduce(incoming_of(batch), dtype, reducing, findings.get(), 0);
  synchronise();
  current = "reduce " + cases[0].name() + " of " + std::to_string(cases.size());
  bool needs = false;
  for (size_t i = 0; i < batch.size(); i++) {
    if (i == own) continue;
    const MessageHeader header = batch[i]->header();
    needs = needs || beyond_inline(header) != 0 || header.low_bytes != 0;
  }
  expect((findings.get()->deferred != 0) == needs, "put off or not");
  if (needs) {
    if (in_place && elements != 0) {
      expect(std::memcmp(target, batch[own]->values.data(), batch[own]->bytes()) == 0, "own values are gone");
    }
    findings.clear();
    for (size_t i = 0; i < batch.size(); i++) {
      if (i != own) receive_dynamic(*batch[i]);
    }
    cuda::reduce(incoming_of(batch), dtype, reducing, findings.get(), 0);
    synchronise();
  }
  expect(findings.get()->fault == 0 && findings.get()->deferred == 0, "fault");
  expect(same_but_for_nans(target, wanted, output_dtype), "other values");
}

// What the damage at a byte of a message header must be called; kNone: that depends on the values.
cuda::Fault fault_of_header(const Case& what, uint64_t at, const MessageHeader& header) {
  if (at < offsetof(MessageHeader, dtype)) return cuda::Fault::kNoMessage;
  if (at == offsetof(MessageHeader, dtype)) return cuda::Fault::kOtherDType;
  if (at == offsetof(MessageHeader, flags)) return cuda::Fault::kNone;
  if (at < offsetof(MessageHeader, pool_bytes)) return cuda::Fault::kOtherCount;
  if (at < offsetof(MessageHeader, low_bytes) && at >= offsetof(MessageHeader, inline_bytes)) {
    return cuda::Fault::kOtherInline;
  }
  if (header.pool_bytes > pool_bound(what.elements) || header.low_bytes > low_bound(what.elements, what.dtype) ||
      header.low_bytes % kAlignment != 0) {
    return cuda::Fault::kSizes;
  }
  const bool reserved = at >= offsetof(MessageHeader, reserved0) && at < offsetof(MessageHeader, checksum);
  if (reserved || at >= offsetof(MessageHeader, reserved1)) return cuda::Fault::kNoMessage;
  return cuda::Fault::kNone;
}

// Messages with one bit changed: exact values, or a fault. Never an access out of bounds, which the sanitizers see.
// `whole`: also in the bodies and the inline pool, here and there.
void corrupt(const Case& what, bool whole) {
  auto sound = prepare(what, 3);
  encode_on_cpu(*sound);
  receive_dynamic(*sound);
  const uint64_t head = body_offset(what.elements, 0), size = sound->static_size();
  const std::vector<uint8_t> dynamic = dynamic_part(*sound);
  std::mt19937 random(5);
  for (uint64_t at = 0; at < (whole ? size : head); at += at < head ? 1 : 1 + random() % 97) {
    for (int bit : {0, 3, 7}) {
      const uint8_t before = sound->statics->data()[at];
      sound->statics->data()[at] = static_cast<uint8_t>(before ^ 1 << bit);
      std::memset(sound->output->data(), 0xee, sound->bytes());
      Found findings;
      auto sums = buffer(sizeof(uint64_t));
      sound->incoming.sum = nullptr;
      if (what.checksum) {
        cuda::sum_messages({sound->incoming}, what.dtype, reinterpret_cast<uint64_t*>(sums->data()), 0);
        sound->incoming.sum = reinterpret_cast<uint64_t*>(sums->data());
      }
      cuda::decode({sound->incoming}, what.dtype, findings.get(), 0);
      synchronise();
      current = "corrupt " + what.name() + " at byte " + std::to_string(at) + " bit " + std::to_string(bit);
      const auto fault = static_cast<cuda::Fault>(findings.get()->fault);
      const bool refused = fault != cuda::Fault::kNone || findings.get()->deferred != 0;
      const bool exact = std::memcmp(sound->output->data(), sound->values.data(), sound->bytes()) == 0;
      // Without a checksum, damage behind the message header may give other values.
      expect(refused || exact || (!what.checksum && at >= sizeof(MessageHeader)), "went unnoticed");
      if (at < sizeof(MessageHeader)) {
        const cuda::Fault wanted = fault_of_header(what, at, sound->header());
        expect(wanted == cuda::Fault::kNone || fault == wanted,
               std::string("found: ") + describe(fault) + ", not: " + describe(wanted));
      }
      // The CPU's decoder is of the same opinion, but about where low halves begin behind the pool.
      std::vector<uint8_t> output(sound->bytes());
      bool cpu_refuses = false;
      try {
        decode({sound->statics->data(), size, dynamic.data(), dynamic.size()}, what.elements, what.dtype,
               output.data());
      } catch (const FormatError&) {
        cpu_refuses = true;
      }
      const bool of_sizes = at >= offsetof(MessageHeader, pool_bytes) && at < offsetof(MessageHeader, scale);
      expect(of_sizes || refused == cpu_refuses, refused ? "only the GPU refuses it" : "only the CPU refuses it");
      expect(refused || of_sizes || std::memcmp(sound->output->data(), output.data(), sound->bytes()) == 0,
             "the CPU decodes other values");
      sound->statics->data()[at] = before;
    }
  }
}

// A message whose first elements of the first chunk become escapes by its codes, whatever its header then says of them.
void lie(const char* name, uint64_t elements, uint32_t escapes, uint64_t inline_bytes,
         const std::vector<uint16_t>& escape_end, uint64_t pool_bytes, cuda::Fault wanted) {
  Case what = {"zeros", elements, DType::kBFloat16};
  what.top = 6;
  what.inline_bytes = inline_bytes;
  auto sent = prepare(what, 1);
  encode_on_cpu(*sent);
  const uint32_t padded = padded_elements(chunk_elements(elements, 0));
  for (uint32_t i = 0; i < escapes; i++) {
    for (uint32_t p = 0; p < kPlanes; p++) {
      uint8_t& plane = sent->statics->data()[body_offset(elements, 0) + padded + p * (padded / 8) + i / 8];
      plane = static_cast<uint8_t>(plane & ~(1 << i % 8));
    }
  }
  MessageHeader header = sent->header();
  header.pool_bytes = pool_bytes;
  std::memcpy(sent->statics->data(), &header, sizeof header);
  auto* chunk = reinterpret_cast<ChunkHeader*>(sent->statics->data() + chunk_header_offset(0));
  std::copy(escape_end.begin(), escape_end.end(), chunk->escape_end);
  receive_dynamic(*sent);
  for (bool reducing : {false, true}) {
    Found findings;
    if (reducing) {
      cuda::reduce({sent->incoming, sent->incoming}, what.dtype,
                   {Reduction::kSum, 2, elements, nullptr, sent->output->data(), what.dtype, 0, false}, findings.get(),
                   0);
    } else {
      cuda::decode({sent->incoming}, what.dtype, findings.get(), 0);
    }
    synchronise();
    current = std::string("lie: ") + name + (reducing ? ", reduced" : "");
    const auto fault = static_cast<cuda::Fault>(findings.get()->fault);
    expect(fault == wanted, std::string("found: ") + describe(fault) + ", not: " + describe(wanted));
  }
}

void lies() {
  const auto of = [](std::initializer_list<uint16_t> first, uint16_t rest) {
    std::vector<uint16_t> ends(first);
    ends.resize(kSubBlocks, rest);
    return ends;
  };
  for (uint64_t inline_bytes : {0, 3, 8}) {
    lie("none", 1000, 5, inline_bytes, of({}, 5), 5, cuda::Fault::kNone);
    lie("counts that fall", 1000, 5, inline_bytes, of({5}, 3), 3, cuda::Fault::kChunkHeader);
    lie("counts that fall, full", 8192, 5, inline_bytes, of({5}, 3), 3, cuda::Fault::kChunkHeader);
    lie("counts that rise behind the end", 1000, 5, inline_bytes, of({5}, 7), 7, cuda::Fault::kChunkHeader);
    lie("too few", 1000, 5, inline_bytes, of({}, 3), 3, cuda::Fault::kCodes);
    lie("too many", 8192, 5, inline_bytes, of({}, 7), 7, cuda::Fault::kCodes);
    lie("in another sub-block", 8192, 5, inline_bytes, of({3}, 5), 5, cuda::Fault::kCodes);
    lie("pool too short", 8192, 5, inline_bytes, of({}, 5), 3, cuda::Fault::kPoolRange);
    lie("many in one sub-block", 2000, 900, inline_bytes, of({}, 900), 100, cuda::Fault::kPoolRange);
    lie("more than a raw chunk puts into the pool", 16384, 6000, inline_bytes, of({1024, 2048, 3072, 4096, 5120}, 6000),
        6000, cuda::Fault::kChunkHeader);
  }
}

void settle() {
  for (const char* kind : {"normal", "escapes"}) {
    for (size_t count : {size_t{1}, size_t{3}, size_t{40}}) {
      Batch batch;
      for (size_t i = 0; i < count; i++) {
        Case what = {i + 1 == count ? kind : "normal", 9000, DType::kBFloat16};
        what.inline_bytes = 1024;
        batch.push_back(prepare(what, static_cast<uint32_t>(i)));
      }
      cuda::encode(outgoing_of(batch), DType::kBFloat16, nullptr, 0);
      cuda::Sizes outgoing_sizes[40] = {}, incoming_sizes[40] = {};
      auto report = buffer(sizeof(cuda::Report)), flag = buffer(4);
      auto outgoing = buffer(sizeof outgoing_sizes), incoming = buffer(sizeof incoming_sizes);
      // In both directions, in one each, and with a fault.
      for (int way = 0; way < 4; way++) {
        Found findings;
        std::memset(report->data(), 0, report->bytes());
        std::memset(flag->data(), 0, 4);
        std::memset(outgoing->data(), 0xee, outgoing->bytes());
        std::memset(incoming->data(), 0xee, incoming->bytes());
        if (way == 0) cuda::decode(incoming_of(batch), DType::kBFloat16, findings.get(), 0);
        if (way == 3) findings.get()->fault = static_cast<uint32_t>(cuda::Fault::kCodes);
        const bool sends = way != 2, receives = way == 0 || way == 2;
        cuda::settle(sends ? outgoing_of(batch) : std::vector<cuda::Outgoing>(),
                     receives ? incoming_of(batch) : std::vector<cuda::Incoming>(),
                     {findings.get(), reinterpret_cast<cuda::Report*>(report->data()),
                      reinterpret_cast<cuda::Sizes*>(outgoing->data()),
                      reinterpret_cast<cuda::Sizes*>(incoming->data()), reinterpret_cast<uint32_t*>(flag->data()), 7},
                     0);
        synchronise();
        current = std::string("settle ") + kind + " of " + std::to_string(count) + ", way " + std::to_string(way);
        const bool open = std::string(kind) == "escapes" || way == 3;
        uint32_t value;
        std::memcpy(&value, flag->data(), 4);
        expect(value == (open ? 0u : 7u), "flag");
        const auto* reported = reinterpret_cast<cuda::Report*>(report->data());
        expect((reported->open != 0) == open, "open");
        expect(std::memcmp(&reported->findings, findings.get(), sizeof(cuda::Findings)) == 0, "findings");
        std::memset(outgoing_sizes, 0xee, sizeof outgoing_sizes);
        std::memset(incoming_sizes, 0xee, sizeof incoming_sizes);
        for (size_t i = 0; i < count; i++) {
          const cuda::Sizes sizes = {batch[i]->header().pool_bytes, batch[i]->header().low_bytes};
          if (sends) outgoing_sizes[i] = sizes;
          if (receives) incoming_sizes[i] = sizes;
        }
        expect(std::memcmp(outgoing_sizes, outgoing->data(), sizeof outgoing_sizes) == 0, "sizes sent");
        expect(std::memcmp(incoming_sizes, incoming->data(), sizeof incoming_sizes) == 0, "sizes received");
      }
    }
  }
}

void in_batches(const std::vector<Case>& cases, const std::function<void(const std::vector<Case>&)>& action) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (bool checksum : {false, true}) {
      std::vector<Case> some;
      for (const Case& what : cases) {
        if (what.dtype == dtype && what.checksum == checksum) some.push_back(what);
      }
      if (!some.empty()) action(some);
    }
  }
}

std::vector<Case> message_cases(const std::vector<uint64_t>& sizes) {
  std::vector<Case> cases;
  for (uint64_t elements : sizes) {
    for (const char* kind : kKinds) {
      for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        Case what = {kind, elements, dtype};
        what.inline_bytes = std::min(round_up(elements / 24, 128), pool_bound(elements));
        cases.push_back(what);
        what.inline_bytes = 0;
        what.low = dtype == DType::kFloat32;
        what.scale = 0.5f;
        cases.push_back(what);
        what.inline_bytes = 7;
        what.offset = 1;
        what.checksum = true;
        if (pool_bound(elements) >= 7) cases.push_back(what);
      }
    }
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      Case what = {"normal", elements, dtype};
      what.plain = true;
      cases.push_back(what);
      what.offset = 3;
      what.checksum = true;
      cases.push_back(what);
      what = {"normal", elements, dtype};
      for (int top : {122, 121, 90, 255, 6}) {
        what.top = top;
        what.offset = top % 4;
        what.low = dtype == DType::kFloat32 && top % 2 == 0;
        what.inline_bytes = std::min<uint64_t>(128, pool_bound(elements));
        cases.push_back(what);
      }
    }
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  simt::configure(std::strtoull(argv[1], nullptr, 10), simt::Policy::kRandom);
  const std::vector<uint64_t> small = {0, 1, 2, 7, 8, 9, 31, 33, 255, 257, 1000, 1023, 1024, 1025, 3072, 5000};
  const std::vector<uint64_t> large = {8191, 8192, 8193, 9216, 16384, 20000, 24579};
  const auto reductions = [](const std::vector<uint64_t>& sizes) {
    for (uint64_t elements : sizes) {
      for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        for (Reduction reduction : {Reduction::kSum, Reduction::kMin, Reduction::kMax}) {
          std::vector<Case> cases;
          for (size_t i = 0; i < 4; i++) {
            Case what = {i == 3 && reduction != Reduction::kSum ? "random" : "normal", elements, dtype};
            what.inline_bytes = std::min(round_up(elements / 24 + 1, 128), pool_bound(elements));
            what.scale = reduction == Reduction::kSum ? 1.0f / static_cast<float>(i + 3) : 1.0f;
            what.low = dtype == DType::kFloat32 && reduction == Reduction::kMin;
            what.plain = i == 2;
            what.offset = elements % 3;
            cases.push_back(what);
          }
          for (size_t own : {size_t{0}, size_t{1}, size_t{3}}) {
            // Sums of one host's ranks are in fp32 whatever the values, and the sum of those is as the values.
            const DType other = dtype == DType::kFloat32 ? DType::kBFloat16 : DType::kFloat32;
            reduce(cases, own, reduction, own == 0 ? 4.0f : 3.0f, own == 1, own == 3 ? other : dtype);
          }
        }
      }
    }
  };
  const std::map<std::string, std::function<void()>> sets = {
      {"gpu-to-cpu-small", [&] { in_batches(message_cases(small), gpu_to_cpu); }},
      {"gpu-to-cpu-large", [&] { in_batches(message_cases(large), gpu_to_cpu); }},
      {"cpu-to-gpu-small", [&] { in_batches(message_cases(small), cpu_to_gpu); }},
      {"cpu-to-gpu-large", [&] { in_batches(message_cases(large), cpu_to_gpu); }},
      {"reduce-small", [&] { reductions({1, 9, 1024, 5000}); }},
      {"reduce-large", [&] { reductions({8193, 20000}); }},
      {"reduce-many",
       [&] {
         for (const char* kind : {"normal", "escapes"}) {
           std::vector<Case> cases(cuda::kBatch + 3, Case{"normal", 2000, DType::kBFloat16});
           for (Case& what : cases) what.inline_bytes = 256;
           cases[5].kind = kind;
           reduce(cases, 1, Reduction::kSum, 35.0f, true, DType::kBFloat16);
         }
       }},
      {"corrupt",
       [&] {
         lies();
         // Its low halves could be longer.
         corrupt({"normal", kChunkElements + 700, DType::kFloat32, true}, false);
         for (const char* kind : {"normal", "escapes", "relu", "random"}) {
           Case what = {kind, 1500, DType::kFloat32, true};
           what.inline_bytes = 16;
           corrupt(what, true);
           what.checksum = true;
           corrupt(what, false);
         }
       }},
      {"settle", settle},
  };
  for (int i = 2; i < argc; i++) {
    const auto found = sets.find(argv[i]);
    if (found == sets.end()) {
      std::printf("unknown set %s; there are:", argv[i]);
      for (const auto& [name, set] : sets) std::printf(" %s", name.c_str());
      std::printf("\n");
      return 2;
    }
    found->second();
  }
  if (failures != 0) std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
