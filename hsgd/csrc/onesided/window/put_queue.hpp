// Outbox: queues operations to other nodes: bounded, driven by its callers, each with a deadline.
//
// Owns their number, their ages, and their failures: after the first failure all calls fail with
// it; over a network that drives itself, only calls for the failed rank. Waits only in close(), has
// no thread of its own, and never touches this rank's segment.
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
#include "core/base/rank_names.hpp"
#include "network/transport/rma.hpp"

namespace hsgd {

class Outbox {
 public:
  // `forgiving`: an undelivered operation stays in progress and is no failure.
  Outbox(std::unique_ptr<Rma> rma, uint32_t capacity, double timeout_s, bool forgiving,
         const RankNames& names = {});

  // Starts an operation; `ticket` grows by one with each. Returns false, having done nothing, if
  // the queue is full.
  bool post(const std::vector<Piece>& pieces, const Notification& notification, uint64_t* ticket);
  // Calls Rma::drive(). Returns at once if another thread does so.
  void drive();
  // Returns true if the operation's memory may be used again and the target was notified. Throws if
  // that will never happen.
  bool done(uint64_t ticket) const;
  bool empty() const;  // true if all are done
  // Returns a text such as "version 4 for slot 3 of rank 2" for the oldest operation, and its rank
  // in `target`.
  std::string oldest(int* target) const;
  // Returns the rank of the oldest operation, -1 if there is none. Never waits for another thread,
  // which MPI may block for as long as that rank does not answer.
  int oldest_target() const { return oldest_target_.load(std::memory_order_relaxed); }
  // Makes close() return false without doing anything, if the network needs all ranks to close.
  void abandon() { abandoned_.store(true); }
  // Finishes all operations, then closes the network. Returns false if that failed: then the
  // network may still use this rank's memory.
  bool close(const Deadline& deadline) noexcept;
  // Call the same functions of Rma.
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

  std::string describe(const Notification& notification) const;
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
  RankNames names_;
  std::atomic<bool> abandoned_{false};  // partner: close(), perhaps on another thread
  uint64_t last_ticket_;
  std::list<Operation> operations_;  // in the order of posting
  std::atomic<int> oldest_target_{-1};
  std::set<uint64_t> open_;  // their tickets
  uint64_t news_ = 0;        // of the network, at the last look
  int64_t looked_ns_ = 0;
  std::optional<Error> failure_;         // of the network
  std::map<int, Error> failures_;        // of single ranks
  std::map<uint64_t, int> undelivered_;  // tickets, and the rank that failed
  bool is_without_memory_ = false;       // so that a failure could not be recorded
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_WINDOW_PUT_QUEUE_HPP_
