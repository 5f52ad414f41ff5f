// Transport: messages between the leaders of nodes, as two-level collectives need them.
//
// Implementations: network/mpi/transport.cpp (PMPI_* only), network/tcp_messages/transport.cpp
// (sockets) and tests/native/support/transport_inproc.cpp (threads of one process). Never
// interprets the bytes. Nothing here blocks.
#ifndef HSGD_NETWORK_TRANSPORT_TRANSPORT_HPP_
#define HSGD_NETWORK_TRANSPORT_TRANSPORT_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/os/wait.hpp"
#include "hsgd_core.h"

namespace hsgd {

// Messages of one channel between two nodes arrive in the order of sending.
enum class Channel : uint8_t {
  kHeader = 1,
  kScatter = 2,
  kGather = 3,
  kBroadcast = 4,
  kExchange = 5
};

// The first collective in which a node takes no part, and why. Fixed width, because it travels
// between nodes.
struct Parting {
  static constexpr uint64_t kNever = UINT64_MAX;
  enum How : int32_t { kGaveUp = 0, kClosed = 1, kTimedOut = 2 };

  Parting() = default;
  Parting(uint64_t first_missed, int about, How parts, const std::string& why)
      : sequence(first_missed), rank(about), how(parts) {
    why.copy(line, std::min(why.size(), sizeof line - 1));
  }

  uint64_t sequence = kNever;  // the first collective without this node
  int32_t rank = -1;           // the name of the rank that the line is about, or -1
  int32_t how = kGaveUp;       // or: that rank closed its communicator, or its wait timed out
  char line[496] = {};
};
static_assert(sizeof(Parting) == 512, "the same on all nodes");

// When a message was posted, among all of a transport, and from or to which node.
struct MessageOrder {
  uint64_t number = 0;  // from 1
  int node = -1;
  bool receives = false;
};

// Returns the answer of awaited_node(), from slots that have an `order` and know whether they are
// `complete`.
template <class Slots>
int awaited_among(const Slots& slots) {
  MessageOrder first;
  for (const auto& slot : slots) {
    if (slot.order.number == 0 || slot.complete) continue;
    const bool is_sooner = slot.order.receives == first.receives ? slot.order.number < first.number
                                                                 : slot.order.receives;
    if (first.number == 0 || is_sooner) first = slot.order;
  }
  return first.node;
}

class HSGD_API Transport {
 public:
  using Ticket = uint32_t;

  virtual ~Transport() = default;
  virtual int node_rank() const = 0;
  virtual int node_count() const = 0;
  // Returns the epoll descriptor of all connections; -1: there is none. A forked child closes what
  // it watches: otherwise peers would not learn that the parent has died.
  virtual int descriptor() const { return -1; }

  // Posts a message. The buffer belongs to the transport until done() has returned true.
  virtual Ticket send(int node, Channel channel, const void* data, size_t bytes) = 0;
  virtual Ticket receive(int node, Channel channel, void* data, size_t capacity_bytes) = 0;
  // Drives progress. Returns true once per ticket, which is then free for reuse.
  virtual bool done(Ticket ticket) = 0;

  // Returns the node whose message has been awaited longest; if there is none, the node that has
  // left a message untaken longest; -1: none.
  virtual int awaited_node() const = 0;

  // Returns the name of the leader of a node in errors; -1: not known.
  virtual int leader_of(int /*node*/) const { return -1; }

  // Tells the other nodes that this one parts, as far as they can be reached. Only the first call
  // counts.
  virtual void part(const Parting& parting) noexcept = 0;
  // Returns true once for each other node that has parted, with its message in `parting`.
  virtual bool heard(Parting* parting) = 0;
  // Ends operations in flight: cancels receives and waits for sends. Returns false if buffers may
  // still be in use.
  virtual bool quiesce(const Deadline& deadline) noexcept = 0;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TRANSPORT_TRANSPORT_HPP_
