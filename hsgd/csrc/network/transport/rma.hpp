// One-sided writes into the segments of ranks on other nodes: what a notified window needs from a
// network, and no more.
//
// Owns the interface, and its one model of failures: failure() says what has failed for a rank, or
// for all, and only post() throws, that or what keeps it from beginning. Implementations:
// network/tcp_window/rma.cpp (TCP), and network/transport/ordered_rma.cpp for networks that keep no
// order (network/mpi/rma.cpp). Never interprets the bytes, and never waits but in close(), as far
// as MPI allows: its calls may wait for a rank that does not answer.
#ifndef HSGD_NETWORK_TRANSPORT_RMA_HPP_
#define HSGD_NETWORK_TRANSPORT_RMA_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "core/base/error.hpp"
#include "core/os/wait.hpp"
#include "hsgd_core.h"

namespace hsgd {

// Bytes for the target's segment, at `offset` of it.
struct Piece {
  const void* data;
  size_t bytes;
  size_t offset;
};

// Where a notification goes, and where its slot lies in the target's segment.
struct Notification {
  int target = 0;
  uint32_t slot = 0;
  uint64_t version = 0;
  size_t offset = 0;
  uint32_t order = 0;  // of what waits for one target the least goes first; one slot, one order
};

class HSGD_API Rma {
 public:
  using Ticket = uint64_t;
  static constexpr int kAll = -1;

  virtual ~Rma() = default;
  // Everything goes on without calls; of what waits for one rank the least `order` goes first; it
  // may be closed at any time; what fails for one rank goes on for the others.
  bool drives_itself() const { return drives_itself_; }
  // The epoll descriptor that all connections belong to; -1: there is none. A child of fork closes
  // them, so that a peer learns of this process's end although the child lives on.
  int descriptor() const { return descriptor_; }
  // Of a network that drives itself: another number whenever done() or failure() may say something
  // new.
  uint64_t news() const { return news_.load(std::memory_order_acquire); }
  // One more (+1) or one fewer (-1) awaits tickets. Who was not told finds out when it looks.
  void await_tickets(int change) {
    awaiting_.fetch_add(change, std::memory_order_seq_cst);  // partner: is_awaited()
  }

  // Once, before anybody may write here. `arrived`: called in a thread of the network's own after
  // a version came, a rank is lost or, while somebody awaits tickets, one is done; never called by
  // a network that does not drive itself.
  virtual void start(std::function<void()> arrived) { (void)arrived; }
  // Starts an operation: the version, an atomic store of 8 bytes, arrives after the pieces, and
  // after the versions for the same slot that were posted before. The pieces stay as they are until
  // done(). Where it throws for lack of memory, nothing of them is read any more.
  virtual Ticket post(const std::vector<Piece>& pieces, const Notification& notification) = 0;
  // Takes operations as far as they go without waiting, and makes visible what others wrote here.
  virtual void drive() = 0;
  // The pieces are free, and the version has arrived, or never will: ask failure() afterwards.
  virtual bool done(Ticket ticket) const = 0;
  // Why nothing reaches a rank any more, or, of kAll, why the network serves nobody.
  virtual std::optional<Error> failure(int rank) const = 0;
  // Whether the network has learned that a rank will write nothing any more.
  virtual bool lost(int rank) const {
    (void)rank;
    return false;
  }
  // Collective over all ranks where the network does not drive itself: gives its view of the
  // segment back. False: the others did not come in time, and it stays.
  virtual bool close(const Deadline& deadline) noexcept = 0;

 protected:
  explicit Rma(bool drives_itself) : drives_itself_(drives_itself) {}
  void set_descriptor(int descriptor) { descriptor_ = descriptor; }
  // Partner: news(), with an acquire. Sequentially consistent because whoever calls must not look
  // at is_awaited() before that: who counts itself in later sees the news.
  void count_news() { news_.fetch_add(1, std::memory_order_seq_cst); }
  bool is_awaited() const { return awaiting_.load(std::memory_order_seq_cst) > 0; }

 private:
  const bool drives_itself_;
  int descriptor_ = -1;
  std::atomic<uint64_t> news_{0};
  std::atomic<int> awaiting_{0};
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TRANSPORT_RMA_HPP_
