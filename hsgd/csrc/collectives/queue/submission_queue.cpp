// Submissions: the queue, its thread, and the wait for a request.
#include "collectives/queue/submission_queue.hpp"

#include <pthread.h>

#include <algorithm>
#include <optional>
#include <system_error>

#include "core/base/error.hpp"
#include "core/base/first_count.hpp"
#include "core/base/status.hpp"
#include "core/os/signal_mask.hpp"

namespace hsgd {
namespace {

// The interval at which a waiting thread checks for an interrupt.
constexpr int64_t kAskNs = 20'000'000;
// Time that an interrupted wait leaves to a function of another thread: its collectives end at
// once.
constexpr int64_t kFunctionNs = 1'000'000'000;

std::vector<uint64_t> copied(const uint64_t* values, int size) {
  if (values == nullptr) return {};
  return std::vector<uint64_t>(values, values + size);
}

}  // namespace

Request::Request(const hsgd_call& call, int size)
    : call_(call),
      counts_(copied(call.counts, size)),
      receive_counts_(copied(call.receive_counts, size)) {
  if (call.counts != nullptr) call_.counts = counts_.data();
  if (call.receive_counts != nullptr) call_.receive_counts = receive_counts_.data();
  if (call.label == nullptr) return;
  label_ = *call.label;
  call_.label = &label_;
  if (label_.name != nullptr) {
    name_ = label_.name;
    label_.name = name_.c_str();
  }
  if (label_.shape != nullptr) {
    shape_.assign(label_.shape, label_.shape + label_.ndim);
    shape_.reserve(1);  // a shape of zero dimensions must not be nullptr
    label_.shape = shape_.data();
  }
}

Submissions::Submissions(Communicator& communicator, Execute execute)
    : communicator_(&communicator),
      execute_(execute),
      submitted_count_(first_count()),
      finished_count_(first_count()) {}

std::shared_ptr<Request> Submissions::submit(const hsgd_call& call) {
  if (call.kind == HSGD_FUNCTION) {
    communicator_->check_threads();
  } else {
    communicator_->check_background();
  }
  return push(call, true);
}

std::shared_ptr<Request> Submissions::push(const hsgd_call& call, bool needs_thread) {
  communicator_->check_mine();
  auto request = std::make_shared<Request>(call, communicator_->topology().size);
  const Lock lock(mutex_);
  if (is_in_function()) {
    turn_->inner.push_back(request);
  } else {
    if (needs_thread && !thread_.joinable()) start_thread();
    queue_.push_back(request);
    ++submitted_count_;
    if (!executing_ && needs_thread) work_.notify_one();
  }
  open_.fetch_add(1, std::memory_order_release);
  return request;
}

void Submissions::run_function(const hsgd_call& call) {
  hsgd_error error;
  const int status = wait(*push(call, false), -1, &error);
  if (status != HSGD_OK) throw Error(static_cast<hsgd_status>(status), error.rank, error.message);
}

void Submissions::start_thread() {
  const SignalsBlocked blocked;  // the thread inherits the signal mask
  try {
    thread_ = std::thread([self = weak_from_this().lock(), this] { work(); });
  } catch (const std::system_error& error) {
    throw_error(HSGD_ERR_SYSTEM, -1,
                "the thread for asynchronous collectives cannot be started: %s; raise the "
                "limit of processes (ulimit -u, pids.max of the cgroup)",
                error.code().message().c_str());
  }
  communicator_->set_background_thread(thread_.get_id());
  ::pthread_setname_np(thread_.native_handle(), "hsgd-progress");
}

void Submissions::work() {
  Lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return communicator_ == nullptr || (!executing_ && !queue_.empty()); });
    if (communicator_ == nullptr) return;
    execute_next(lock);
  }
}

// Executes the first request of `queue` outside of the lock.
void Submissions::execute(Lock& lock, Queue& queue) {
  const std::shared_ptr<Request> request = std::move(queue.front());
  queue.pop_front();
  Communicator& communicator = *communicator_;
  const hsgd_call& call = request->call();
  Turn turn{turn_, call.kind == HSGD_FUNCTION, {}};
  turn_ = &turn;
  lock.unlock();
  const int status = guarded(&request->outcome(), [&] {
    if (call.kind == HSGD_FUNCTION) return call.function(call.context);
    execute_(communicator, call);
  });
  lock.lock();
  turn_ = turn.outer;
  Queue& next = turn_ == nullptr ? next_ : turn_->inner;
  next.splice(next.begin(), turn.inner);
  interrupted_ = interrupted_ || status == HSGD_ERR_INTERRUPTED;
  request->finish();
  open_.fetch_sub(1, std::memory_order_release);
  finished_.notify_all();
}

// Executes the next request of the queue, and what that submits.
void Submissions::execute_next(Lock& lock) {
  executing_ = true;
  executes_function_ = queue_.front()->call().kind == HSGD_FUNCTION;
  executor_ = std::this_thread::get_id();
  execute(lock, queue_);
  const bool has_more = !next_.empty();  // else the lock was kept since the last notice
  while (!next_.empty()) execute(lock, next_);
  executing_ = executes_function_ = false;
  executor_ = {};
  finished_count_ += 1 + std::exchange(borrowed_, 0);
  if (has_more) finished_.notify_all();
  if (!queue_.empty()) work_.notify_one();
  const std::function<void()> then = std::exchange(then_, nullptr);
  if (then == nullptr) return;
  lock.unlock();
  then();
  lock.lock();
}

bool Submissions::after_collective(std::function<void()> then) {
  const Lock lock(mutex_);
  if (!is_executor() || is_in_function()) return false;
  then_ = std::move(then);
  return true;
}

