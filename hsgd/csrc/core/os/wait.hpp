// Waiting that leaves the core to other threads: spin, yield, then sleep on a futex in shared
// memory.
//
// Holds deadlines, the tick clock and the doorbell protocol. A rank sleeps on its own doorbell or
// on its group's. The writer of a flag that sleepers may wait for rings the doorbell; this is a
// system call only if a rank really sleeps. Never waits without a deadline.
#ifndef HSGD_CORE_OS_WAIT_HPP_
#define HSGD_CORE_OS_WAIT_HPP_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#include "core/base/error.hpp"

namespace hsgd {

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Returns a counter that takes a few nanoseconds to read; TickClock converts differences to
// nanoseconds.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<uint64_t>(now_ns());
#endif
}

class TickClock {
 public:
  TickClock() : start_ticks_(ticks()), start_ns_(now_ns()) {}
  // Returns the nanoseconds of a difference of ticks, at the mean rate since construction.
  uint64_t to_ns(uint64_t tick_count) const {
    const auto passed = static_cast<double>(ticks() - start_ticks_);
    if (passed <= 0) return 0;
    return static_cast<uint64_t>(static_cast<double>(tick_count) *
                                 (static_cast<double>(now_ns() - start_ns_) / passed));
  }

 private:
  uint64_t start_ticks_;
  int64_t start_ns_;
};

// A check that a waiting rank makes now and then; it throws if the wait cannot succeed any more.
class Watch {
 public:
  virtual ~Watch() = default;
  virtual void check() = 0;
};

class Deadline {
 public:
  using Interrupted = int (*)();  // of hsgd_options; may be nullptr

  // `watch`: another check that may end the wait; may be nullptr.
  explicit Deadline(double timeout_s, Interrupted interrupted = nullptr, Watch* watch = nullptr)
      : timeout_s_(timeout_s),
        end_ns_(now_ns() + static_cast<int64_t>(timeout_s * 1e9)),
        interrupted_(interrupted),
        watch_(watch) {}
  int64_t remaining_ns() const { return end_ns_ - now_ns(); }
  bool passed() const { return remaining_ns() <= 0; }
  double timeout_s() const { return timeout_s_; }
  // Returns true if the wait was interrupted. Code that waits for the deadline asks this now and
  // then, and gives up if it is true.
  bool interrupted() const { return interrupted_ != nullptr && interrupted_() != 0; }
  bool has_watch() const { return watch_ != nullptr; }
  // Returns a deadline from now on, with the same interruption and watch.
  Deadline renewed(double timeout_s) const { return Deadline(timeout_s, interrupted_, watch_); }
  void check_watch() const {
    if (watch_ != nullptr) watch_->check();
  }

 private:
  double timeout_s_;
  int64_t end_ns_;
  Interrupted interrupted_;
  Watch* watch_;
};

// Lies in shared memory. `asleep` counts the threads that sleep or are about to; any rank
// increments `rings`.
struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> asleep;
};
static_assert(sizeof(Doorbell) == 64, "one cache line");

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns);
int futex_wake(std::atomic<uint32_t>& word, int most);  // returns how many threads it woke
void pause_ms(int64_t ms);  // ms is below 1000; a signal may shorten the pause

// Wakes at most `most` sleepers and returns how many it woke. Call it after a sequentially
// consistent store to the flag. That store and this load are ordered, and so are the sleeper's
// change of `asleep` and its last look at the flag: one side sees the other, so no wake-up is lost.
inline int ring(Doorbell& bell, int most = INT_MAX) {
  if (bell.asleep.load(std::memory_order_seq_cst) == 0) return 0;
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  return futex_wake(bell.rings, most);
}

enum class Step { kDone, kProgress, kIdle };

// Calls `watch`; if it throws because the wait cannot succeed any more, calls `step` once more,
// because something may have come since its last call: this process may have been stopped in
// between for longer than its deadline. An interruption by the user is passed on in any case.
template <class StepFunction>
Step check_once(StepFunction& step, Watch& watch) {
  try {
    watch.check();
    return Step::kIdle;
  } catch (const Error& error) {
    if (error.code() == HSGD_ERR_INTERRUPTED) throw;
    const Step state = step();
    if (state == Step::kIdle) throw;
    return state;
  }
}

