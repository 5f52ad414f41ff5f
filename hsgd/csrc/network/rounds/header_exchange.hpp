// HeaderExchange: exchanges headers between nodes before results are written, with the payloads
// that travel beside them.
//
// Sends the messages, round by round, and merges the headers: after the last round all nodes have
// the same one. Number and order of messages do not depend on what a node called. Once a sender
// knows of two ranks that differ, its messages have no payload. Never touches flags in shared
// memory and never blocks.
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

// Facts that ranks exchange before an alltoall, because each knows only its own counts.
struct ExchangeNote {
  uint64_t imbalance = 0;  // sums to 0 over all ranks if the sent counts are the expected ones
  uint64_t pieces = 0;     // number of pieces per block; the maximum over ranks counts
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

// Header that the first leader sends for its node, and then for more and more nodes, before data
// moves. The payload of small collectives follows it.
struct WireHeader {
  uint64_t sequence;
  int32_t status;  // hsgd_status: HSGD_ERR_SIGNATURE when ranks of these nodes differ
  uint32_t stop;   // 1 if a rank of these nodes asks all to stop
  uint64_t payload_bytes;
  Call call;   // of the first rank
  Call other;  // of a rank that differs, with HSGD_ERR_SIGNATURE
  ExchangeNote note;
};

class HeaderExchange {
 public:
  // Maximum bytes behind a header. The same on all nodes, because other nodes may have called
  // anything.
  struct Room {
    size_t payload = 0;  // of small collectives, for any group of nodes
    size_t part = 0;     // of a RoundPayload: to a node in a round,
    size_t whole = 0;    // and to a partner
  };
  HeaderExchange(Transport& transport, const RoundSchedule& rounds, const Room& room,
                 WireCounters& counters);
  // Returns the bytes that such an object allocates.
  static size_t buffer_bytes(const RoundSchedule& rounds, const Room& room);
  // Starts an exchange. `result`: receives the payload of all nodes, unless ranks differ. May be
  // the same address as `payload`.
  void start(const WireHeader& header, const Payload& payload, MergeFn merge, std::byte* result);
  // `parts` must stay valid until the exchange is done, or another one begins.
  void start(const WireHeader& header, RoundPayload* parts);
  bool done();
  size_t most_part_bytes() const { return round_bytes_ - sizeof(WireHeader); }
  const WireHeader& header() const { return *header_of(own_); }  // of all nodes, once done

 private:
  enum Stage { kTake, kRounds, kGive, kDone };
  static WireHeader* header_of(std::byte* message) {
    return reinterpret_cast<WireHeader*>(message);
  }
  static std::byte* payload_of(std::byte* message) { return message + sizeof(WireHeader); }
  // Return the message from a node of the group, or to it; index 0 is also the partner's.
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
  const size_t own_bytes_;                 // maximum bytes of a message: this node's own,
  const size_t round_bytes_;               // of a round,
  const size_t fold_bytes_;                // and between partners
  std::unique_ptr<std::byte[]> messages_;  // two of this node's own, then inbox and outbox
  std::byte* inbox_;
  std::byte* outbox_;  // of parts
  Messages pending_;
  MergeFn merge_;
  RoundPayload* parts_ = nullptr;
  std::byte* result_ = nullptr;
  std::byte* own_ = nullptr;    // this node's message: headers and data merged so far
  std::byte* spare_ = nullptr;  // target of the next merge
  int node_;
  int partner_;
  uint64_t sequence_ = 0;
  Stage stage_ = kDone;
  int round_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_ROUNDS_HEADER_EXCHANGE_HPP_
