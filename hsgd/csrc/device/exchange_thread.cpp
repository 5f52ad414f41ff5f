// ExchangeThread: waits for the device without occupying a core, and runs the collectives in order.
#include "device/exchange_thread.hpp"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "bindings/c/handles.hpp"
#include "core/base/error.hpp"
#include "core/base/status.hpp"
#include "core/os/signal_mask.hpp"
#include "core/os/wait.hpp"

namespace hsgd {
namespace {

// The polling of the device, which cannot wake a thread: constantly at first, then from time to
// time.
class Looks {
 public:
  void pause() {
    waited_ns_ = now_ns() - begin_ns_;
    if (waited_ns_ < kSpinNs) {
      for (int i = 0; i < 32; ++i) cpu_relax();
    } else if (waited_ns_ < kYieldNs) {
      ::sched_yield();
    } else {
      // The thread is late by at most a twentieth of the wait.
      const timespec time{0, static_cast<long>(std::clamp(waited_ns_ / 20, kShortNs, kLongNs))};
      ::nanosleep(&time, nullptr);
    }
  }
  int64_t waited_ns() const { return waited_ns_; }
  // Returns true once per 20 ms of the wait: then the caller looks for failures.
  bool is_time_to_ask() {
    if (waited_ns_ - asked_ns_ < kAskNs) return false;
    asked_ns_ = waited_ns_;
    return true;
  }

 private:
  static constexpr int64_t kSpinNs = 5'000;
  static constexpr int64_t kYieldNs = 50'000;
  static constexpr int64_t kShortNs = 10'000;
  static constexpr int64_t kLongNs = 1'000'000;
  static constexpr int64_t kAskNs = 20'000'000;
  const int64_t begin_ns_ = now_ns();
  int64_t waited_ns_ = 0;
  int64_t asked_ns_ = 0;
};

}  // namespace

ExchangeThread::ExchangeThread(const Signals& signals, std::vector<hsgd_comm*> comms,
                               DeviceGuard* guard)
    : signals_(signals), comms_(std::move(comms)), guard_(guard) {
  for (const hsgd_comm* comm : comms_) comm->communicator->check_background();
  const SignalsBlocked blocked;  // the thread inherits the signal mask
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    throw_error(HSGD_ERR_SYSTEM, -1,
                "the thread for collectives of a device cannot be started: %s; raise the "
                "limit of processes (ulimit -u, pids.max of the cgroup)",
                error.code().message().c_str());
  }
  ::pthread_setname_np(thread_.native_handle(), "hsgd-device");
}

void ExchangeThread::submit(HostTask task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(task));
  work_.notify_one();
}

bool ExchangeThread::has_failed(hsgd_error* err) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_ && err != nullptr) *err = *failure_;
  return failure_.has_value();
}

void ExchangeThread::note(const hsgd_error& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return;
    failure_ = error;
  }
  if (guard_ != nullptr) guard_->release();
}

void ExchangeThread::fail(const hsgd_error& error) {
  note(error);
  for (hsgd_comm* comm : comms_) hsgd_comm_abort(comm);  // the collectives in progress
  work_.notify_one();
}

bool ExchangeThread::wait_until_idle(double timeout_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                        [&] { return !executes_ && queue_.empty(); });
}

void ExchangeThread::finish() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
    work_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void ExchangeThread::serve() {
  for (const hsgd_comm* comm : comms_) {
    comm->communicator->set_background_thread(std::this_thread::get_id());
  }
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return ends_ || !queue_.empty() || (failure_ && !has_told_); });
    if (tell_if_failed(lock)) continue;
    if (queue_.empty()) return;
    HostTask next = std::move(queue_.front());
    queue_.pop_front();
    executes_ = true;
    lock.unlock();
    if (next.kind == HostTask::Kind::kAgree) execute(next);
    if (await_device(next) && next.kind == HostTask::Kind::kExchange) execute(next);
    if (next.kind == HostTask::Kind::kExchange) signals_.may_copy.set(next.number);
    lock.lock();
    executes_ = false;
    idle_.notify_all();
  }
}

// Reports a new failure to the other ranks, outside of the lock. Returns true if there was one.
bool ExchangeThread::tell_if_failed(std::unique_lock<std::mutex>& lock) {
  if (!failure_ || has_told_) return false;
  has_told_ = true;
  const hsgd_error error = *failure_;
  lock.unlock();
  tell_others(error);
  lock.lock();
  return true;
}

// Waits for the device's signal. Returns false if it will not come.
bool ExchangeThread::await_device(const HostTask& task) {
  const Signal& signal =
      task.kind == HostTask::Kind::kExchange ? signals_.has_copied : signals_.has_passed;
  Looks looks;
  while (!signal.has_come(task.number)) {
    if (device_is_lost_.load(std::memory_order_acquire)) return false;
    looks.pause();
    if (!looks.is_time_to_ask()) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    tell_if_failed(lock);
    lock.unlock();
    if (task.is_guarded) look(looks.waited_ns());
  }
  return true;
}

void ExchangeThread::look(int64_t waited_ns) {
  hsgd_error error;
  if (guarded(&error, [&] { guard_->look(waited_ns); }) == HSGD_OK) return;
  note(error);
}

// Fails the communicators of the other ranks, because the data that they wait for will not come. A
// communicator that failed by itself has already notified its ranks.
void ExchangeThread::tell_others(const hsgd_error& error) {
  const bool is_of_others = error.code == HSGD_ERR_PEER_LOST || error.code == HSGD_ERR_TIMEOUT;
  const int own = comms_.front()->communicator->place().name();
  const Error told =
      is_of_others
          ? Error(static_cast<hsgd_status>(error.code), error.rank, error.message)
          : Error(HSGD_ERR_PEER_LOST, own, text("rank %d gave up: %s", own, error.message));
  for (const hsgd_comm* comm : comms_) {
    hsgd_error ignored;
    guarded(&ignored, [&] { comm->communicator->abandon(told); });
  }
}

void ExchangeThread::execute(HostTask& it) {
  hsgd_call call = it.call;
  if (!it.counts.empty()) call.counts = it.counts.data();
  if (!it.receive_counts.empty()) call.receive_counts = it.receive_counts.data();
  const hsgd_label label = {it.name == nullptr ? nullptr : it.name->c_str(), it.shape.data(),
                            static_cast<int32_t>(it.shape.size())};
  call.label = &label;
  hsgd_error error;
  if (!has_failed(nullptr)) {
    if (hsgd_comm_run(it.comm, &call, &error) == HSGD_OK) return;
    note(error);
  }
  if (it.result != nullptr) std::memset(it.result, 0xff, it.result_bytes);
}

}  // namespace hsgd
