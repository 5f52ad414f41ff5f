// Which sizes are chosen from times: made-up ones, of machines that are simple enough to know.
#include "collectives/context/tuning.hpp"
#include "support/check.hpp"

namespace {

using hsgd::Tuning;

hsgd_options options() {
  hsgd_options options;
  hsgd_options_default(&options);
  return options;
}

// An allreduce in one step reads the inputs of all ranks, in two each rank its share of them.
struct Machine {
  int ranks;
  double meeting_us;
  double us_per_kib;
  std::vector<double> operator()(size_t bytes, const std::vector<Tuning>& tunings) const {
    std::vector<double> us;
    for (const Tuning& tuning : tunings) {
      const double kib = static_cast<double>(bytes) / 1024;
      us.push_back(bytes <= tuning.allreduce_bytes ? meeting_us + us_per_kib * kib * ranks
                                                   : 3 * meeting_us + us_per_kib * kib * 3);
    }
    return us;
  }
};

Tuning chosen(int ranks, const hsgd::MeasureTunings& measure) {
  return hsgd::choose_tuning(options(), ranks, false, measure);
}

}  // namespace

TEST("the more inputs a rank reads, the sooner an allreduce takes two steps") {
  const auto limit = [](int ranks) {
    return chosen(ranks, Machine{ranks, 1.0, 0.12}).allreduce_bytes;
  };
  CHECK(limit(2) == 32 << 10);
  CHECK(limit(4) == 16 << 10);
  CHECK(limit(8) == 2 << 10);
  CHECK(limit(16) == 1 << 10);
}

TEST("who reads less than all inputs keeps one step for 4096 bytes, and for what allreduces take") {
  CHECK(chosen(16, Machine{16, 1.0, 0.12}).oneshot_bytes == 4096);
  CHECK(chosen(4, Machine{4, 1.0, 0.12}).oneshot_bytes == 16 << 10);
}

TEST("noise in which two steps look slow cannot make a rank read more than 64 KiB in one") {
  const auto noisy = [](size_t, const std::vector<Tuning>& tunings) {
    std::vector<double> us(tunings.size(), 1000.0);
    us.back() = 1.0;
    return us;
  };
  for (const int ranks : {2, 3, 4, 7, 8, 16, 64}) {
    const size_t bytes = chosen(ranks, noisy).allreduce_bytes;
    CHECK(bytes <= Tuning::kMostOneshotBytes);
    CHECK(bytes * static_cast<size_t>(ranks) <= 64 << 10);
  }
}

TEST("with many ranks, too, measurements decide from 16 KiB of all inputs on") {
  CHECK(chosen(64, Machine{64, 0.5, 0.12}).allreduce_bytes == 256);
  CHECK(chosen(64, Machine{64, 2.0, 0.12}).allreduce_bytes == 512);
  CHECK(chosen(64, Machine{64, 100.0, 0.12}).allreduce_bytes == 1 << 10);
  CHECK(chosen(64, Machine{64, 2.0, 0.12}).oneshot_bytes == 4096);
}

TEST("one disturbed measurement of one step does not end its range") {
  int calls = 0;
  const auto disturbed = [&](size_t bytes, const std::vector<Tuning>& tunings) {
    std::vector<double> us = Machine{16, 100.0, 0.12}(bytes, tunings);
    if (tunings[0].allreduce_bytes == 0 && ++calls == 1) us[1] = 1e6;
    return us;
  };
  CHECK(chosen(16, disturbed).allreduce_bytes == 4 << 10);
  CHECK(calls == 3);
}

TEST("a limit that was given is that of all collectives, and is not measured") {
  hsgd_options given = options();
  given.oneshot_bytes = 100;
  const Tuning tuning = hsgd::choose_tuning(given, 16, false, Machine{16, 1.0, 0.12});
  CHECK(tuning.oneshot_bytes == 100 && tuning.allreduce_bytes == 100);
}

TEST("nothing is measured where ranks share cores") {
  const auto never = [](size_t, const std::vector<Tuning>&) -> std::vector<double> {
    CHECK(false);
    return {};
  };
  const Tuning tuning = hsgd::choose_tuning(options(), 64, true, never);
  CHECK(tuning.allreduce_bytes == 16 << 10 && tuning.oneshot_bytes == 16 << 10);
  CHECK(tuning.chunk_bytes == Tuning().chunk_bytes);
}
