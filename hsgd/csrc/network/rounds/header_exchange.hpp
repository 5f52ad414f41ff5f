// What nodes tell one another before results are written, and the payloads that travel beside it.
//
// Owns the messages, round by round, and how headers are put together: after the last round all
// nodes have the same one. Messages are the same in number and order whatever a node called, and
// have no payload from the first one on whose sender knows of two ranks that differ. Never touches
// flags in shared memory and never blocks.
#ifndef HSGD_NETWORK_ROUNDS_HEADER_EXCHANGE_HPP_
#define HSGD_NETWORK_ROUNDS_HEADER_EXCHANGE_HPP_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/base/call_signature.hpp"
#include "network/rounds/round_schedule.hpp"
#include "network/transport/messages.hpp"

namespace hsgd {

// What ranks must know of one another before an alltoall, of which each knows its own counts only.
struct ExchangeNote {
  uint64_t imbalance = 0;  // adds up to 0 over all ranks when what is sent is what is expected
  uint64_t pieces = 0;     // that blocks must be cut into; the most of all ranks counts
  uint64_t at_once = 1;    // 1: the payload lies beside the header
  static constexpr uint64_t kAny = UINT64_MAX;
  uint64_t buffer = kAny;  // the shared buffer that holds the input; 0: none, or not all in one
  void add(const ExchangeNote& other) {
    buffer = buffer == kAny || buffer == other.buffer ? other.buffer : 0;
    imbalance += other.imbalance;
    pieces = std::max(pieces, other.pieces);
    at_once = std::min(at_once, other.at_once);
  }
};

// What the first leader tells of its node, and then of ever more nodes, before any data moves; the
// payload of small collectives follows.
struct WireHeader {
  uint64_t sequence;
  int64_t status;  // hsgd_status: HSGD_ERR_SIGNATURE when ranks of these nodes differ
  uint64_t payload_bytes;
  Call call;   // of the first rank
  Call other;  // of one that differs, with HSGD_ERR_SIGNATURE
  ExchangeNote note;
};

class HeaderExchange {
 public:
  // The most bytes behind a header. The same on all nodes: others may have called anything.
  struct Room {
    size_t payload = 0;  // of small collectives: of any group of nodes
    size_t part = 0;     // of a RoundPayload: to a node in a round,
    size_t whole = 0;    // and to a partner
  };
  HeaderExchange(Transport& transport, const RoundSchedule& rounds, const Room& room,
                 WireCounters& counters);
  // What such an object allocates.
  static size_t buffer_bytes(const RoundSchedule& rounds, const Room& room);
  // `result`: where the payload of all nodes goes, unless ranks differ. May be where `payload` is.
  void start(const WireHeader& header, const Payload& payload, MergeFn merge, std::byte* result);
  // `parts` lasts until the exchange is done, or another begins.
  void start(const WireHeader& header, RoundPayload* parts);
  bool done();
  size_t most_part_bytes() const { return round_bytes_ - sizeof(WireHeader); }
  const WireHeader& header() const { return *header_of(own_); }  // of all nodes, when done

 private:
  enum Stage { kTake, kRounds, kGive, kDone };
  static WireHeader* header_of(std::byte* message) {
    return reinterpret_cast<WireHeader*>(message);
  }
  static std::byte* payload_of(std::byte* message) { return message + sizeof(WireHeader); }
  // Of the message that comes from a node of the group, or goes there; index 0 of the partner.
  std::byte* incoming(int index) { return inbox_ + static_cast<size_t>(index) * round_bytes_; }
  std::byte* outgoing(int index) { return outbox_ + static_cast<size_t>(index) * round_bytes_; }
  bool sends_parts() const { return parts_ != nullptr && header().status == HSGD_OK; }
  void begin(const WireHeader& header);
  void begin_stage();
  void begin_round();
  void end_stage();
  void next_stage();
  void merge(const std::vector<std::byte*>& parts, bool is_last);
  void merge_round();
  void send(int node);
  void send_part(int core, int index);
  void receive(int node, std::byte* message, size_t capacity_bytes);

  Transport& transport_;
  const RoundSchedule& rounds_;
  WireCounters& counters_;
  const size_t own_bytes_;                 // the longest message of this node's own,
  const size_t round_bytes_;               // in a round,
  const size_t fold_bytes_;                // and between partners
  std::unique_ptr<std::byte[]> messages_;  // two of this node's own, then inbox and outbox
  std::byte* inbox_;
  std::byte* outbox_;  // of parts
  Messages pending_;
  MergeFn merge_;
  RoundPayload* parts_ = nullptr;
  std::byte* result_ = nullptr;
  std::byte* own_ = nullptr;    // what this node has of its own and other nodes' headers
  std::byte* spare_ = nullptr;  // where it is put together with others
  int node_;
  int partner_;
  uint64_t sequence_ = 0;
  Stage stage_ = kDone;
  int round_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_ROUNDS_HEADER_EXCHANGE_HPP_
