// System calls that ranks make to sleep and to wake one another, counted.
#include <linux/futex.h>
#include <sys/syscall.h>

#include <algorithm>
#include <climits>

#include "node/segments/node_group.hpp"
#include "support/ranks.hpp"

namespace {

std::atomic<int> sleeps{0};
std::atomic<int> wakes{0};

}  // namespace

namespace hsgd {

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns) {
  ++sleeps;
  const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &timeout, nullptr,
            0);
}

int futex_wake(std::atomic<uint32_t>& word, int most) {
  ++wakes;
  return static_cast<int>(::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, most,
                                    nullptr, nullptr, 0));
}

}  // namespace hsgd

namespace {

// The most calls that wake somebody in one of some barriers to which rank 0 comes when all others
// sleep.
int most_wakes(int size, uint32_t flat_ranks, int barriers) {
  hsgd_options options = ranks::small_steps();
  options.flat_ranks = flat_ranks;
  const std::string path = ranks::meeting_point();
  std::atomic<int> begun{0};
  int most = 0;
  ranks::run(size, [&](int rank) {
    hsgd_comm* comm = nullptr;
    hsgd_error error;
    CHECK_EQ(hsgd_comm_create_local(path.c_str(), rank, size, &options, &comm, &error), HSGD_OK);
    ++begun;
    if (rank == 0) {
      while (begun < size) std::this_thread::yield();
    }
    for (int i = 0; i < barriers; ++i) {
      if (rank == 0) {
        // Those that sleep wake every 20 ms to look at their peers, and may be counted again.
        const int slept = sleeps;
        while (sleeps < slept + 2 * size) std::this_thread::yield();
        const int before = wakes;
        CHECK_EQ(hsgd_comm_barrier(comm, &error), HSGD_OK);
        most = std::max(most, wakes - before);
      } else {
        CHECK_EQ(hsgd_comm_barrier(comm, &error), HSGD_OK);
      }
    }
    CHECK_EQ(hsgd_comm_barrier(comm, &error), HSGD_OK);
    hsgd_comm_destroy(comm);
  });
  return most;
}

}  // namespace

TEST("the last rank of a barrier wakes all others by one call for each group") {
  constexpr int kBarriers = 3;
  // Between the end of one barrier and the sleep in the next nobody calls anything.
  CHECK_EQ(most_wakes(6, 16, kBarriers), 1);
  CHECK_EQ(most_wakes(9, 1, kBarriers), 3);
  CHECK_EQ(most_wakes(24, 16, kBarriers), 3);
}
