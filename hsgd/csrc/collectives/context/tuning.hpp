// What is fastest on this machine, in its present state: decided by measuring when a communicator
// is made.
//
// Owns the candidates and the rules of choice. Never measures by itself: the caller does, with its
// real collectives. Only times depend on the choice, never results.
#ifndef HSGD_COLLECTIVES_CONTEXT_TUNING_HPP_
#define HSGD_COLLECTIVES_CONTEXT_TUNING_HPP_

#include <cstddef>
#include <functional>
#include <vector>

#include "core/kernels/reduce.hpp"
#include "hsgd_core.h"

namespace hsgd {

// How allreduces inside a node are done.
struct Tuning {
  // What may be chosen at most when the options leave it open; memory is reserved for it.
  static constexpr size_t kMostOneshotBytes = 32 << 10;
  // Few ranks have room for longer steps, of which there are fewer to wait for: on 16 cores 16
  // ranks took a sixth less for 32 MB than in half as long ones (docs/internals/scale.md).
  static constexpr int kFewRanks = 16;
  static constexpr size_t most_chunk_bytes(int ranks) {
    return ranks <= kFewRanks ? 256 << 10 : 128 << 10;
  }

  size_t oneshot_bytes = 4096;    // up to this payload one synchronization is enough
  size_t allreduce_bytes = 4096;  // the same in allreduces, where each rank reads all inputs whole
  size_t chunk_bytes = 128 << 10;
  Store store = Store::kOrdinary;  // into shared memory

  // What the options say, and these sizes where they leave them open.
  static Tuning of(const hsgd_options& options, size_t oneshot_bytes, size_t chunk_bytes);
};

// Seconds that one allreduce of `bytes` takes on the slowest rank, for each of the tunings; the
// same answer on all ranks.
using MeasureTunings =
    std::function<std::vector<double>(size_t bytes, const std::vector<Tuning>& tunings)>;

// Chooses what the options leave open for the ranks of a node. Collective through `measure`, which
// is not called where ranks share cores. `combines`: small sums are made by one rank.
Tuning choose_tuning(const hsgd_options& options, int ranks, bool shares_cores, bool combines,
                     const MeasureTunings& measure);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_TUNING_HPP_
