// Launches: cuts lists of messages into batches.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "codec/cuda/kernels.cuh"

namespace zipccl::cuda {
namespace {

void check_launch(const char* what) {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("zipccl: the kernel ") + what +
                             " could not be launched: " + cudaGetErrorString(error));
  }
}

// Calls action(first, count) for batches of at most kBatch of `total` messages.
template <class Action>
void for_batches(size_t total, Action action) {
  for (size_t first = 0; first < total; first += kBatch) action(first, std::min<size_t>(kBatch, total - first));
}

template <class Message>
unsigned most_chunks(const Message* messages, size_t count) {
  uint64_t most = 1;
  for (size_t i = 0; i < count; i++) most = std::max(most, chunk_count(messages[i].elements));
  if (most > 0x7fffffff) throw std::length_error("zipccl: a message has more chunks than a grid has blocks");
  return static_cast<unsigned>(most);
}

template <DType dtype>
void sum_as(const std::vector<Incoming>& messages, uint64_t* sums, cudaStream_t stream) {
  if (cudaMemsetAsync(sums, 0, messages.size() * sizeof(uint64_t), stream) != cudaSuccess) check_launch("memset");
  for_batches(messages.size(), [&](size_t first, size_t count) {
    SumBatch batch = {};
    for (size_t i = 0; i < count; i++) batch.messages[i] = placed(messages[first + i]);
    batch.sums = sums + first;
    const unsigned blocks = std::min(most_chunks(batch.messages, count), 1024u);
    ZIPCCL_LAUNCH(sum_words<dtype>, dim3(blocks, static_cast<unsigned>(count)), dim3(kThreads), 0, stream, batch);
    check_launch("sum_words");
  });
}

template <DType dtype>
void store_checksums(const std::vector<Outgoing>& messages, uint64_t* sums, cudaStream_t stream) {
  std::vector<Incoming> written;
  for (const Outgoing& message : messages) {
    Incoming one = {};
    one.statics = message.statics;
    one.pool = message.pool;
    one.low = message.low;
    one.pool_room = one.low_room = UINT64_MAX / 2;
    one.elements = message.elements;
    one.inline_bytes = message.inline_bytes;
    one.plain = message.plain;
    written.push_back(one);
  }
  sum_as<dtype>(written, sums, stream);
  for_batches(messages.size(), [&](size_t first, size_t count) {
    StoreSumsBatch batch = {};
    for (size_t i = 0; i < count; i++) batch.statics[i] = messages[first + i].statics;
    batch.sums = sums + first;
    ZIPCCL_LAUNCH(store_sums, dim3(1), dim3(kBatch), 0, stream, batch, static_cast<uint32_t>(count));
    check_launch("store_sums");
  });
}

template <DType dtype, bool sampled>
void encode_batches(const std::vector<Outgoing>& messages, uint64_t* sums, cudaStream_t stream) {
  for_batches(messages.size(), [&](size_t first, size_t count) {
    EncodeBatch batch = {};
    for (size_t i = 0; i < count; i++) batch.messages[i] = placed(messages[first + i]);
    batch.sums = sums;
    const dim3 grid(most_chunks(batch.messages, count), static_cast<unsigned>(count));
    ZIPCCL_LAUNCH(begin_messages<dtype>, dim3(static_cast<unsigned>(count)), dim3(kThreads), 0, stream, batch);
    ZIPCCL_LAUNCH((encode_chunks<dtype, sampled>), grid, dim3(kThreads), sizeof(EncodeShared), stream, batch);
    check_launch("encode_chunks");
  });
}

template <DType dtype>
void encode_as(const std::vector<Outgoing>& messages, uint64_t* sums, cudaStream_t stream) {
  std::vector<Outgoing> sampled, given;
  for (const Outgoing& message : messages) (message.windows == nullptr ? sampled : given).push_back(message);
  encode_batches<dtype, true>(sampled, sums, stream);
  encode_batches<dtype, false>(given, sums, stream);
  if (sums != nullptr) store_checksums<dtype>(messages, sums, stream);
}

template <DType dtype>
void decode_as(const std::vector<Incoming>& messages, Findings* findings, cudaStream_t stream) {
  for_batches(messages.size(), [&](size_t first, size_t count) {
    DecodeBatch batch = {};
    for (size_t i = 0; i < count; i++) batch.messages[i] = placed(messages[first + i]);
    batch.findings = findings;
    batch.first = static_cast<uint32_t>(first);
    const dim3 grid(most_chunks(batch.messages, count), static_cast<unsigned>(count));
    ZIPCCL_LAUNCH(decode_chunks<dtype>, grid, dim3(kThreads), sizeof(DecodeShared), stream, batch);
    check_launch("decode_chunks");
  });
}

