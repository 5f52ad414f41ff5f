// Tuning: lists the candidates and chooses one.
#include "collectives/context/tuning.hpp"

#include <algorithm>

#include "node/segments/segment_layout.hpp"

namespace hsgd {
namespace {

// A choice other than the default must win by this much, against noise.
constexpr double kClearly = 0.95;

void set_oneshot_bytes(Tuning* tuning, size_t bytes) {
  tuning->allreduce_bytes = bytes;
  tuning->oneshot_bytes = std::max(bytes, tuning->oneshot_bytes);
}

struct OneshotRange {
  size_t least;
  size_t most;
};

// Returns the range of one-step allreduces, by the bytes read. If each rank reads all inputs, one
// step was faster than two up to some 16 KiB of inputs in total with 8 to 16 ranks on as many
// cores, as fast up to 64 KiB with 4 (docs/internals/scale.md), faster with 2
// (docs/performance.md). If one rank of many reads for all, two steps win from 20 to 40 KiB on;
// that was counted, not measured (benchmarks/simulation/cache_lines.py). If noise makes two steps
// look slow, the wrong choice must not cost more than twice the time for the rest of the
// communicator's life.
OneshotRange oneshot_range(int ranks) {
  const auto share = [&](size_t bytes) {
    return bytes / static_cast<size_t>(ranks) / kLine * kLine;
  };
  return {std::clamp(share(16 << 10), kLine, Tuning().oneshot_bytes),
          std::min(share(64 << 10), Tuning::kMostOneshotBytes)};
}

// The first of `tunings` is the default.
Tuning best_of(size_t bytes, const std::vector<Tuning>& tunings, const MeasureTunings& measure) {
  if (tunings.size() == 1) return tunings[0];
  const std::vector<double> seconds = measure(bytes, tunings);
  const auto best = std::min_element(seconds.begin(), seconds.end());
  const bool wins = *best < kClearly * seconds[0];
  return wins ? tunings[static_cast<size_t>(best - seconds.begin())] : tunings[0];
}

}  // namespace

Tuning Tuning::of(const hsgd_options& options, size_t oneshot_bytes, size_t chunk_bytes) {
  const auto given = [](int64_t option, size_t otherwise) {
    return option >= 0 ? static_cast<size_t>(option) : otherwise;
  };
  Tuning tuning;
  tuning.oneshot_bytes = given(options.oneshot_bytes, oneshot_bytes);
  tuning.allreduce_bytes = tuning.oneshot_bytes;
  tuning.chunk_bytes = given(options.chunk_bytes, chunk_bytes);
  if (options.nontemporal == 1) tuning.store = Store::kNonTemporal;
  return tuning;
}

Tuning choose_tuning(const hsgd_options& options, int ranks, bool shares_cores,
                     const MeasureTunings& measure) {
  constexpr size_t kLargeBytes = 512 << 10;
  // A rank that shares its core reads this much sooner than it gets two turns: with 3 to 64 ranks
  // on 2 cores one step was faster up to here.
  constexpr size_t kReadBytes = 1 << 20;
  constexpr size_t kLeastChunkBytes = 32 << 10;
  const size_t chunk_bytes = shares_cores ? Tuning().chunk_bytes : Tuning::most_chunk_bytes(ranks);
  Tuning tuning = Tuning::of(options, Tuning().oneshot_bytes, chunk_bytes);
  if (shares_cores) {  // the rest assumes one rank per core and its cache
    if (options.oneshot_bytes < 0) {
      set_oneshot_bytes(&tuning, std::clamp(kReadBytes / static_cast<size_t>(ranks),
                                            tuning.oneshot_bytes, Tuning::kMostOneshotBytes));
    }
    return tuning;
  }
  const OneshotRange range = oneshot_range(ranks);
  if (options.oneshot_bytes < 0) tuning.allreduce_bytes = range.least;
  std::vector<Tuning> candidates{tuning};
  if (options.nontemporal == 2) {
    candidates.push_back(tuning);
    candidates.back().store = Store::kNonTemporal;
  }
  tuning = best_of(kLargeBytes, candidates, measure);
  candidates = {tuning};
  for (size_t bytes = tuning.chunk_bytes / 2; bytes >= kLeastChunkBytes; bytes /= 2) {
    if (options.chunk_bytes >= 0) break;
    candidates.push_back(tuning);
    candidates.back().chunk_bytes = bytes;
  }
  tuning = best_of(kLargeBytes, candidates, measure);
  if (options.oneshot_bytes >= 0) return tuning;
  // Sizes grow until two steps that each move less beat one that moves all.
  Tuning two_steps = tuning;
  two_steps.allreduce_bytes = 0;
  Tuning one_step = tuning;
  one_step.allreduce_bytes = Tuning::kMostOneshotBytes;
  const auto two_are_faster = [&](size_t bytes) {
    const std::vector<double> seconds = measure(bytes, {two_steps, one_step});
    return seconds[1] >= seconds[0];
  };
  for (size_t bytes = 2 * range.least; bytes <= range.most; bytes *= 2) {
    if (two_are_faster(bytes) && two_are_faster(bytes)) break;  // noise seldom comes twice
    set_oneshot_bytes(&tuning, bytes);
  }
  return tuning;
}

}  // namespace hsgd
