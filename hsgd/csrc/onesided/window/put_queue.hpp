// Operations to other nodes that are under way: bounded, driven by whoever calls, each with a
// deadline.
//
// Owns how many there may be, their ages, and whose failure is whose: after the first one all calls
// fail with it; over a network that drives itself only those for the rank that it is about. Never
// waits but in close(), has no thread of its own, and never touches this rank's segment.
#ifndef HSGD_ONESIDED_WINDOW_PUT_QUEUE_HPP_
#define HSGD_ONESIDED_WINDOW_PUT_QUEUE_HPP_

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "network/transport/rma.hpp"

namespace hsgd {

class Outbox {
 public:
  // `forgiving`: an operation that is not delivered stays under way, and is no failure.
  Outbox(std::unique_ptr<Rma> rma, uint32_t capacity, double timeout_s, bool forgiving);

  // Starts an operation; `ticket` grows by one with each. False, and nothing done, when as many as
  // fit are under way.
  bool post(const std::vector<Piece>& pieces, const Notification& notification, uint64_t* ticket);
  // As Rma::drive(). Returns at once when another thread does so.
  void drive();
  // Its memory may be used again, and the target was notified. Throws when it never will be.
  bool done(uint64_t ticket) const;
  bool empty() const;  // the same of all
  // "version 4 for slot 3 of rank 2", of the oldest operation; its rank in `target`.
  std::string oldest(int* target) const;
  // The rank of the oldest operation, -1 where none is under way; never waits for another thread,
  // which MPI may hold up for as long as that rank does not answer.
  int oldest_target() const { return oldest_target_.load(std::memory_order_relaxed); }
  // From here on close() of a network that needs all ranks for it does nothing, and says false.
  void abandon() { abandoned_.store(true); }
  // Finishes what is under way, then closes the network. False, where that could not be done: the
  // network may still use this rank's memory.
  bool close(const Deadline& deadline) noexcept;
  // As of Rma.
  void start(std::function<void()> arrived) { rma_->start(std::move(arrived)); }
  void await_tickets(int change) { rma_->await_tickets(change); }
  int descriptor() const { return rma_->descriptor(); }
  bool drives_itself() const { return rma_->drives_itself(); }
  bool lost(int rank) const { return rma_->lost(rank); }

 private:
  struct Operation {
    Notification notification;
    uint64_t ticket;
    int64_t since_ns;
    Rma::Ticket sent;  // the network's
  };

  bool nothing_new();
  void note_oldest() noexcept;
  void abandon_newest(int target) noexcept;
  void settle_all();
  void finish_open(const Deadline& deadline) noexcept;
  bool settle(const Operation& operation);
  std::optional<Error> overdue(const Operation& operation) const;
  void check_network() const;
  void look_for_failure();
  void check_target(int target) const;

  mutable std::mutex mutex_;
  std::unique_ptr<Rma> rma_;
  size_t capacity_;
  double timeout_s_;
  bool forgiving_;
  std::atomic<bool> abandoned_{false};  // partner: close(), perhaps on another thread
  uint64_t last_ticket_;
  std::list<Operation> operations_;  // in the order of posting
  std::atomic<int> oldest_target_{-1};
  std::set<uint64_t> open_;  // their tickets
  uint64_t news_ = 0;        // of the network, at the last look
  int64_t looked_ns_ = 0;
  std::optional<Error> failure_;         // of the network
  std::map<int, Error> failures_;        // of single ranks
  std::map<uint64_t, int> undelivered_;  // tickets, and whose failure that was
  bool is_without_memory_ = false;       // so that a failure could not be noted
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_WINDOW_PUT_QUEUE_HPP_
