// Outbox: tracks the states of an operation to another node.
#include "onesided/window/put_queue.hpp"

#include <chrono>
#include <new>
#include <thread>
#include <utility>

#include "core/base/first_count.hpp"

namespace hsgd {
namespace {

// If nothing has changed, the ages of operations are checked at this interval.
constexpr int64_t kAgesNs = 10'000'000;

Error out_of_memory(int rank) {
  return Error(HSGD_ERR_MEMORY, rank,
               "put_notify: out of memory in an earlier write; make a new NotifiedWindow");
}

}  // namespace

Outbox::Outbox(std::unique_ptr<Rma> rma, uint32_t capacity, double timeout_s, bool forgiving,
               const RankNames& names)
    : rma_(std::move(rma)),
      capacity_(capacity),
      timeout_s_(timeout_s),
      forgiving_(forgiving),
      names_(names),
      last_ticket_(first_count()) {}

std::string Outbox::describe(const Notification& notification) const {
  return text("version %llu for slot %u of rank %d",
              static_cast<unsigned long long>(notification.version), notification.slot,
              names_.of(notification.target));
}

void Outbox::check_network() const {
  if (is_without_memory_) throw out_of_memory(-1);
  if (failure_) throw *failure_;
}

void Outbox::look_for_failure() {
  if (!failure_) failure_ = rma_->failure(Rma::kAll);
  check_network();
}

// Throws if an operation to `target` has failed: it may have left half of its data there, and
// nothing may follow it.
void Outbox::check_target(int target) const {
  check_network();
  const auto found = failures_.find(target);
  if (found != failures_.end()) throw found->second;
}

bool Outbox::post(const std::vector<Piece>& pieces, const Notification& notification,
                  uint64_t* ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_target(notification.target);
  if (operations_.size() >= capacity_) return false;
  operations_.push_back({notification, last_ticket_ + 1, now_ns(), 0});
  note_oldest();
  try {
    open_.insert(last_ticket_ + 1);
    operations_.back().sent = rma_->post(pieces, notification);
  } catch (...) {
    abandon_newest(notification.target);
    throw;
  }
  *ticket = ++last_ticket_;
  return true;
}

// Abandons the newest operation; called while an exception of its writes is handled. Some of them
// may have begun, without a version after them: nothing more may go to that target.
void Outbox::abandon_newest(int target) noexcept {
  open_.erase(operations_.back().ticket);
  operations_.pop_back();
  note_oldest();
  try {
    try {
      throw;
    } catch (const Error& error) {
      failures_.emplace(target, error);
      if (!rma_->drives_itself()) failure_ = error;
    } catch (const std::bad_alloc&) {
      failures_.emplace(target, out_of_memory(names_.of(target)));
    }
  } catch (const std::bad_alloc&) {
    is_without_memory_ = true;
  }
}

void Outbox::drive() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  look_for_failure();
  if (rma_->drives_itself() && nothing_new()) return;
  settle_all();
}

void Outbox::settle_all() {
  rma_->drive();
  look_for_failure();
  for (auto operation = operations_.begin(); operation != operations_.end();) {
    if (settle(*operation)) {
      open_.erase(operation->ticket);
      operation = operations_.erase(operation);
      note_oldest();
    } else {
      ++operation;
    }
  }
}

// Finishes all open operations. A network that drives itself does so in its own close(). If
// failures are forgiven, a rank that accepts nothing is awaited only while others still make
// progress.
void Outbox::finish_open(const Deadline& deadline) noexcept {
  constexpr std::chrono::microseconds kBetweenLooks{50};
  constexpr double kPatienceS = 1.0;
  Deadline patience(kPatienceS);
  size_t left = operations_.size();
  try {
    if (rma_->drives_itself() || failure_ || is_without_memory_) return;
    while (!abandoned_.load()) {
      settle_all();
      if (operations_.empty() || deadline.passed()) return;
      if (std::exchange(left, operations_.size()) != left) patience = Deadline(kPatienceS);
      if (forgiving_ && patience.passed()) return;
      std::this_thread::sleep_for(kBetweenLooks);
    }
  } catch (const std::exception&) {
    is_without_memory_ |= !failure_;
  }
}

void Outbox::note_oldest() noexcept {
  const int target = operations_.empty() ? -1 : operations_.front().notification.target;
  oldest_target_.store(target, std::memory_order_relaxed);
}

// Returns true if nothing has changed; waiting threads wake up often, mostly for other reasons.
bool Outbox::nothing_new() {
  const uint64_t news = rma_->news();
  const int64_t now = now_ns();
  if (news == news_ && now - looked_ns_ < kAgesNs) return true;
  news_ = news;
  looked_ns_ = now;
  return false;
}

// Returns true if nothing is left to do for the operation, delivered or not.
bool Outbox::settle(const Operation& operation) {
  const int target = operation.notification.target;
  const bool finished = rma_->done(operation.sent);
  std::optional<Error> failure = rma_->failure(target);
  if (!failure && !finished) failure = overdue(operation);
  if (!failure) return finished;
  if (!rma_->drives_itself()) {
    failure_ = failure;
    throw Error(*failure);
  }
  failures_.emplace(target, *failure);
  undelivered_.emplace(operation.ticket, target);
  return true;
}

std::optional<Error> Outbox::overdue(const Operation& operation) const {
  if (forgiving_) return std::nullopt;
  if (static_cast<double>(now_ns() - operation.since_ns) < timeout_s_ * 1e9) return std::nullopt;
  const int name = names_.of(operation.notification.target);
  return Error(
      HSGD_ERR_TIMEOUT, name,
      "put_notify: " + describe(operation.notification) +
          text(" was not delivered within %g s; rank %d does not answer", timeout_s_, name));
}

bool Outbox::done(uint64_t ticket) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_network();
  const auto lost = undelivered_.find(ticket);
  if (lost != undelivered_.end()) throw failures_.at(lost->second);
  return open_.count(ticket) == 0;
}

bool Outbox::empty() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!operations_.empty()) return false;
  if (!undelivered_.empty()) throw failures_.at(undelivered_.begin()->second);
  return true;
}

std::string Outbox::oldest(int* target) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  *target = operations_.empty() ? -1 : operations_.front().notification.target;
  return operations_.empty() ? "none" : describe(operations_.front().notification);
}

bool Outbox::close(const Deadline& deadline) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  finish_open(deadline);
  const bool unfinished =
      failure_ || is_without_memory_ || !operations_.empty() || abandoned_.load();
  if ((!unfinished || rma_->drives_itself()) && rma_->close(deadline)) return true;
  rma_.release();  // the network may still use the requests and the window
  return false;
}

}  // namespace hsgd
