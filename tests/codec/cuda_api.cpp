// The GPU codec's interface for ctypes: the functions of c_api.cpp that encode, decode or reduce, over the kernels on
// the emulator. Here is what callers of the GPU codec do besides: they announce a message's sizes, and put the parts of
// its dynamic part together or find them in it.
#include <algorithm>
#include <cstring>
#include <vector>

// The source itself: accumulating into given values is half a launch, for which codec.cu has no function.
#include "codec/cuda/codec.cu"
#include "guarded.h"
#include "runtime.h"

using namespace zipccl;

namespace {

// Random order of threads, blocks and copies. Whatever a kernel does wrong is an exception, not the process's end.
void configure() {
  simt::configure(2, simt::Policy::kRandom);
  simt::Config config = simt::config();
  config.exit_on_error = false;
  simt::configure(config);
}

void prepare() {
  static const bool done = (configure(), true);
  (void)done;
}

void synchronise() {
  if (cudaDeviceSynchronize() == cudaSuccess) return;
  const std::string error = simt::take_error();
  simt::reset();
  configure();
  throw std::runtime_error(error);
}

// A range as the GPU codec asks for it, 128-byte aligned: the given one, or a copy of it.
class Aligned {
 public:
  Aligned(const uint8_t* data, uint64_t bytes) : given_(const_cast<uint8_t*>(data)), bytes_(bytes), data_(given_) {
    if (reinterpret_cast<uintptr_t>(data) % kAlignment == 0) return;
    copy_.resize(bytes + kAlignment);
    data_ = copy_.data() + (-reinterpret_cast<uintptr_t>(copy_.data()) & (kAlignment - 1));
    if (bytes != 0) std::memcpy(data_, data, bytes);
  }
  Aligned(const Aligned&) = delete;
  uint8_t* data() const { return data_; }
  void write_back() const {
    if (data_ != given_ && bytes_ != 0) std::memcpy(given_, data_, bytes_);
  }

 private:
  uint8_t* given_;
  uint64_t bytes_;
  uint8_t* data_;
  std::vector<uint8_t> copy_;
};

MessageHeader header_at(const uint8_t* statics) {
  MessageHeader header;
  std::memcpy(&header, statics, sizeof header);
  return header;
}

struct Options {
  const int16_t* windows;
  bool plain, checksum;
  float scale;
};

// `pool` and `low` have room for all that there can be.
MessageHeader encode_message(const void* values, uint64_t elements, int dtype, const Options& options,
                             uint64_t inline_bytes, uint8_t* statics, uint8_t* pool, uint8_t* low) {
  prepare();
  cuda::Outgoing outgoing = {};
  outgoing.values = values;
  outgoing.elements = elements;
  outgoing.statics = statics;
  outgoing.pool = pool;
  outgoing.low = low;
  outgoing.windows = options.windows;
  outgoing.inline_bytes = inline_bytes;
  outgoing.scale = options.scale;
  outgoing.plain = options.plain;
  uint64_t sum;
  cuda::encode({outgoing}, static_cast<DType>(dtype), options.checksum ? &sum : nullptr, nullptr);
  synchronise();
  return header_at(statics);
}

MessageHeader announced(const uint8_t* statics, uint64_t size) {
  if (size < sizeof(MessageHeader)) throw FormatError("the static part is shorter than a header");
  return header_at(statics);
}

// Bytes of the static part without its inline pool.
uint64_t fixed_bytes(const MessageHeader& header, uint64_t elements, DType dtype, uint64_t size) {
  const bool plain = (header.flags & kPlain) != 0;
  const uint64_t bytes = plain ? plain_bytes(elements, dtype) : pool_offset(elements);
  if (size < bytes || (plain && size != bytes)) throw FormatError("the static part has another size");
  return bytes;
}

// A message that has arrived, of so many values as its receiver knows. Receivers also know the size of the static part
// and whether it is plain; here, it says so itself.
struct Received {
  Received(const uint8_t* static_part, uint64_t static_size, const uint8_t* dynamic, uint64_t dynamic_size,
           uint64_t elements, DType dtype)
      : header(announced(static_part, static_size)),
        inline_bytes(static_size - fixed_bytes(header, elements, dtype, static_size)),
        low_offset(std::min(dynamic_size, dynamic_low_offset(header.pool_bytes, inline_bytes))),
        statics(static_part, static_size),
        low(dynamic + low_offset, dynamic_size - low_offset) {
    prepare();
    incoming.statics = statics.data();
    incoming.pool = dynamic;
    incoming.pool_room = low_offset;
    incoming.low = low.data();
    incoming.low_room = dynamic_size - low_offset;
    incoming.elements = elements;
    incoming.inline_bytes = inline_bytes;
    incoming.plain = (header.flags & kPlain) != 0;
    cuda::sum_messages({incoming}, dtype, &sum, nullptr);
    incoming.sum = &sum;
  }