template <DType dtype, DType output_dtype>
void reduce_as(const std::vector<Incoming>& messages, const Reducing& reducing, Findings* findings,
               cudaStream_t stream) {
  const uint64_t chunks = chunk_count(reducing.elements);
  if (chunks == 0) return;
  if (chunks > 0x7fffffff) throw std::length_error("zipccl: a message has more chunks than a grid has blocks");
  for_batches(messages.size(), [&](size_t first, size_t count) {
    ReduceBatch batch = {};
    for (size_t i = 0; i < count; i++) batch.messages[i] = placed(messages[first + i]);
    batch.findings = findings;
    batch.reducing = reducing;
    batch.count = static_cast<uint32_t>(count);
    batch.first = static_cast<uint32_t>(first);
    batch.reported = reducing.first_message + batch.first;
    batch.last = first + count == messages.size();
    ZIPCCL_LAUNCH((reduce_chunks<dtype, output_dtype>), dim3(static_cast<unsigned>(chunks)), dim3(kThreads),
                  sizeof(DecodeShared), stream, batch);
    check_launch("reduce_chunks");
  });
}

// Calls action with the dtype as a compile-time constant.
template <class Action>
void with_dtype(DType dtype, Action action) {
  switch (dtype) {
    case DType::kBFloat16:
      return action(std::integral_constant<DType, DType::kBFloat16>());
    case DType::kFloat32:
      return action(std::integral_constant<DType, DType::kFloat32>());
    default:
      throw std::invalid_argument("zipccl: the GPU codes bf16 and fp32 only");
  }
}

}  // namespace

const char* describe(Fault fault) {
  switch (fault) {
    case Fault::kNone:
      return "nothing is wrong";
    case Fault::kNoMessage:
      return "it is no message of this format version";
    case Fault::kOtherDType:
      return "its dtype is not the announced one";
    case Fault::kOtherCount:
      return "its element count is not the announced one";
    case Fault::kOtherInline:
      return "its inline pool has not the announced size";
    case Fault::kSizes:
      return "impossible sizes of its escape pool or low halves";
    case Fault::kChecksum:
      return "the checksum does not match";
    case Fault::kChunkHeader:
      return "the chunk's header is impossible";
    case Fault::kPoolRange:
      return "the chunk's escapes leave the pool";
    case Fault::kLowRange:
      return "the chunk's low halves leave their range";
    case Fault::kCodes:
      return "the chunk's codes do not match its count of escapes";
  }
  return "unknown fault";
}

void encode(const std::vector<Outgoing>& messages, DType dtype, uint64_t* sums, cudaStream_t stream) {
  with_dtype(dtype, [&](auto constant) { encode_as<constant.value>(messages, sums, stream); });
}

void decode(const std::vector<Incoming>& messages, DType dtype, Findings* findings, cudaStream_t stream) {
  with_dtype(dtype, [&](auto constant) { decode_as<constant.value>(messages, findings, stream); });
}

void reduce(const std::vector<Incoming>& messages, DType dtype, const Reducing& reducing, Findings* findings,
            cudaStream_t stream) {
  with_dtype(dtype, [&](auto from) {
    with_dtype(reducing.output_dtype,
               [&](auto to) { reduce_as<from.value, to.value>(messages, reducing, findings, stream); });
  });
}

void sum_messages(const std::vector<Incoming>& messages, DType dtype, uint64_t* sums, cudaStream_t stream) {
  with_dtype(dtype, [&](auto constant) { sum_as<constant.value>(messages, sums, stream); });
}

void settle(const std::vector<Outgoing>& outgoing, const std::vector<Incoming>& incoming, const Settling& settling,
            cudaStream_t stream) {
  const size_t total = std::max<size_t>({outgoing.size(), incoming.size(), 1});
  for_batches(total, [&](size_t first, size_t) {
    const auto part = [first](size_t size) { return size > first ? std::min<size_t>(kBatch, size - first) : 0; };
    SettleBatch batch = {};
    batch.outgoing_count = static_cast<uint32_t>(part(outgoing.size()));
    batch.incoming_count = static_cast<uint32_t>(part(incoming.size()));
    for (size_t i = 0; i < batch.outgoing_count; i++) {
      batch.outgoing[i] = reinterpret_cast<const MessageHeader*>(outgoing[first + i].statics);
    }
    for (size_t i = 0; i < batch.incoming_count; i++) {
      batch.incoming[i] = reinterpret_cast<const MessageHeader*>(incoming[first + i].statics);
    }
    batch.outgoing_sizes = settling.outgoing_sizes + first;
    batch.incoming_sizes = settling.incoming_sizes + first;
    batch.settling = settling;
    batch.last = first + kBatch >= total;
    ZIPCCL_LAUNCH(settle_messages, dim3(1), dim3(kLanes), 0, stream, batch);
    check_launch("settle_messages");
  });
}

}  // namespace zipccl::cuda
