// One message to and from each node.
#include "internode/header_exchange.hpp"

#include <cstring>

#include "base/fault_points.hpp"
#include "node/segment_layout.hpp"

namespace hsgd {

HeaderExchange::HeaderExchange(Transport& transport, size_t payload_bytes, WireCounters& counters)
    : transport_(transport),
      counters_(counters),
      stride_(round_up(sizeof(WireHeader) + payload_bytes, kLine)),
      messages_(new std::byte[stride_ * static_cast<size_t>(transport.node_count())]),
      pending_(transport) {}

void HeaderExchange::start(const WireHeader& header, const void* payload, size_t bytes) {
  const int me = transport_.node_rank();
  const int nodes = transport_.node_count();
  std::memcpy(message(me), &header, sizeof header);
  if (bytes > 0) std::memcpy(message(me) + sizeof header, payload, bytes);
  // A node that called with another size sends another length, so every receive takes the longest.
  WireCounters longest;
  for (int i = 1; i < nodes; ++i) {
    const int from = (me + nodes - i) % nodes;
    pending_.receive(from, Channel::kHeader, message(from), stride_, longest);
  }
  counters_.bytes_received += static_cast<uint64_t>(nodes - 1) * (sizeof header + bytes);
  for (int i = 1; i < nodes; ++i) {
    pending_.send((me + i) % nodes, Channel::kHeader, message(me), sizeof header + bytes,
                  counters_);
  }
  HSGD_FAULT_POINT("between nodes: header sent");
}

bool HeaderExchange::done() { return pending_.all_done(); }

const WireHeader& HeaderExchange::header(int node) const {
  return *reinterpret_cast<const WireHeader*>(message(node));
}

const std::byte* HeaderExchange::payload(int node) const {
  return message(node) + sizeof(WireHeader);
}

}  // namespace hsgd
