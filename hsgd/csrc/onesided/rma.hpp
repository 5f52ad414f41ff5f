// One-sided writes into the segments of ranks on other nodes: what a notified window needs from a
// network, and no more.
//
// Owns the interface. Implementations: mpi/rma.cpp (PMPI_* only), onesided/tcp_rma.cpp (TCP). Never
// interprets the bytes. Only flush() may block, and is called when what it waits for is done
// already.
#ifndef HSGD_ONESIDED_RMA_HPP_
#define HSGD_ONESIDED_RMA_HPP_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "base/error.hpp"
#include "hsgd_core.h"
#include "os/wait.hpp"

namespace hsgd {

class HSGD_API Rma {
 public:
  using Ticket = uint32_t;

  virtual ~Rma() = default;
  // Once, before anybody may write here. `arrived`: called in a thread of the network's own after
  // a version came, a rank is lost or, while somebody awaits tickets, the one of a version is done;
  // never called by a network that does not drive itself.
  virtual void start(std::function<void()> arrived) { (void)arrived; }
  // Everything goes on without calls; of what waits for one rank the least `order` goes first, and
  // writes of one order arrive as they were started; it may be closed at any time; what fails for
  // one rank goes on for the others.
  virtual bool drives_itself() const { return false; }
  // One more (+1) or one fewer (-1) awaits tickets. Who was not told finds out when it looks.
  virtual void await_tickets(int change) { (void)change; }
  // Of such a network: another number whenever done() or failure() may say something new.
  virtual uint64_t news() const { return 0; }
  // Whether the network has learned that a rank will write nothing any more.
  virtual bool lost(int rank) const {
    (void)rank;
    return false;
  }
  // The epoll descriptor that all connections belong to; -1: there is none. A child of fork closes
  // them, so that a peer learns of this process's end although the child lives on.
  virtual int descriptor() const { return -1; }
  // Of a network that drives itself: why nothing reaches a rank any more. A ticket of such a rank
  // may be done although it was not delivered, so ask this afterwards.
  virtual std::optional<Error> failure(int target) const {
    (void)target;
    return std::nullopt;
  }
  // Of such a network: why it serves nobody any more.
  virtual std::optional<Error> broken() const { return std::nullopt; }
  // So that the next puts do not fail for lack of memory when some of them are on their way; not of
  // a network that drives itself, which drops them.
  virtual void reserve(size_t tickets) { (void)tickets; }
  // Of a network that drives itself: nothing that was put for the rank is read any more, whatever
  // of it is on its way, and its tickets are done. The connection ends.
  virtual void drop(int target) noexcept { (void)target; }
  // Starts a write at `offset` of the target's segment; `data` stays as it is until done().
  virtual Ticket put(int target, const void* data, size_t bytes, size_t offset, uint32_t order) = 0;
  // Starts the atomic replacement of the 8 bytes at `offset`; `version` as above.
  virtual Ticket replace(int target, const uint64_t* version, size_t offset, uint32_t order) = 0;
  // Drives progress. Says true once per ticket: the caller's memory is free then, no more.
  virtual bool done(Ticket ticket) = 0;
  // Everything put or replaced so far has reached the target's memory.
  virtual void flush(int target) = 0;
  // Makes what others wrote here visible to loads, and drives progress.
  virtual void sync() = 0;
  // Collective over all ranks: gives the network's view of the segment back. False: the others did
  // not come in time, and it stays.
  virtual bool close(const Deadline& deadline) noexcept = 0;
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_RMA_HPP_
