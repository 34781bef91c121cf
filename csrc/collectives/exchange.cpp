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

std::string failure_text(Collective collective, uint64_t sequence, const std::string& group, int rank,
                         const std::string& what) {
  return std::string("zipccl ") + name(collective) + " (call " + std::to_string(sequence) + " of group '" + group +
         "', rank " + std::to_string(rank) + "): " + what;
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

}  // namespace zipccl