struct WaitPolicy {
  int spin = 64;                  // pauses before yielding; 0 when ranks outnumber cores
  int64_t yield_ns = 50'000;      // then yield that long before sleeping
  int64_t sleep_ns = 20'000'000;  // longest sleep between two looks at the peers
  bool all_rings = false;         // everything waited for rings: looks are only for the peers
  int (*progress)() = nullptr;    // of hsgd_options
  bool may_stay_awake = false;  // while `progress` returns non-zero; false if ranks outnumber cores
};

class Waiter {
 public:
  Waiter(Doorbell& bell, const WaitPolicy& policy) : bell_(bell), policy_(policy) {}

  // Calls `step`, which must not block, until it returns kDone. Returns the ticks spent idle,
  // without the first polls of a spell: reading the clock takes longer than they do. `max_sleep_ns`
  // bounds a single sleep; it is small if `step` drives something that cannot ring, such as MPI.
  template <class StepFunction>
  uint64_t run(StepFunction&& step, Watch& watch, int64_t max_sleep_ns) {
    uint64_t idle_ticks = 0;
    for (;;) {
      Step state = step();
      while (state == Step::kProgress) state = step();
      Idle idle(policy_);
      while (state == Step::kIdle) {
        if (idle.polls()) {
          state = step();
          continue;
        }
        const uint64_t start = ticks();
        idle.drive();
        const bool sleeps = idle.may_sleep();
        if (!sleeps) idle.pause();
        idle_ticks += ticks() - start;
        state = sleeps ? sleep_once(step, idle, max_sleep_ns, idle_ticks) : step();
        if (state == Step::kIdle && idle.time_to_check()) state = check_once(step, watch);
      }
      if (state == Step::kDone) return idle_ticks;
    }
  }

 private:
  // One spell without progress: polls, then pauses, then yields, then may sleep, unless `progress`
  // keeps it awake.
  class Idle {
   public:
    explicit Idle(const WaitPolicy& policy) : policy_(policy) {}
    bool may_sleep() const { return yield_end_ns_ < 0 && !(driven_ && policy_.may_stay_awake); }
    void drive() { driven_ = policy_.progress != nullptr && policy_.progress() != 0; }
    // Returns true while it is too early to pause: a cache line on its way arrives sooner.
    bool polls() { return pauses_ < std::min(policy_.spin, kPolls) && ++pauses_ > 0; }
    void pause();
    int64_t next_sleep_ns(int64_t max_sleep_ns);
    bool time_to_check();

   private:
    static constexpr int kPolls = 32;
    const WaitPolicy& policy_;
    int pauses_ = 0;
    int64_t yield_end_ns_ = 0;  // 0: not yielding yet, < 0: yielded enough
    int64_t sleeps_since_ns_ = 0;
    int64_t checked_ns_ = 0;
    bool driven_ = false;  // `progress` may have more to do
  };

  struct Asleep {  // also resets the count if `step` throws
    explicit Asleep(Doorbell& of) : bell(of) {
      bell.asleep.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Asleep() { bell.asleep.fetch_sub(1, std::memory_order_relaxed); }
    Asleep(const Asleep&) = delete;
    Asleep& operator=(const Asleep&) = delete;
    Doorbell& bell;
  };

  template <class StepFunction>
  Step sleep_once(StepFunction& step, Idle& idle, int64_t max_sleep_ns, uint64_t& idle_ticks) {
    Step state;
    {
      const Asleep asleep(bell_);
      // Orders `asleep` before the loads in `step`, which are only acquire loads; see ring().
      std::atomic_thread_fence(std::memory_order_seq_cst);
      const uint32_t rings = bell_.rings.load(std::memory_order_seq_cst);
      state = step();  // the last look, after `asleep` is visible
      if (state == Step::kIdle) {
        const uint64_t start = ticks();
        futex_wait(bell_.rings, rings, idle.next_sleep_ns(max_sleep_ns));
        idle_ticks += ticks() - start;
      }
    }
    return state == Step::kIdle ? step() : state;
  }

  Doorbell& bell_;
  WaitPolicy policy_;
};

}  // namespace hsgd

#endif  // HSGD_CORE_OS_WAIT_HPP_