// Throws in a signal handler that a collective of this thread calls: a wait would never end.
void Submissions::check_no_handler() const {
  if (!is_executor() || is_in_function()) return;
  throw_error(
      HSGD_ERR_SYSTEM, -1,
      "a signal handler waits for the collective that it interrupts; call collectives after "
      "the handler");
}

// Executes the next request within the function that this thread executes; returns false if there
// is none.
bool Submissions::execute_within(Lock& lock) {
  Turn* turn = turn_;
  while (turn != nullptr && turn->inner.empty()) turn = turn->outer;
  Queue& next = turn != nullptr ? turn->inner : !next_.empty() ? next_ : queue_;
  if (next.empty()) return false;
  if (&next == &queue_) ++borrowed_;
  execute(lock, next);
  return true;
}

// Asks the program whether it was interrupted; outside of the lock, because it may run any code.
bool Submissions::take_interrupt(Lock& lock) const {
  const auto interrupted =
      communicator_ == nullptr ? nullptr : communicator_->options().interrupted;
  if (interrupted == nullptr) return false;
  lock.unlock();
  const bool answer = interrupted() != 0;
  lock.lock();
  return answer;
}

template <class Finished>
Submissions::Waited Submissions::wait_until(Lock& lock, double timeout_s, const Request* awaited,
                                            Finished&& finished) {
  const auto may_execute = [&] {
    if (executing_ || queue_.empty()) return false;
    return queue_.front()->call().kind != HSGD_FUNCTION || queue_.front().get() == awaited;
  };
  std::optional<Deadline> deadline;
  if (timeout_s >= 0) deadline.emplace(std::min(timeout_s, 1e9));
  bool interrupted = false;
  std::optional<int64_t> interrupted_ns;
  while (!finished()) {
    if (!deadline && may_execute()) {
      execute_next(lock);
      interrupted |= std::exchange(interrupted_, false);
      continue;
    }
    if (deadline && deadline->passed() && !interrupted) return Waited::kTimeout;
    const int64_t left_ns = deadline && !interrupted ? deadline->remaining_ns() : kAskNs;
    finished_.wait_for(lock, std::chrono::nanoseconds(std::clamp<int64_t>(left_ns, 0, kAskNs)));
    if (finished()) break;
    // Repeated, because the end of another interrupted wait may reset it.
    if (!interrupted) interrupted = take_interrupt(lock);
    if (interrupted && communicator_ != nullptr) communicator_->stop_waiting(true);
    if (interrupted && !interrupted_ns) interrupted_ns = now_ns();
    if (interrupted && executes_function_ && now_ns() - *interrupted_ns > kFunctionNs) break;
  }
  if (!interrupted) return Waited::kDone;
  if (communicator_ != nullptr) communicator_->stop_waiting(false);
  return Waited::kInterrupted;
}

void Submissions::drain() {
  if (!is_mine()) return;  // the communicator reports that with a better message
  Lock lock(mutex_);
  check_no_handler();
  if (is_executor()) {
    while (!turn_->inner.empty()) execute(lock, turn_->inner);
    if (!std::exchange(interrupted_, false)) return;
    throw_error(HSGD_ERR_INTERRUPTED, -1,
                "the wait for earlier asynchronous calls was interrupted");
  }
  const uint64_t last = submitted_count_;
  if (wait_until(lock, -1, nullptr, [&] { return finished_count_ >= last; }) ==
      Waited::kInterrupted)
    throw_error(HSGD_ERR_INTERRUPTED, -1,
                "the wait for earlier asynchronous calls was interrupted");
}

int Submissions::wait(const Request& request, double timeout_s, hsgd_error* err) {
  Waited waited = Waited::kDone;
  if (!request.done()) {
    if (!is_mine()) {
      return report(err, HSGD_ERR_CLOSED, -1,
                    "this request belongs to another process, of which this one is a forked child");
    }
    Lock lock(mutex_);
    if (const int status = guarded(err, [&] { check_no_handler(); }); status != HSGD_OK)
      return status;
    if (is_executor()) {
      while (!request.done() && execute_within(lock)) continue;
      if (std::exchange(interrupted_, false)) {
        waited = Waited::kInterrupted;
      } else if (!request.done())
        return report(err, HSGD_ERR_SYSTEM, -1, "a function in the queue waits for its own end");
    } else {
      waited = wait_until(lock, timeout_s, &request, [&] { return request.done(); });
    }
  }
  if (waited == Waited::kTimeout) {
    return report(
        err, HSGD_ERR_PENDING, -1,
        text("not finished within %g s; it is still running, wait for it again", timeout_s)
            .c_str());
  }
  if (waited == Waited::kInterrupted)
    return report(err, HSGD_ERR_INTERRUPTED, -1, "the wait was interrupted");
  const hsgd_error& outcome = request.outcome();
  if (err != nullptr && outcome.code == HSGD_ERR_SIGNATURE)
    std::copy_n(outcome.sides, 2, err->sides);
  return report(err, static_cast<hsgd_status>(outcome.code), outcome.rank, outcome.message);
}

void Submissions::close() {
  Lock lock(mutex_);
  if (is_executor()) {
    while (execute_within(lock)) continue;
  } else {
    wait_until(lock, -1, nullptr, [&] { return finished_count_ == submitted_count_; });
  }
  communicator_ = nullptr;
  work_.notify_all();
  lock.unlock();
  if (thread_.get_id() == std::this_thread::get_id()) return thread_.detach();
  if (thread_.joinable()) thread_.join();
}

}  // namespace hsgd
