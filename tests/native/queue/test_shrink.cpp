// Ranks as threads agree on who goes on: for the sanitizers, which see no other process.
#include <atomic>

#include "collectives/queue/communicator.hpp"
#include "support/ranks.hpp"

namespace {

std::unique_ptr<hsgd::Communicator> create(const std::string& path, int rank, int size,
                                           double timeout_s) {
  hsgd::Place place;
  place.rank = place.local_rank = rank;
  place.size = place.local_size = size;
  return std::make_unique<hsgd::Communicator>(path, nullptr, std::move(place), nullptr,
                                              ranks::small_steps(timeout_s));
}

// The sum of `value` over all ranks, by way of a small and of a large collective.
double sum(hsgd::Communicator& comm, double value) {
  std::vector<double> data(2000, value);
  comm.allreduce(data.data(), data.data(), 2, HSGD_FLOAT64, HSGD_SUM, nullptr);
  const double small = data[0];
  data.assign(data.size(), value);
  comm.allreduce(data.data(), data.data(), data.size(), HSGD_FLOAT64, HSGD_SUM, nullptr);
  CHECK_EQ(data.back(), small);
  return small;
}

// Ranks with a bit in `away` never come, and close when the others are through.
void shrink_without(int size, unsigned away, bool closes) {
  const std::string path = ranks::meeting_point();
  double expected = 0;
  int left = 0;
  for (int rank = 0; rank < size; ++rank) {
    if ((away >> rank & 1) != 0) continue;
    expected += rank;
    ++left;
  }
  std::atomic<int> through{0};
  ranks::run(size, [&](int rank) {
    auto comm = create(path, rank, size, 60);
    CHECK_EQ(sum(*comm, 1), size);
    if ((away >> rank & 1) != 0) {
      if (closes) comm.reset();
      while (through < left) std::this_thread::yield();
      if (closes) return;
      try {
        comm->barrier();
        CHECK(false && "a rank that was left out may go on");
      } catch (const hsgd::Error& error) {
        CHECK_EQ(error.code(), HSGD_ERR_CLOSED);
        CHECK_EQ(error.rank(), rank);
      }
      return;
    }
    // Two generations: what was shrunk shrinks again.
    const auto shrunk = comm->shrink(closes || away == 0 ? 60 : 3);
    comm.reset();
    CHECK_EQ(shrunk->topology().size, left);
    CHECK_EQ(sum(*shrunk, rank), expected);
    const auto again = shrunk->shrink(60);
    CHECK_EQ(sum(*again, rank), expected);
    ++through;
    while (through < left) std::this_thread::yield();
  });
}

}  // namespace

TEST("all ranks, or those that others left behind by closing, shrink to a working communicator") {
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (int size = 1; size <= 4; ++size) shrink_without(size, 0, false);
    shrink_without(4, 0b0101, true);
    shrink_without(3, 0b001, true);
  }
}

TEST("ranks that do not come are left out at the deadline, and told so") {
  shrink_without(3, 0b001, false);
  shrink_without(4, 0b0110, false);
}
