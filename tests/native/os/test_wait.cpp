// Waiting: no wake-up is lost, waits end by progress or by their watch, deadlines pass.
#include <new>

#include "core/os/cpu_budget.hpp"
#include "core/os/wait.hpp"
#include "support/ranks.hpp"

namespace {

struct Patient : hsgd::Watch {
  void check() override {}
};

struct Impatient : hsgd::Watch {
  int left = 3;
  void check() override {
    if (--left == 0) throw hsgd::Error(HSGD_ERR_TIMEOUT, 7, "enough");
  }
};

constexpr int kRounds = 5 * ranks::kOperations;

}  // namespace

// Each side sleeps until the other has rung, with no spinning in between: a lost wake-up shows as
// a sleep to its full length.
TEST("no ring is lost between the last look at a flag and the sleep") {
  hsgd::Doorbell bells[2] = {};
  std::atomic<uint64_t> flags[2] = {};
  std::atomic<int> overslept{0};
  constexpr int64_t kLongNs = 10'000'000'000;
  ranks::run(2, [&](int side) {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      if (side == 0) {
        flags[1].store(round, std::memory_order_seq_cst);
        hsgd::ring(bells[1]);
      }
      while (flags[side].load(std::memory_order_acquire) != round) {
        bells[side].asleep.store(1, std::memory_order_seq_cst);
        const uint32_t rings = bells[side].rings.load(std::memory_order_seq_cst);
        if (flags[side].load(std::memory_order_seq_cst) != round) {
          const int64_t start = hsgd::now_ns();
          hsgd::futex_wait(bells[side].rings, rings, kLongNs);
          if (hsgd::now_ns() - start >= kLongNs) ++overslept;
        }
        bells[side].asleep.store(0, std::memory_order_relaxed);
      }
      if (side == 1) {
        flags[0].store(round, std::memory_order_seq_cst);
        hsgd::ring(bells[0]);
      }
    }
  });
  CHECK_EQ(overslept.load(), 0);
}

TEST("a waiter returns when its step is done, whether it spins, yields or sleeps") {
  for (const int spin : {0, 10, 100000}) {
    hsgd::Doorbell bells[2] = {};
    std::atomic<int> turn{0};
    ranks::run(2, [&](int side) {
      hsgd::WaitPolicy policy;
      policy.spin = spin;
      policy.yield_ns = spin == 0 ? 0 : 1000;
      hsgd::Waiter waiter(bells[side], policy);
      Patient watch;
      for (int round = 0; round < kRounds / 5; ++round) {
        const auto step = [&] {
          return turn.load(std::memory_order_acquire) == 2 * round + side ? hsgd::Step::kDone
                                                                          : hsgd::Step::kIdle;
        };
        waiter.run(step, watch, 1'000'000);
        turn.store(2 * round + side + 1, std::memory_order_seq_cst);
        hsgd::ring(bells[1 - side]);
      }
    });
    CHECK_EQ(turn.load(), 2 * (kRounds / 5));
  }
}

TEST("a waiter calls its step again at once as long as that makes progress") {
  hsgd::Doorbell bell{};
  hsgd::Waiter waiter(bell, {});
  Patient watch;
  int calls = 0;
  const auto step = [&] { return ++calls < 1000 ? hsgd::Step::kProgress : hsgd::Step::kDone; };
  CHECK_EQ(waiter.run(step, watch, 1), 0u);
  CHECK_EQ(calls, 1000);
}

TEST("where all that comes rings, a waiter looks when it is rung and for the sake of its peers") {
  hsgd::Doorbell bell{};
  std::atomic<bool> done{false};
  hsgd::WaitPolicy policy{0, 0};
  policy.all_rings = true;
  hsgd::Waiter waiter(bell, policy);
  Patient watch;
  int64_t calls = 0;
  const int64_t begin = hsgd::now_ns();
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    done.store(true);
    hsgd::ring(bell);
  });
  const auto step = [&] { return ++calls, done ? hsgd::Step::kDone : hsgd::Step::kIdle; };
  waiter.run(step, watch, policy.sleep_ns);
  const int64_t sleeps = (hsgd::now_ns() - begin) / policy.sleep_ns + 1;
  other.join();
  CHECK(calls <= 2 + 2 * sleeps);  // two before the first sleep, then before and after each
}

TEST("what a watch throws ends the wait and leaves the doorbell awake") {
  hsgd::Doorbell bell{};
  hsgd::WaitPolicy policy;
  policy.sleep_ns = 1'000'000;
  hsgd::Waiter waiter(bell, policy);
  Impatient watch;
  CHECK_THROWS(waiter.run([] { return hsgd::Step::kIdle; }, watch, 1'000'000), "enough");
  CHECK_EQ(bell.asleep.load(), 0u);
}

TEST("what a step throws in the last look before a sleep leaves the doorbell awake") {
  hsgd::Doorbell bell{};
  const hsgd::WaitPolicy policy{0, 0};
  hsgd::Waiter waiter(bell, policy);
  Patient watch;
  const auto step = [&] {
    if (bell.asleep != 0) throw std::runtime_error("differs");
    return hsgd::Step::kIdle;
  };
  CHECK_THROWS(waiter.run(step, watch, 1'000'000), "differs");
  CHECK_EQ(bell.asleep.load(), 0u);
}

// As it is for a process that was stopped past its deadline just before the look of its watch.
TEST("what comes before a watch throws counts, but not for an interruption") {
  struct Late : hsgd::Watch {
    explicit Late(hsgd_status status) : code(status) {}
    void check() override {
      came = true;
      throw hsgd::Error(code, 7, "given up");
    }
    hsgd_status code;
    bool came = false;
  };
  hsgd::Doorbell bell{};
  hsgd::Waiter waiter(bell, {});
  const auto wait_with = [&](Late& watch) {
    waiter.run([&] { return watch.came ? hsgd::Step::kDone : hsgd::Step::kIdle; }, watch, 1'000);
  };
  for (const hsgd_status code : {HSGD_ERR_TIMEOUT, HSGD_ERR_PEER_LOST}) {
    Late watch(code);
    wait_with(watch);
    CHECK(watch.came);
  }
  Late watch(HSGD_ERR_INTERRUPTED);
  CHECK_THROWS(wait_with(watch), "given up");
}

TEST("a deadline passes when its time is over and not before") {
  CHECK(hsgd::Deadline(0).passed());
  const hsgd::Deadline far(1e9);
  CHECK(!far.passed());
  CHECK(far.remaining_ns() > 999'999'000'000'000'000);
  CHECK_EQ(far.timeout_s(), 1e9);
}

TEST("ticks convert to nanoseconds, and at least one core is usable") {
  const hsgd::TickClock clock;
  const uint64_t start_ticks = hsgd::ticks();
  const int64_t start_ns = hsgd::now_ns();
  while (hsgd::now_ns() - start_ns < 20'000'000) hsgd::cpu_relax();
  const auto ns = static_cast<double>(clock.to_ns(hsgd::ticks() - start_ticks));
  const auto real = static_cast<double>(hsgd::now_ns() - start_ns);
  CHECK(ns > 0.5 * real && ns < 1.5 * real);
  const hsgd::Cores own = hsgd::own_cores();
  CHECK(hsgd::count_cores(own) >= 1);
  hsgd::Cores all = own;
  hsgd::add_cores(&all, own);
  CHECK(hsgd::count_cores(all) == hsgd::count_cores(own));
  CHECK(hsgd::count_cores(hsgd::Cores{{3, 1}, 100}) == 3);
  CHECK(hsgd::count_cores(hsgd::Cores{{3, 1}, 2}) == 2);
}
