// The states of an operation to another node.
#include "onesided/put_queue.hpp"

#include <algorithm>
#include <chrono>
#include <new>
#include <thread>

namespace hsgd {
namespace {

constexpr size_t kMostBytes = 1 << 30;  // of one write: MPI counts in int
// Where nothing has changed operations are looked at so often, for their age.
constexpr int64_t kAgesNs = 10'000'000;

Error out_of_memory(int rank) {
  return Error(HSGD_ERR_MEMORY, rank,
               "put_notify: out of memory in an earlier write; make a new NotifiedWindow");
}

std::string describe(const Notification& notification) {
  return text("version %llu for slot %u of rank %d",
              static_cast<unsigned long long>(notification.version), notification.slot,
              notification.target);
}

}  // namespace

void Outbox::check_network() const {
  if (is_without_memory_) throw out_of_memory(-1);
  if (failure_) throw *failure_;
}

// A failed operation may have left its target with half the data: nothing goes there any more.
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
  Operation& operation = operations_.emplace_back();
  operation.notification = notification;
  operation.ticket = last_ticket_ + 1;
  operation.since_ns = now_ns();
  operation.notifying = false;
  note_oldest();
  try {
    open_.insert(operation.ticket);
    start_writes(operation, pieces);
  } catch (...) {
    abandon_newest(notification.target);
    throw;
  }
  *ticket = ++last_ticket_;
  return true;
}

// Call while an exception of its writes is handled. Some of them may have begun, without a version
// after them: nothing goes there any more. Nor is the caller's memory read, who has it back.
void Outbox::abandon_newest(int target) noexcept {
  rma_->drop(target);
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
      failures_.emplace(target, out_of_memory(target));
    }
  } catch (const std::bad_alloc&) {
    is_without_memory_ = true;
  }
}

void Outbox::start_writes(Operation& operation, const std::vector<Piece>& pieces) {
  const Notification& to = operation.notification;
  size_t writes = 1;  // the version
  for (const Piece& piece : pieces) writes += (piece.bytes + kMostBytes - 1) / kMostBytes;
  operation.open.reserve(writes);
  rma_->reserve(writes);
  for (const Piece& piece : pieces) {
    for (size_t begin = 0; begin < piece.bytes; begin += kMostBytes) {
      operation.open.push_back(
          rma_->put(to.target, static_cast<const std::byte*>(piece.data) + begin,
                    std::min(kMostBytes, piece.bytes - begin), piece.offset + begin, to.order));
    }
  }
  if (!rma_->drives_itself()) return;
  operation.notifying = true;  // the network keeps the order
  operation.open.push_back(rma_->replace(to.target, &to.version, to.offset, to.order));
}

void Outbox::drive() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  if (!failure_) failure_ = rma_->broken();
  check_network();
  if (rma_->drives_itself() && nothing_new()) return;
  settle_all();
}

void Outbox::settle_all() {
  try {
    rma_->sync();
    for (auto operation = operations_.begin(); operation != operations_.end();) {
      if (settle(*operation)) {
        open_.erase(operation->ticket);
        operation = operations_.erase(operation);
        note_oldest();
      } else {
        ++operation;
      }
    }
  } catch (const Error& error) {
    failure_ = error;
    throw;
  }
}

// A network that drives itself does so in its own close().
void Outbox::finish_open(const Deadline& deadline) noexcept {
  constexpr std::chrono::microseconds kBetweenLooks{50};
  try {
    if (rma_->drives_itself() || failure_ || is_without_memory_) return;
    while (!abandoned_.load()) {
      settle_all();
      if (operations_.empty() || deadline.passed()) return;
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

// Threads that wait look whenever they are woken, mostly for something else.
bool Outbox::nothing_new() {
  const uint64_t news = rma_->news();
  const int64_t now = now_ns();
  if (news == news_ && now - looked_ns_ < kAgesNs) return true;
  news_ = news;
  looked_ns_ = now;
  return false;
}

// True when nothing is left to do for it, delivered or not.
bool Outbox::settle(Operation& operation) {
  if (!rma_->drives_itself()) {
    const bool finished = advance(operation);
    if (!finished) check_age(operation);
    return finished;
  }
  const int target = operation.notification.target;
  try {
    const bool finished = advance(operation);
    if (const auto failure = rma_->failure(target)) throw Error(*failure);
    if (!finished) check_age(operation);
    return finished;
  } catch (const Error& error) {
    failures_.emplace(target, error);
    undelivered_.emplace(operation.ticket, target);
    return true;
  }
}

// One step as far as it goes; true when all is done.
bool Outbox::advance(Operation& operation) {
  const Notification& notification = operation.notification;
  auto& open = operation.open;
  open.erase(std::remove_if(open.begin(), open.end(),
                            [&](Rma::Ticket ticket) { return rma_->done(ticket); }),
             open.end());
  if (!open.empty()) return false;
  if (operation.notifying) {
    rma_->flush(notification.target);
    return true;
  }
  if (follows_same_slot(operation)) return false;
  // Forbids that the target sees the version before the data.
  rma_->flush(notification.target);
  open.push_back(rma_->replace(notification.target, &notification.version, notification.offset,
                               notification.order));
  operation.notifying = true;
  return false;
}

// A later version may not be overwritten by an earlier one, whose data came later.
bool Outbox::follows_same_slot(const Operation& operation) const {
  for (const Operation& earlier : operations_) {
    if (earlier.ticket == operation.ticket) return false;
    if (earlier.notification.target == operation.notification.target &&
        earlier.notification.slot == operation.notification.slot) {
      return true;
    }
  }
  return false;
}

void Outbox::check_age(const Operation& operation) const {
  if (forgiving_) return;
  if (static_cast<double>(now_ns() - operation.since_ns) < timeout_s_ * 1e9) return;
  throw Error(HSGD_ERR_TIMEOUT, operation.notification.target,
              "put_notify: " + describe(operation.notification) +
                  text(" was not delivered within %g s; rank %d does not answer", timeout_s_,
                       operation.notification.target));
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
