// What nodes tell one another before data moves, and the small payloads that travel beside it.
//
// Owns one message per node. Never touches flags in shared memory and never blocks.
#ifndef HSGD_INTERNODE_HEADER_EXCHANGE_HPP_
#define HSGD_INTERNODE_HEADER_EXCHANGE_HPP_

#include <algorithm>
#include <cstdint>
#include <memory>

#include "base/call_signature.hpp"
#include "internode/messages.hpp"

namespace hsgd {

// What ranks must know of one another before an alltoall, of which each knows its own counts only.
struct ExchangeNote {
  uint64_t imbalance = 0;  // adds up to 0 over all ranks when what is sent is what is expected
  uint64_t steps = 0;      // that the pipeline would take; the most of all ranks counts
  uint64_t at_once = 1;    // 1: the payload lies beside the header
  static constexpr uint64_t kAny = UINT64_MAX;
  uint64_t buffer = kAny;  // the shared buffer that holds the input; 0: none, or not all in one
  void add(const ExchangeNote& other) {
    buffer = buffer == kAny || buffer == other.buffer ? other.buffer : 0;
    imbalance += other.imbalance;
    steps = std::max(steps, other.steps);
    at_once = std::min(at_once, other.at_once);
  }
};

// What local rank 0 of a node tells the others before any data moves; the payload of small
// collectives follows.
struct WireHeader {
  uint64_t sequence;
  int64_t status;  // hsgd_status: HSGD_ERR_SIGNATURE when ranks of this node differ
  Call call;       // of local rank 0
  Call other;      // of the local rank that differs, with HSGD_ERR_SIGNATURE
  ExchangeNote note;
};

// All leaders tell one another a header and up to `payload_bytes`.
class HeaderExchange {
 public:
  HeaderExchange(Transport& transport, size_t payload_bytes, WireCounters& counters);
  void start(const WireHeader& header, const void* payload, size_t bytes);
  bool done();
  const WireHeader& header(int node) const;
  const std::byte* payload(int node) const;

 private:
  std::byte* message(int node) const {
    return messages_.get() + static_cast<size_t>(node) * stride_;
  }
  Transport& transport_;
  WireCounters& counters_;
  size_t stride_;
  std::unique_ptr<std::byte[]> messages_;
  Messages pending_;
};

}  // namespace hsgd

#endif  // HSGD_INTERNODE_HEADER_EXCHANGE_HPP_
