// Messages: cuts them into chunks, chooses windows, keeps the escape pool, and checks what it is told when decoding.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "coder.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little-endian, and so must be the processor");

namespace zipccl {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// The coder

bool runs([[maybe_unused]] const Coder& coder) {
#if defined(__x86_64__)
  if (&coder == &kAvx512Coder) {
#if defined(ZIPCCL_AVX512_HEADER)  // a test's emulation
    return true;
#else
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
           __builtin_cpu_supports("popcnt");
#endif
  }
  if (&coder == &kAvx2Coder) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
  }
#endif
  return true;
}

// Best first.
const Coder* const kCoders[] = {
#if defined(__x86_64__)
    &kAvx512Coder,
    &kAvx2Coder,
#endif
    &kPortableCoder,
};

std::atomic<const Coder*> chosen_coder{nullptr};

const Coder& choose_coder(const std::string& name) {
  for (const Coder* coder : kCoders) {
    if ((name.empty() || name == coder->name) && runs(*coder)) return *coder;
  }
  std::string names;
  for (const Coder* coder : kCoders) {
    if (runs(*coder)) names += (names.empty() ? "" : ", ") + std::string(coder->name);
  }
  throw std::runtime_error("coder \"" + name + "\" is unknown or cannot run on this processor; it has: " + names);
}

const Coder& default_coder() {
  const char* name = std::getenv("ZIPCCL_CPU");
  return choose_coder(name == nullptr ? "" : name);
}

const Coder& current_coder() {
  const Coder* coder = chosen_coder.load(std::memory_order_relaxed);
  if (coder == nullptr) {
    coder = &default_coder();
    chosen_coder.store(coder, std::memory_order_relaxed);
  }
  return *coder;
}

// Values of more bytes than this go past the caches.
uint64_t cache_bytes() {
  static const uint64_t bytes = [] {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    const long size = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (size > 0) return static_cast<uint64_t>(size);
#endif
    return uint64_t{32} << 20;
  }();
  return bytes;
}