  MessageHeader header;
  uint64_t inline_bytes, low_offset;
  Aligned statics, low;
  uint64_t sum = 0;
  cuda::Incoming incoming = {};
};

void check(const cuda::Findings& findings) {
  if (findings.fault != 0) {
    const auto fault = static_cast<cuda::Fault>(findings.fault);
    const std::string where = fault < cuda::Fault::kChunkHeader ? "" : "chunk " + std::to_string(findings.chunk) + ": ";
    throw FormatError(where + cuda::describe(fault));
  }
  if (findings.deferred != 0) throw FormatError("the dynamic part is too short");
}

// One launch of reduce() for one message or none, out of a longer list of them: from `accumulators` and back to them
// or, the last one, to `output`.
void reduce_some(const cuda::Incoming* incoming, int dtype, uint64_t elements, Reduction reduction, float* accumulators,
                 float divisor, void* output) {
  prepare();
  cuda::Findings findings = {};
  cuda::ReduceBatch batch = {};
  if (incoming != nullptr) batch.messages[0] = cuda::placed(*incoming);
  batch.findings = &findings;
  batch.reducing = {reduction == Reduction::kStore ? Reduction::kSum : reduction,
                    divisor,
                    elements,
                    accumulators,
                    output,
                    static_cast<DType>(dtype),
                    0,
                    false};
  batch.count = incoming != nullptr;
  batch.first = reduction == Reduction::kStore ? 0 : 1;
  batch.last = output != nullptr;
  // Between launches, maxima have the other sign.
  const auto turn_signs = [&] {
    for (uint64_t i = 0; reduction == Reduction::kMax && i < elements; i++) accumulators[i] = -accumulators[i];
  };
  turn_signs();
  cuda::with_dtype(static_cast<DType>(dtype), [&](auto constant) {
    const auto chunks = static_cast<unsigned>(chunk_count(elements));
    if (chunks == 0) return;
    ZIPCCL_LAUNCH((cuda::reduce_chunks<constant.value, constant.value>), dim3(chunks), dim3(cuda::kThreads),
                  sizeof(cuda::DecodeShared), nullptr, batch);
  });
  synchronise();
  turn_signs();
  check(findings);
}

}  // namespace

