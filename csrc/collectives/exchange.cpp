#include "collectives/exchange.h"

namespace zipccl {

const char* name(Collective collective) {
  switch (collective) {
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kAllReduce:
      return "all_reduce";
  }
  return "unknown collective";
}

const char* name(Route route) {
  switch (route) {
    case Route::kNative:
      return "native";
    case Route::kRaw:
      return "raw";
    case Route::kZip:
      return "zip";
    case Route::kHierarchical:
      return "hierarchical";
  }
  return "unknown route";
}

std::string failure_text(Collective collective, uint64_t sequence, const std::string& group, int rank,
                         const std::string& what) {
  return std::string("zipccl ") + name(collective) + " (call " + std::to_string(sequence) + " of group '" + group +
         "', rank " + std::to_string(rank) + "): " + what;
}

Counters& Counters::operator+=(const Counters& other) {
  raw_bytes += other.raw_bytes;
  wire_bytes += other.wire_bytes;
  local_bytes += other.local_bytes;
  elements += other.elements;
  escapes += other.escapes;
  dynamic_bytes += other.dynamic_bytes;
  sampled_chunks += other.sampled_chunks;
  messages += other.messages;
  coded_messages += other.coded_messages;
  encode_seconds += other.encode_seconds;
  exchange_seconds += other.exchange_seconds;
  dynamic_seconds += other.dynamic_seconds;
  decode_seconds += other.decode_seconds;
  total_seconds += other.total_seconds;
  return *this;
}

}  // namespace zipccl
