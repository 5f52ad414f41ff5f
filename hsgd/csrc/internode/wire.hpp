// The leaders' part of a two-level collective: headers and slices between nodes.
//
// Owns the order of messages and sums between nodes. Each part of a slice goes to its owner, who
// adds in node order (direct exchange): every element is summed in one fixed order, whatever the
// chunking, and a node sends and receives 2 (N - 1) / N of the bytes. Never touches flags in shared
// memory and never blocks.
#ifndef HSGD_INTERNODE_WIRE_HPP_
#define HSGD_INTERNODE_WIRE_HPP_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/call_signature.hpp"
#include "internode/transport.hpp"
#include "kernels/reduce.hpp"

namespace hsgd {

struct WireCounters {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

// How float32 travels between nodes as a 16-bit format. Partial sums are rounded when they are
// sent, the owner's own too, so that no result depends on who owns it; the owner sums them in
// float32 and rounds once more, and that is what every node gets.
struct Narrowing {
  Conversion conversion;      // without functions: elements travel as they are
  ReduceFn reduce = nullptr;  // of the 16-bit format
  static constexpr size_t kElementBytes = 2;
  bool active() const { return conversion.narrow != nullptr; }
};

// How elements are summed, by dtype and op; `divisor` belongs to the last level.
struct Reduction {
  ReduceFn reduce = nullptr;
  CopyFn copy = nullptr;
  size_t element_bytes = 0;
  double divisor = 1.0;
  Narrowing narrowing = {};
};

// [begin, end) of part `index` of `count` elements in `parts` parts whose bounds are cache lines
// where possible.
struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t count() const { return end - begin; }
};
Range part_of(uint64_t count, int parts, int index, size_t element_bytes);

// A set of messages that are waited for together.
class Messages {
 public:
  explicit Messages(Transport& transport) : transport_(transport) {}
  void send(int node, Channel channel, const void* data, size_t bytes, WireCounters& counters);
  void receive(int node, Channel channel, void* data, size_t bytes, WireCounters& counters);
  bool all_done();
  bool progressed();  // since the last call

 private:
  Transport& transport_;
  std::vector<Transport::Ticket> pending_;
  bool progressed_ = false;
};

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

// The memory in which a leader receives what other nodes send and, where that is not as it lies in
// the rings, prepares what it sends: for each slot one part per node.
struct Mailboxes {
  std::byte* in = nullptr;
  size_t in_bytes = 0;       // of a part
  std::byte* out = nullptr;  // for what is narrowed
  size_t out_bytes = 0;
};

// Sums slices over nodes, several chunks in flight.
class SliceExchange {
 public:
  // `slice_bytes`: the largest slice of one chunk; `slots`: chunks in flight; `narrows`: some
  // reductions will narrow, which takes memory.
  SliceExchange(Transport& transport, size_t slice_bytes, size_t slots, bool narrows,
                WireCounters& counters);
  void start(const Reduction& reduction);
  // The slice of the next chunk is complete on this node; it is replaced by the sum over nodes.
  void begin(std::byte* slice, uint64_t count);
  bool progress();  // true when anything moved on
  uint64_t begun() const { return begun_; }
  uint64_t finished() const { return finished_; }  // chunks whose slice is final, in order
  // For other exchanges while this one rests.
  Mailboxes mailboxes() const {
    return {inboxes_.get(), part_bytes_, outboxes_.get(), out_part_bytes_};
  }

 private:
  enum class Phase { kIdle, kScatter, kGather, kFinished };
  struct Chunk {
    explicit Chunk(Transport& transport)
        : receives(transport), sends(transport), results(transport) {}
    Phase phase = Phase::kIdle;
    std::byte* slice = nullptr;
    uint64_t count = 0;
    std::byte* data = nullptr;    // what is sent: the slice, or it narrowed
    std::byte* inbox = nullptr;   // parts of other nodes
    std::byte* outbox = nullptr;  // for the narrowed slice
    Messages receives;
    Messages sends;
    Messages results;
  };
  bool advance(Chunk& chunk, bool may_spread);
  Range part_at(const Chunk& chunk, int node) const;
  void reduce_own_part(Chunk& chunk);
  void spread_own_part(Chunk& chunk);

  Transport& transport_;
  WireCounters& counters_;
  size_t part_bytes_;
  size_t out_part_bytes_;
  Reduction reduction_;
  size_t element_bytes_ = 0;  // as sent
  std::unique_ptr<std::byte[]> inboxes_;
  std::unique_ptr<std::byte[]> outboxes_;
  std::vector<Chunk> chunks_;
  std::vector<const void*> inputs_;
  uint64_t begun_ = 0;
  uint64_t finished_ = 0;
};

// Passes chunks of a broadcast down a tree of nodes: a chain for large payloads, which sends every
// byte once per link, a binomial tree for small ones, which is shallow.
class TreeBroadcast {
 public:
  TreeBroadcast(Transport& transport, size_t slots, WireCounters& counters);
  void start(int root_node, bool chain);
  bool is_root() const { return parent_ < 0; }
  // The next chunk: on the root's node its data, elsewhere where it goes.
  void begin(std::byte* data, size_t bytes);
  bool progress();
  uint64_t begun() const { return begun_; }
  uint64_t arrived() const { return arrived_; }  // chunks that lie complete on this node, in order
  uint64_t finished() const {
    return finished_;
  }  // chunks that are also passed on: their slots are free

 private:
  struct Chunk {
    explicit Chunk(Transport& transport) : receive(transport), sends(transport) {}
    std::byte* data = nullptr;
    size_t bytes = 0;
    Messages receive;
    Messages sends;
  };
  Transport& transport_;
  WireCounters& counters_;
  int parent_ = -1;
  std::vector<int> children_;
  std::vector<Chunk> chunks_;
  uint64_t begun_ = 0;
  uint64_t arrived_ = 0;
  uint64_t finished_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_INTERNODE_WIRE_HPP_
