// What nodes tell one another before data moves, and the small payloads that travel beside it.
//
// Owns the messages, round by round, and how headers are put together: after the last round all
// nodes have the same one. Never touches flags in shared memory and never blocks.
#ifndef HSGD_INTERNODE_HEADER_EXCHANGE_HPP_
#define HSGD_INTERNODE_HEADER_EXCHANGE_HPP_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "base/call_signature.hpp"
#include "internode/messages.hpp"
#include "internode/round_schedule.hpp"

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

// What local rank 0 tells of its node, and then of ever more nodes, before any data moves; the
// payload of small collectives follows.
struct WireHeader {
  uint64_t sequence;
  int64_t status;  // hsgd_status: HSGD_ERR_SIGNATURE when ranks of these nodes differ
  uint64_t payload_bytes;
  Call call;   // of the first rank
  Call other;  // of one that differs, with HSGD_ERR_SIGNATURE
  ExchangeNote note;
};

// A payload of a node, or of a group of nodes whose payloads have been merged.
struct Payload {
  const std::byte* data = nullptr;
  size_t bytes = 0;
};

// How the payloads of consecutive groups of nodes become one, written to `out`, which is apart from
// all of them. `is_last`: of all nodes. Returns its bytes.
using MergeFn =
    std::function<size_t(const std::vector<Payload>& parts, std::byte* out, bool is_last)>;

class HeaderExchange {
 public:
  // `payload_bytes`: the most that any group of nodes has.
  HeaderExchange(Transport& transport, const RoundSchedule& rounds, size_t payload_bytes,
                 WireCounters& counters);
  // `result`: where the payload of all nodes goes, unless ranks differ. May be where `payload` is.
  void start(const WireHeader& header, const Payload& payload, MergeFn merge, std::byte* result);
  bool done();
  const WireHeader& header() const { return *header_of(own_); }  // of all nodes, when done

 private:
  enum Stage { kTake, kRounds, kGive, kDone };
  static WireHeader* header_of(std::byte* message) {
    return reinterpret_cast<WireHeader*>(message);
  }
  static std::byte* payload_of(std::byte* message) { return message + sizeof(WireHeader); }
  std::byte* message(int index) { return messages_.get() + static_cast<size_t>(index) * stride_; }
  void begin_stage();
  void begin_round();
  void end_stage();
  void next_stage();
  void merge(const std::vector<std::byte*>& parts, bool is_last);
  void merge_round();
  void send(int node);
  void receive(int node, std::byte* message);

  Transport& transport_;
  const RoundSchedule& rounds_;
  WireCounters& counters_;
  size_t stride_;
  std::unique_ptr<std::byte[]> messages_;  // two of this node's own, then those that come in
  Messages pending_;
  MergeFn merge_;
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

#endif  // HSGD_INTERNODE_HEADER_EXCHANGE_HPP_
