// Futex calls and the idle back-off.
#include "core/os/wait.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>

namespace hsgd {

// The futex calls do not use FUTEX_PRIVATE_FLAG: several processes map the word. Weak: tests count
// the calls.
__attribute__((weak)) void futex_wait(std::atomic<uint32_t>& word, uint32_t expected,
                                      int64_t timeout_ns) {
  timespec timeout{};
  timeout.tv_sec = timeout_ns / 1'000'000'000;
  timeout.tv_nsec = timeout_ns % 1'000'000'000;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &timeout, nullptr,
          0);
}

__attribute__((weak)) int futex_wake(std::atomic<uint32_t>& word, int most) {
  const long woken =
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, most, nullptr, nullptr, 0);
  return static_cast<int>(std::max(0L, woken));
}

void pause_ms(int64_t ms) {
  timespec time{};
  time.tv_nsec = ms * 1'000'000;
  ::nanosleep(&time, nullptr);
}

void Waiter::Idle::pause() {
  if (pauses_ < policy_.spin) {
    ++pauses_;
    cpu_relax();
    return;
  }
  // A message in flight takes many looks, and a sleep between two looks would delay it for long.
  constexpr int64_t kDrivenYieldNs = 20'000'000;
  if (yield_end_ns_ == 0) {
    yield_end_ns_ =
        now_ns() + (driven_ ? std::max(policy_.yield_ns, kDrivenYieldNs) : policy_.yield_ns);
  }
  sched_yield();
  if (yield_end_ns_ > 0 && now_ns() >= yield_end_ns_) yield_end_ns_ = -1;
}

int64_t Waiter::Idle::next_sleep_ns(int64_t max_sleep_ns) {
  constexpr int64_t kFirstSleepNs = 50'000;
  constexpr int64_t kShare = 8;
  const int64_t now = now_ns();
  if (sleeps_since_ns_ == 0) sleeps_since_ns_ = now;
  constexpr int64_t kDrivenSleepNs = 100'000;
  const int64_t longest =
      std::min({policy_.sleep_ns, max_sleep_ns, driven_ ? kDrivenSleepNs : INT64_MAX});
  if (policy_.all_rings) return longest;
  // Something that cannot ring, such as a message, is noticed late by at most this share of the
  // wait.
  return std::min(longest, std::max(kFirstSleepNs, (now - sleeps_since_ns_) / kShare));
}

// Returns false before the first sleep, or before the time of the first one: reading the clock
// takes time.
bool Waiter::Idle::time_to_check() {
  if (yield_end_ns_ >= 0) return false;
  const int64_t now = now_ns();
  if (now - checked_ns_ < policy_.sleep_ns) return false;
  checked_ns_ = now;
  return true;
}

}  // namespace hsgd
