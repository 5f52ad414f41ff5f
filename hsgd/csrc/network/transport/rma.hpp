// Rma: one-sided writes into the segments of ranks on other nodes, as a notified window needs them.
//
// Errors: failure() returns what has failed for a rank, or for all. Only post() throws: that
// failure, or what keeps it from beginning. Implementations: network/tcp_window/rma.cpp (TCP), and
// network/transport/ordered_rma.cpp for networks that keep no order (network/mpi/rma.cpp). Never
// interprets the bytes. Waits only in close(), as far as MPI allows: its calls may wait for a rank
// that does not answer.
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

// Bytes to write at `offset` of the target's segment.
struct Piece {
  const void* data;
  size_t bytes;
  size_t offset;
};

// A notification: its target, and where its slot lies in the target's segment.
struct Notification {
  int target = 0;
  uint32_t slot = 0;
  uint64_t version = 0;
  size_t offset = 0;
  uint32_t order = 0;  // the least goes first to a target; one slot has one order
};

class HSGD_API Rma {
 public:
  using Ticket = uint64_t;
  static constexpr int kAll = -1;

  virtual ~Rma() = default;
  // Returns true if operations continue without calls. Then, of operations that wait for one rank,
  // the least `order` goes first; close() is possible at any time; and a failure of one rank does
  // not stop operations to others.
  bool drives_itself() const { return drives_itself_; }
  // Returns the epoll descriptor of all connections; -1: there is none. A forked child closes these
  // connections, so that a peer learns of this process's end although the child lives on.
  int descriptor() const { return descriptor_; }
  // For a network that drives itself: returns a number that changes whenever done() or failure()
  // may have news.
  uint64_t news() const { return news_.load(std::memory_order_acquire); }
  // Adds (+1) or removes (-1) a thread that awaits tickets. Without it, a thread finds news only
  // when it looks.
  void await_tickets(int change) {
    awaiting_.fetch_add(change, std::memory_order_seq_cst);  // partner: is_awaited()
  }

  // Call it once, before any rank may write here. `arrived` is called in a thread of the network
  // after a version came, after a rank was lost or, while a thread awaits tickets, after one is
  // done. A network that does not drive itself never calls it.
  virtual void start(std::function<void()> arrived) { (void)arrived; }
  // Starts an operation: the version, an atomic store of 8 bytes, arrives after the pieces, and
  // after earlier versions for the same slot. The pieces must stay unchanged until done(). If it
  // throws because memory ran out, the pieces are not read any more.
  virtual Ticket post(const std::vector<Piece>& pieces, const Notification& notification) = 0;
  // Advances operations as far as possible without waiting, and makes visible what others wrote
  // here.
  virtual void drive() = 0;
  // Returns true if the pieces are free, and the version has arrived or never will: ask failure()
  // afterwards.
  virtual bool done(Ticket ticket) const = 0;
  // Returns why nothing reaches a rank any more, or, for kAll, why the network serves no rank.
  virtual std::optional<Error> failure(int rank) const = 0;
  // Returns true if the network has learned that a rank will write nothing more.
  virtual bool lost(int rank) const {
    (void)rank;
    return false;
  }
  // Gives up the network's view of the segment; collective over all ranks if the network does not
  // drive itself. Returns false if the others did not come in time; then the view stays.
  virtual bool close(const Deadline& deadline) noexcept = 0;

 protected:
  explicit Rma(bool drives_itself) : drives_itself_(drives_itself) {}
  void set_descriptor(int descriptor) { descriptor_ = descriptor; }
  // Partner: news(), with an acquire. Sequentially consistent because the caller must not read
  // is_awaited() before it: a thread that counts itself in later sees the news.
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