extern "C" {

// The emulator refers to it to name lines of a program's code. Shared libraries have none.
__attribute__((visibility("hidden"))) char __executable_start;

int api_encode(const void* input, uint64_t elements, int dtype, const int16_t* tops, int plain, int checksum,
               float scale, uint64_t inline_bytes, uint8_t* statics, uint8_t* dynamic, uint64_t* dynamic_size,
               uint64_t* escapes) {
  return guarded([&] {
    const auto type = static_cast<DType>(dtype);
    const Options options = {tops, plain != 0, checksum != 0, scale};
    const Aligned whole(statics, plain ? plain_bytes(elements, type) : static_bytes(elements, inline_bytes));
    const Aligned rest(dynamic, plain ? 0 : dynamic_bound(elements, type, inline_bytes));
    uint8_t* low = rest.data() + dynamic_low_offset(pool_bound(elements), inline_bytes);
    const MessageHeader header =
        encode_message(input, elements, dtype, options, inline_bytes, whole.data(), rest.data(), low);
    if (header.low_bytes != 0) {
      const uint64_t beyond = beyond_inline(header.pool_bytes, inline_bytes);
      const uint64_t begin = dynamic_low_offset(header.pool_bytes, inline_bytes);
      std::memset(rest.data() + beyond, 0, begin - beyond);
      std::memmove(rest.data() + begin, low, header.low_bytes);
    }
    *dynamic_size = plain ? 0 : dynamic_bytes(header.pool_bytes, inline_bytes, header.low_bytes);
    *escapes = header.pool_bytes;
    whole.write_back();
    rest.write_back();
  });
}

// Encodes twice: the pool's size must be known to encode with this much of it inline.
int api_encode_contiguous(const void* input, uint64_t elements, int dtype, const int16_t* tops, int plain, int checksum,
                          float scale, uint8_t* output, uint64_t* size) {
  return guarded([&] {
    const auto type = static_cast<DType>(dtype);
    const Options options = {tops, plain != 0, checksum != 0, scale};
    const uint64_t fixed = plain ? plain_bytes(elements, type) : static_bytes(elements, 0);
    const uint64_t pool_room = plain ? 0 : dynamic_low_offset(pool_bound(elements), 0);
    const uint64_t low_room = plain ? 0 : low_bound(elements, type);
    std::vector<uint8_t> memory(round_up(fixed, kAlignment) + low_room + pool_room + kAlignment);
    uint8_t* first = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & (kAlignment - 1));
    uint8_t* low = first + round_up(fixed, kAlignment);
    uint8_t* pool = low + low_room;
    MessageHeader header = encode_message(input, elements, dtype, options, 0, first, pool, low);
    *size = fixed;
    if (plain) {
      std::memcpy(output, first, fixed);
      return;
    }
    *size += header.pool_bytes;
    const Aligned whole(output, *size);
    header = encode_message(input, elements, dtype, options, header.pool_bytes, whole.data(), pool, low);
    whole.write_back();
    if (header.low_bytes == 0) return;
    std::memset(output + *size, 0, round_up(*size, kAlignment) - *size);
    *size = round_up(*size, kAlignment);
    std::memcpy(output + *size, low, header.low_bytes);
    *size += header.low_bytes;
  });
}

int api_decode(const uint8_t* statics, uint64_t static_size, const uint8_t* dynamic, uint64_t dynamic_size,
               uint64_t elements, int dtype, void* output) {
  return guarded([&] {
    Received received(statics, static_size, dynamic, dynamic_size, elements, static_cast<DType>(dtype));
    received.incoming.output = output;
    cuda::Findings findings = {};
    cuda::decode({received.incoming}, static_cast<DType>(dtype), &findings, nullptr);
    synchronise();
    check(findings);
  });
}

int api_accumulate(const uint8_t* statics, uint64_t static_size, const uint8_t* dynamic, uint64_t dynamic_size,
                   uint64_t elements, int dtype, int reduction, float* accumulator) {
  return guarded([&] {
    const Received received(statics, static_size, dynamic, dynamic_size, elements, static_cast<DType>(dtype));
    reduce_some(&received.incoming, dtype, elements, static_cast<Reduction>(reduction), accumulator, 1, nullptr);
  });
}

int api_accumulate_values(const void* values, uint64_t elements, int dtype, float scale, int reduction,
                          float* accumulator) {
  return guarded([&] {
    cuda::Incoming incoming = {};
    incoming.values = values;
    incoming.elements = elements;
    incoming.scale = scale;
    reduce_some(&incoming, dtype, elements, static_cast<Reduction>(reduction), accumulator, 1, nullptr);
  });
}

int api_finish(const float* accumulator, uint64_t elements, float divisor, int dtype, void* output) {
  return guarded([&] {
    reduce_some(nullptr, dtype, elements, Reduction::kSum, const_cast<float*>(accumulator), divisor, output);
  });
}

}  // extern "C"