bool is_aligned(const void* pointer, uint64_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The parts of a message

// The escape pool: one sequence of bytes, of which the first `inline_bytes` are in the static part.
template <class Byte>
struct Pool {
  Byte* inlined;
  uint64_t inline_bytes;
  Byte* dynamic;

  // Calls action(bytes, offset, count) for the one or two contiguous pieces of [begin, begin + count).
  template <class Action>
  void for_pieces(uint64_t begin, uint64_t count, Action action) const {
    const uint64_t in_first = begin < inline_bytes ? std::min(count, inline_bytes - begin) : 0;
    if (in_first != 0) action(inlined + begin, begin, in_first);
    if (count > in_first) action(dynamic + (begin + in_first - inline_bytes), begin + in_first, count - in_first);
  }
};

void write_pool(const Pool<uint8_t>& pool, uint64_t begin, const uint8_t* bytes, uint64_t count) {
  pool.for_pieces(begin, count, [&](uint8_t* piece, uint64_t at, uint64_t length) {
    std::memcpy(piece, bytes + (at - begin), length);
  });
}

void read_pool(const Pool<const uint8_t>& pool, uint64_t begin, uint64_t count, uint8_t* bytes) {
  pool.for_pieces(begin, count, [&](const uint8_t* piece, uint64_t at, uint64_t length) {
    std::memcpy(bytes + (at - begin), piece, length);
  });
}

// What a range adds to a sum of 64-bit words, in which its first byte is byte `offset`.
uint64_t sum_range(const Coder& coder, const uint8_t* bytes, uint64_t offset, uint64_t count) {
  uint64_t sum = 0;
  uint64_t i = 0;
  for (; i < count && (offset + i) % 8 != 0; i++) sum += uint64_t{bytes[i]} << (offset + i) % 8 * 8;
  const uint64_t words = (count - i) / 8;
  sum += coder.sum_words(bytes + i, words);
  for (i += words * 8; i < count; i++) sum += uint64_t{bytes[i]} << (offset + i) % 8 * 8;
  return sum;
}

// All sizes in the header have been checked, or are our own.
uint64_t message_checksum(const Coder& coder, MessageHeader header, const uint8_t* statics, const uint8_t* dynamic) {
  header.checksum = 0;
  uint64_t sum = sum_range(coder, reinterpret_cast<const uint8_t*>(&header), 0, sizeof header);
  if (header.elements == 0) return sum;
  if (header.flags & kPlain) {
    return sum + sum_range(coder, statics + kAlignment, 0, header.elements * element_bytes(header.dtype));
  }
  const uint64_t bodies_end = pool_offset(header.elements);
  sum += sum_range(coder, statics + sizeof header, 0, bodies_end - sizeof header);
  const Pool<const uint8_t> pool = {statics + bodies_end, header.inline_bytes, dynamic};
  pool.for_pieces(0, header.pool_bytes, [&](const uint8_t* piece, uint64_t at, uint64_t length) {
    sum += sum_range(coder, piece, at, length);
  });
  if (header.low_bytes != 0) {
    const uint64_t low_offset = dynamic_low_offset(header.pool_bytes, header.inline_bytes);
    sum += sum_range(coder, dynamic + low_offset, 0, header.low_bytes);
  }
  return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Windows

// One group of 64 elements in every eight.
Histogram sample(const uint16_t* values, uint32_t elements) {
  constexpr uint32_t kGroup = 64, kStep = 8 * kGroup;
  constexpr uint32_t kTables = 4;  // equal neighbours need not wait for each other
  uint32_t counts[kTables][256] = {};
  for (uint32_t start = 0; start < elements; start += kStep) {
    const uint32_t end = std::min(start + kGroup, elements);
    uint32_t i = start;
    for (; i + kTables <= end; i += kTables) {
      for (uint32_t k = 0; k < kTables; k++) counts[k][values[i + k] >> 7 & 0xff]++;
    }
    for (; i < end; i++) counts[0][values[i] >> 7 & 0xff]++;
  }
  Histogram histogram;
  for (int k = 0; k < 256; k++) histogram.count[k] = counts[0][k] + counts[1][k] + counts[2][k] + counts[3][k];
  return histogram;
}

uint32_t count_escapes(const uint16_t* values, uint32_t elements, Window window) {
  const uint16_t length = window.mode == Mode::kWindow ? 7 : 6;
  uint32_t escapes = 0;
  for (uint32_t start = 0; start < elements; start += kSubBlockElements) {
    uint16_t in_block = 0;  // as wide as the values, so that the compiler makes vectors of them
    const uint32_t end = std::min(start + kSubBlockElements, elements);
    for (uint32_t i = start; i < end; i++) {
      const uint16_t exponent = values[i] >> 7 & 0xff;
      const bool coded = ((window.top - exponent) & 0xff) < length || (length == 6 && exponent == 0);
      in_block += !coded;
    }
    escapes += in_block;
  }
  return escapes;
}

constexpr uint32_t kPatience = 64;  // chunks

bool same(Window a, Window b) { return a.top == b.top && a.mode == b.mode; }

// ---------------------------------------------------------------------------------------------------------------------
// Encoding

class Encoder {
 public:
  Encoder(const void* input, uint64_t elements, DType dtype, const EncodeOptions& options, uint64_t inline_bytes,
          uint8_t* statics, uint8_t* dynamic)
      : coder_(current_coder()),
        input_(static_cast<const uint8_t*>(input)),
        elements_(elements),
        dtype_(dtype),
        options_(options),
        statics_(statics),
        dynamic_(dynamic),
        pool_{statics + zipccl::pool_offset(elements), inline_bytes, dynamic} {
    streaming_ = elements * element_bytes(dtype) > cache_bytes() && is_aligned(statics, kStreamAlignment);
  }

  // Encodes everything but the message header, which it returns, without a checksum.
  MessageHeader encode_chunks() {
    const uint64_t chunks = chunk_count(elements_);
    const uint64_t table_end = chunk_header_offset(chunks);
    if (chunks != 0) std::memset(statics_ + table_end, 0, body_offset(elements_, 0) - table_end);
    for (uint64_t chunk = 0; chunk < chunks; chunk++) encode_chunk(chunk);
    if (streaming_) coder_.finish_streaming();
    const uint64_t low_offset = dynamic_low_offset(pool_bytes_, pool_.inline_bytes);
    place_low_halves(low_offset);
    if (low_bytes_ != 0 && low_offset != 0) {
      const uint64_t pool_end = pool_bytes_ - pool_.inline_bytes;
      std::memset(dynamic_ + pool_end, 0, low_offset - pool_end);
    }
    MessageHeader header = {};
    header.magic = kMagic;
    header.version = kVersion;
    header.dtype = dtype_;
    header.elements = elements_;
    header.pool_bytes = pool_bytes_;
    header.inline_bytes = pool_.inline_bytes;
    header.low_bytes = low_bytes_;
    header.scale = options_.scale;
    return header;
  }

  uint64_t sampled_chunks() const { return sampled_chunks_; }

 private:
  void encode_chunk(uint64_t chunk) {
    const uint32_t elements = chunk_elements(elements_, chunk);
    const uint32_t padded = padded_elements(elements);
    const uint64_t start = chunk * kChunkElements;
    ChunkHeader header = {};
    header.elements = static_cast<uint16_t>(elements);
    header.low = kNoLow;
    header.pool_offset = pool_bytes_;
    uint8_t* body = statics_ + body_offset(elements_, chunk);

    const uint16_t* values = local_;
    if (dtype_ == DType::kFloat32) {
      header.low = narrow(input_ + start * sizeof(float), elements);
    } else if (elements == padded) {
      values = reinterpret_cast<const uint16_t*>(input_) + start;
    } else {
      std::memcpy(local_, input_ + start * sizeof(uint16_t), elements * sizeof(uint16_t));
    }

    // With a window from the caller, or from the chunk before, only a surprising number of escapes costs a sample; a
    // large one that is no surprise, now and then, as another window may have come to fit better.
    const int16_t given = options_.windows == nullptr ? int16_t{-1} : options_.windows[chunk];
    Window window = window_;
    uint32_t allowed = (expected_ + expected_ / 8 + 24) * elements / kChunkElements;
    bool sampled = false;
    if (given >= 0) {
      window = window_of(given);
      allowed = (given & kKeptWindow) != 0 ? elements : elements / 8;
    } else if (!have_window_) {
      window = best_window(sample(values, elements));
      sampled = true;
    }
    uint32_t escapes = encode_with(window, values, elements, body, header.escape_end);
    unsampled_++;
    if (!sampled && (escapes > allowed || (given < 0 && escapes > elements / 16 && unsampled_ > kPatience))) {
      const Window better = best_window(sample(values, elements));
      sampled = true;
      if (!same(better, window)) {
        window = better;
        escapes = encode_with(window, values, elements, body, header.escape_end);
      }
    }
    if (sampled) unsampled_ = 0;
    sampled_chunks_ += sampled;
    window_ = window;
    have_window_ = escapes <= raw_pool_bytes(elements);  // else no window fits, and the next chunk is on its own
    expected_ = static_cast<uint32_t>(uint64_t{escapes} * kChunkElements / elements);

    const uint8_t* overflow = escapes_;
    if (escapes > raw_pool_bytes(elements)) {
      window = {0, Mode::kRaw};
      escapes = raw_pool_bytes(elements);
      overflow = encode_raw(values, elements, body);
      std::memset(header.escape_end, 0, sizeof header.escape_end);
      header.escape_end[kSubBlocks - 1] = static_cast<uint16_t>(escapes);
    }
    header.top = window.top;
    header.mode = window.mode;
    if (low_bytes_ != 0 && low_offset_ == 0 && pool_bytes_ + escapes > pool_.inline_bytes) {
      place_low_halves(dynamic_low_offset(pool_bound(elements_), pool_.inline_bytes));
    }
    write_pool(pool_, pool_bytes_, overflow, escapes);
    pool_bytes_ += escapes;
    std::memcpy(statics_ + chunk_header_offset(chunk), &header, sizeof header);
  }

  // Splits a chunk into its upper halves, in local_, and its lower halves, which stay if any is non-zero.
  uint32_t narrow(const uint8_t* values, uint32_t elements) {
    if (low_bytes_ == 0 && pool_bytes_ > pool_.inline_bytes) {
      low_offset_ = dynamic_low_offset(pool_bound(elements_), pool_.inline_bytes);
    }
    uint8_t* low = dynamic_ + low_offset_ + low_bytes_;
    if (!coder_.narrow(values, elements, local_, low)) return kNoLow;
    const uint32_t slot = low_slot_bytes(elements);
    std::memset(low + 2 * elements, 0, slot - 2 * elements);
    const uint64_t unit = low_bytes_ / kAlignment;
    if (unit >= kNoLow) throw std::length_error("a message cannot hold more than 512 GiB of low halves");
    low_bytes_ += slot;
    return static_cast<uint32_t>(unit);
  }

  // The low halves follow the pool, whose length is known last. As long as all escapes are inline, their place is the
  // start of the dynamic part; after that they wait where no pool can reach.
  void place_low_halves(uint64_t offset) {
    if (low_bytes_ != 0 && offset != low_offset_) {
      std::memmove(dynamic_ + offset, dynamic_ + low_offset_, low_bytes_);
    }
    low_offset_ = offset;
  }

  void pad(uint32_t elements, uint16_t pattern) {
    for (uint32_t i = elements; i < padded_elements(elements); i++) local_[i] = pattern;
  }

  // Returns the number of escapes, which are in escapes_.
  uint32_t encode_with(Window window, const uint16_t* values, uint32_t elements, uint8_t* body, uint16_t* escape_end) {
    const uint32_t padded = padded_elements(elements);
    if (elements != padded) pad(elements, static_cast<uint16_t>(window.top << 7));  // gets code 1: no escapes
    (streaming_ ? coder_.encode_streaming : coder_.encode)(values, padded, window, body, escapes_, escape_end);
    for (uint32_t block = padded / kSubBlockElements; block < kSubBlocks; block++) {
      escape_end[block] = escape_end[block - 1];
    }
    return escape_end[kSubBlocks - 1];
  }

  // Returns the exponents that find no room in the body.
  const uint8_t* encode_raw(const uint16_t* values, uint32_t elements, uint8_t* body) {
    const uint32_t padded = padded_elements(elements);
    if (elements != padded) pad(elements, 0);
    if (streaming_) coder_.finish_streaming();  // the same bytes are written again
    coder_.split(values, padded, body, escapes_);
    const uint32_t slot = raw_slot_bytes(elements);
    std::memcpy(body + padded, escapes_, slot);
    return escapes_ + slot;
  }

  const Coder& coder_;
  const uint8_t* const input_;
  const uint64_t elements_;
  const DType dtype_;
  const EncodeOptions& options_;
  uint8_t* const statics_;
  uint8_t* const dynamic_;
  const Pool<uint8_t> pool_;
  bool streaming_;

  uint64_t sampled_chunks_ = 0;
  uint64_t pool_bytes_ = 0;
  uint64_t low_bytes_ = 0;
  uint64_t low_offset_ = 0;  // of the low halves in the dynamic part

  // What the chunk before had.
  bool have_window_ = false;
  Window window_;
  uint32_t expected_ = 0;   // escapes of 8192 elements
  uint32_t unsampled_ = 0;  // chunks since the last sample

  alignas(kStreamAlignment) uint16_t local_[kChunkElements];
  alignas(kStreamAlignment) uint8_t escapes_[kEscapeRoom];
};

MessageHeader plain_header(uint64_t elements, DType dtype, const EncodeOptions& options) {
  MessageHeader header = {};
  header.magic = kMagic;
  header.version = kVersion;
  header.dtype = dtype;
  header.flags = kPlain;
  header.elements = elements;
  header.scale = options.scale;
  return header;
}

void write_header(MessageHeader header, const EncodeOptions& options, uint8_t* statics, const uint8_t* dynamic) {
  if (options.checksum) {
    header.flags |= kChecksum;
    header.checksum = message_checksum(current_coder(), header, statics, dynamic);
  }
  std::memcpy(statics, &header, sizeof header);
}

void encode_plain(const void* input, uint64_t elements, DType dtype, const EncodeOptions& options, uint8_t* statics) {
  if (elements != 0) {
    std::memset(statics + sizeof(MessageHeader), 0, kAlignment - sizeof(MessageHeader));
    std::memcpy(statics + kAlignment, input, elements * element_bytes(dtype));
  }
  write_header(plain_header(elements, dtype, options), options, statics, nullptr);
}

// Where the low halves of a contiguous message begin; its end where it has none.
uint64_t contiguous_low_offset(const MessageHeader& header) {
  const uint64_t statics = static_bytes(header.elements, header.inline_bytes);
  return header.low_bytes == 0 ? statics : round_up(statics, kAlignment);
}

// ---------------------------------------------------------------------------------------------------------------------
// Decoding

[[noreturn]] void fail(const std::string& what) { throw FormatError(what); }

[[noreturn]] void fail(uint64_t chunk, const std::string& what) {
  throw FormatError("chunk " + std::to_string(chunk) + ": " + what);
}

std::string text(uint64_t number) { return std::to_string(number); }

// A message whose header and sizes have been checked, and whose chunks are checked as they are read.
class Decoder {
 public:
  Decoder(const Message& message, uint64_t elements, DType dtype)
      : coder_(current_coder()), statics_(message.statics), header_(read_header(message.statics, message.static_size)) {
    if (header_.dtype != dtype) {
      fail("the message has dtype " + text(static_cast<int>(header_.dtype)) + ", expected " +
           text(static_cast<int>(dtype)));
    }
    if (header_.elements != elements) {
      fail("the message has " + text(header_.elements) + " elements, expected " + text(elements));
    }
    const uint64_t expected = is_plain() ? plain_bytes(elements, dtype) : static_bytes(elements, header_.inline_bytes);
    if (message.static_size != expected) {
      fail("the static part has " + text(message.static_size) + " bytes, expected " + text(expected));
    }
    const uint64_t needed = dynamic_bytes(header_.pool_bytes, header_.inline_bytes, header_.low_bytes);
    if (message.dynamic_size < needed) {
      fail("the dynamic part has " + text(message.dynamic_size) + " bytes, needs " + text(needed));
    }
    pool_ = {statics_ + pool_offset(elements), header_.inline_bytes, message.dynamic};
    if (header_.low_bytes != 0) {
      low_ = message.dynamic + dynamic_low_offset(header_.pool_bytes, header_.inline_bytes);
    }
    if ((header_.flags & kChecksum) &&
        message_checksum(coder_, header_, statics_, message.dynamic) != header_.checksum) {
      fail("the checksum does not match");
    }
  }

  const Coder& coder() const { return coder_; }
  const MessageHeader& header() const { return header_; }
  bool is_plain() const { return header_.flags & kPlain; }
  const uint8_t* plain_values() const { return statics_ + kAlignment; }

  // Decodes the bf16 values (of fp32, the upper halves) of a chunk to `values`, which has room for the padding.
  // Returns the lower halves, null if they are zero.
  const uint8_t* read_chunk(uint64_t chunk, uint16_t* values, bool streaming) {
    ChunkHeader header;
    std::memcpy(&header, statics_ + chunk_header_offset(chunk), sizeof header);
    const uint32_t elements = chunk_elements(header_.elements, chunk);
    const uint32_t padded = padded_elements(elements);
    if (header.elements != elements) fail(chunk, "has " + text(header.elements) + " elements, not " + text(elements));
    if (header.mode > Mode::kRaw) fail(chunk, "unknown mode " + text(static_cast<int>(header.mode)));
    const uint32_t escapes = header.escape_end[kSubBlocks - 1];
    if (escapes > raw_pool_bytes(elements)) fail(chunk, "too many escapes: " + text(escapes));
    if (header.pool_offset > header_.pool_bytes || escapes > header_.pool_bytes - header.pool_offset) {
      fail(chunk, text(escapes) + " escapes at " + text(header.pool_offset) + " leave the pool of " +
                      text(header_.pool_bytes) + " bytes");
    }
    const uint8_t* low = read_low(chunk, header.low, elements);
    const uint8_t* body = statics_ + body_offset(header_.elements, chunk);
    if (header.mode == Mode::kRaw) {
      read_raw(chunk, header, body, elements, values);
      return low;
    }
    read_pool(pool_, header.pool_offset, escapes, escapes_);
    for (uint32_t block = padded / kSubBlockElements - 1; block < kSubBlocks; block++) {
      if (header.escape_end[block] != escapes) fail(chunk, "escapes beyond its elements");
    }
    const Window window = {header.top, header.mode};
    const auto decode_chunk = streaming ? coder_.decode_streaming : coder_.decode;
    if (!decode_chunk(body, padded, window, escapes_, header.escape_end, values)) {
      fail(chunk, "its codes do not match its count of escapes");
    }
    return low;
  }

 private:
  const uint8_t* read_low(uint64_t chunk, uint32_t unit, uint32_t elements) const {
    if (unit == kNoLow) return nullptr;
    const uint64_t offset = uint64_t{unit} * kAlignment;
    if (header_.dtype != DType::kFloat32 || offset >= header_.low_bytes ||
        low_slot_bytes(elements) > header_.low_bytes - offset) {
      fail(chunk, "low halves at " + text(offset) + " leave the " + text(header_.low_bytes) + " bytes of them");
    }
    return low_ + offset;
  }

  void read_raw(uint64_t chunk, const ChunkHeader& header, const uint8_t* body, uint32_t elements, uint16_t* values) {
    const uint32_t padded = padded_elements(elements);
    const uint32_t slot = raw_slot_bytes(elements);
    bool expected = header.top == 0 && header.escape_end[kSubBlocks - 1] == raw_pool_bytes(elements);
    for (uint32_t block = 0; block + 1 < kSubBlocks; block++) expected &= header.escape_end[block] == 0;
    if (!expected) fail(chunk, "the header of a raw chunk has a top or other escapes than it must have");
    std::memcpy(escapes_, body + padded, slot);
    read_pool(pool_, header.pool_offset, raw_pool_bytes(elements), escapes_ + slot);
    // What is behind the last exponent pads the last sub-block and is not looked at.
    coder_.merge(body, escapes_, padded, values);
  }

  const Coder& coder_;
  const uint8_t* const statics_;
  const MessageHeader header_;
  Pool<const uint8_t> pool_;
  const uint8_t* low_ = nullptr;
  alignas(kStreamAlignment) uint8_t escapes_[kEscapeRoom];
};

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The interface

Encoded encode(const void* input, uint64_t elements, DType dtype, const EncodeOptions& options, uint64_t inline_bytes,
               uint8_t* statics, uint8_t* dynamic) {
  if (options.plain || dtype == DType::kBytes) {
    encode_plain(input, elements, dtype, options, statics);
    return {};
  }
  Encoder encoder(input, elements, dtype, options, inline_bytes, statics, dynamic);
  const MessageHeader header = encoder.encode_chunks();
  write_header(header, options, statics, dynamic);
  return {dynamic_bytes(header.pool_bytes, header.inline_bytes, header.low_bytes), header.pool_bytes,
          encoder.sampled_chunks()};
}

void plan(const void* values, uint64_t elements, DType dtype, int16_t* windows, uint32_t* escapes) {
  uint16_t local[kChunkElements];
  for (uint64_t chunk = 0; chunk < chunk_count(elements); chunk++) {
    const uint32_t count = chunk_elements(elements, chunk);
    const auto* chunk_values = static_cast<const uint8_t*>(values) + chunk * kChunkElements * element_bytes(dtype);
    const uint16_t* upper = local;
    if (dtype == DType::kFloat32) {
      for (uint32_t i = 0; i < count; i++) std::memcpy(&local[i], chunk_values + 4 * i + 2, sizeof(uint16_t));
    } else {
      upper = reinterpret_cast<const uint16_t*>(chunk_values);
    }
    int16_t& window = windows[chunk];
    uint32_t escaped = window < 0 ? count : count_escapes(upper, count, window_of(window));
    if (escaped > count / 16) {
      window = given_window(best_window(sample(upper, count)), /*kept=*/true);
      escaped = count_escapes(upper, count, window_of(window));
    }
    escapes[chunk] = std::min(escaped, raw_pool_bytes(count));
  }
}

uint64_t contiguous_bound(uint64_t elements, DType dtype) {
  const uint64_t plain = plain_bytes(elements, dtype);
  if (dtype == DType::kBytes) return plain;
  const uint64_t statics = round_up(static_bytes(elements, pool_bound(elements)), kAlignment);
  return std::max(plain, statics + low_bound(elements, dtype));
}

uint64_t encode_contiguous(const void* input, uint64_t elements, DType dtype, const EncodeOptions& options,
                           uint8_t* output) {
  if (options.plain || dtype == DType::kBytes) {
    encode_plain(input, elements, dtype, options, output);
    return plain_bytes(elements, dtype);
  }
  // With room for any pool first, which then shrinks to what was used.
  const uint64_t bound = pool_bound(elements);
  uint8_t* low = output + round_up(static_bytes(elements, bound), kAlignment);
  Encoder encoder(input, elements, dtype, options, bound, output, low);
  MessageHeader header = encoder.encode_chunks();
  header.inline_bytes = header.pool_bytes;
  const uint64_t pool_end = static_bytes(elements, header.inline_bytes);
  const uint64_t low_offset = contiguous_low_offset(header);
  std::memset(output + pool_end, 0, low_offset - pool_end);
  std::memmove(output + low_offset, low, header.low_bytes);
  write_header(header, options, output, output + low_offset);
  return low_offset + header.low_bytes;
}

MessageHeader read_header(const uint8_t* statics, uint64_t size) {
  MessageHeader header;
  if (size < sizeof header) fail("the message has " + text(size) + " bytes, fewer than its header");
  std::memcpy(&header, statics, sizeof header);
  if (header.magic != kMagic) fail("this is no message: it does not begin with \"ZPCL\"");
  if (header.version != kVersion) {
    fail("the message has format version " + text(header.version) + ", this library reads " + text(kVersion));
  }
  if (header.dtype > DType::kFloat32) fail("unknown dtype " + text(static_cast<int>(header.dtype)));
  if (header.flags & ~(kPlain | kChecksum)) fail("unknown flags " + text(header.flags));
  if (header.reserved0 != 0 || header.reserved1 != 0 || (!(header.flags & kChecksum) && header.checksum != 0)) {
    fail("unused fields of the header are not zero");
  }
  if (header.elements > UINT64_MAX / 8) fail("impossible element count " + text(header.elements));
  if (header.flags & kPlain) {
    if (header.pool_bytes != 0 || header.inline_bytes != 0 || header.low_bytes != 0) {
      fail("a plain message with escapes");
    }
    const uint64_t needed = plain_bytes(header.elements, header.dtype);
    if (size < needed)
      fail(text(header.elements) + " plain elements need " + text(needed) + " bytes, not " + text(size));
    return header;
  }
  if (header.dtype == DType::kBytes) fail("bytes that are not plain");
  const uint64_t bodies_end = pool_offset(header.elements);
  if (size < bodies_end || header.inline_bytes > size - bodies_end) {
    fail("the static part of " + text(header.elements) + " elements and " + text(header.inline_bytes) +
         " bytes of inline pool does not fit into " + text(size) + " bytes");
  }
  if (header.pool_bytes > pool_bound(header.elements)) fail("impossible pool of " + text(header.pool_bytes) + " bytes");
  if (header.low_bytes > low_bound(header.elements, header.dtype) || header.low_bytes % kAlignment != 0) {
    fail("impossible " + text(header.low_bytes) + " bytes of low halves");
  }
  return header;
}

Message contiguous_message(const uint8_t* data, uint64_t size) {
  const MessageHeader header = read_header(data, size);
  const bool plain = header.flags & kPlain;
  const uint64_t low_offset = plain ? plain_bytes(header.elements, header.dtype) : contiguous_low_offset(header);
  if (low_offset > size || header.low_bytes != size - low_offset) {
    fail("the message has " + text(size) + " bytes, its header says " + text(low_offset + header.low_bytes));
  }
  const uint64_t statics = plain ? size : static_bytes(header.elements, header.inline_bytes);
  return {data, statics, data + low_offset, header.low_bytes};
}

void decode(const Message& message, uint64_t elements, DType dtype, void* output) {
  Decoder decoder(message, elements, dtype);
  if (elements == 0) return;
  if (decoder.is_plain()) {
    std::memcpy(output, decoder.plain_values(), elements * element_bytes(dtype));
    return;
  }
  alignas(kStreamAlignment) uint16_t local[kChunkElements];
  const bool streaming =
      dtype == DType::kBFloat16 && elements * sizeof(uint16_t) > cache_bytes() && is_aligned(output, kStreamAlignment);
  for (uint64_t chunk = 0; chunk < chunk_count(elements); chunk++) {
    const uint32_t count = chunk_elements(elements, chunk);
    const uint64_t start = chunk * kChunkElements;
    if (dtype == DType::kFloat32) {
      const uint8_t* low = decoder.read_chunk(chunk, local, false);
      decoder.coder().widen(local, low, count, static_cast<uint8_t*>(output) + start * sizeof(float));
    } else if (count == padded_elements(count)) {
      decoder.read_chunk(chunk, static_cast<uint16_t*>(output) + start, streaming);
    } else {
      decoder.read_chunk(chunk, local, false);
      std::memcpy(static_cast<uint16_t*>(output) + start, local, count * sizeof(uint16_t));
    }
  }
  if (streaming) decoder.coder().finish_streaming();
}

namespace {

void accumulate_with(const Coder& coder, const uint8_t* values, uint64_t elements, DType dtype, float scale,
                     Reduction reduction, float* accumulator) {
  if (dtype == DType::kFloat32) {
    coder.accumulate_float32(values, elements, scale, reduction, accumulator);
  } else {
    coder.accumulate_bfloat16(values, elements, scale, reduction, accumulator);
  }
}

void check_reducible(DType dtype) {
  if (dtype != DType::kBFloat16 && dtype != DType::kFloat32) {
    throw std::invalid_argument("only bf16 and fp32 values can be accumulated");
  }
}

}  // namespace

void accumulate(const Message& message, uint64_t elements, DType dtype, Reduction reduction, float* accumulator) {
  check_reducible(dtype);
  Decoder decoder(message, elements, dtype);
  if (elements == 0) return;
  const Coder& coder = decoder.coder();
  const float scale = decoder.header().scale;
  if (decoder.is_plain()) {
    accumulate_with(coder, decoder.plain_values(), elements, dtype, scale, reduction, accumulator);
    return;
  }
  alignas(kStreamAlignment) uint16_t local[kChunkElements];
  alignas(kStreamAlignment) uint8_t wide[kSubBlockElements * sizeof(float)];
  for (uint64_t chunk = 0; chunk < chunk_count(elements); chunk++) {
    const uint32_t count = chunk_elements(elements, chunk);
    float* target = accumulator + chunk * kChunkElements;
    const uint8_t* low = decoder.read_chunk(chunk, local, false);
    if (low == nullptr) {
      coder.accumulate_bfloat16(reinterpret_cast<const uint8_t*>(local), count, scale, reduction, target);
      continue;
    }
    for (uint32_t start = 0; start < count; start += kSubBlockElements) {
      const uint32_t part = std::min(kSubBlockElements, count - start);
      coder.widen(local + start, low + 2 * start, part, wide);
      coder.accumulate_float32(wide, part, scale, reduction, target + start);
    }
  }
}

void accumulate_values(const void* values, uint64_t elements, DType dtype, float scale, Reduction reduction,
                       float* accumulator) {
  check_reducible(dtype);
  accumulate_with(current_coder(), static_cast<const uint8_t*>(values), elements, dtype, scale, reduction, accumulator);
}

void finish(const float* accumulator, uint64_t elements, float divisor, DType dtype, void* output) {
  check_reducible(dtype);
  const Coder& coder = current_coder();
  if (dtype == DType::kFloat32) {
    coder.finish_float32(accumulator, elements, divisor, static_cast<float*>(output));
  } else {
    coder.finish_bfloat16(accumulator, elements, divisor, static_cast<uint16_t*>(output));
  }
}

const char* coder_name() { return current_coder().name; }

void set_coder(const std::string& name) {
  chosen_coder.store(name.empty() ? &default_coder() : &choose_coder(name), std::memory_order_relaxed);
}

}  // namespace zipccl
