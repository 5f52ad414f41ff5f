// Tuning: chooses the fastest sizes and stores from measurements made when a communicator is
// created.
//
// Holds the candidates and the rules of choice. The caller measures, with its real collectives.
// Only times depend on the choice, never results.
#ifndef HSGD_COLLECTIVES_CONTEXT_TUNING_HPP_
#define HSGD_COLLECTIVES_CONTEXT_TUNING_HPP_

#include <cstddef>
#include <functional>
#include <vector>

#include "core/kernels/reduce.hpp"
#include "hsgd_core.h"

namespace hsgd {

// The settings of allreduces inside a node.
struct Tuning {
  // The largest choice if the options leave it open; memory is reserved for it.
  static constexpr size_t kMostOneshotBytes = 32 << 10;
  // Few ranks have room for longer steps, and so wait for fewer of them: on 16 cores, 16 ranks took
  // a sixth less time for 32 MB than with steps of half the length (docs/internals/scale.md).
  static constexpr int kFewRanks = 16;
  static constexpr size_t most_chunk_bytes(int ranks) {
    return ranks <= kFewRanks ? 256 << 10 : 128 << 10;
  }

  size_t oneshot_bytes = 4096;    // up to this payload one synchronization is enough
  size_t allreduce_bytes = 4096;  // the same for allreduces, in which each rank reads all inputs
  size_t chunk_bytes = 128 << 10;
  Store store = Store::kOrdinary;  // into shared memory

  // Returns the values of the options, and these sizes if the options leave them open.
  static Tuning of(const hsgd_options& options, size_t oneshot_bytes, size_t chunk_bytes);
};

// Returns the seconds of one allreduce of `bytes` on the slowest rank, for each tuning; the same
// answer on all ranks.
using MeasureTunings =
    std::function<std::vector<double>(size_t bytes, const std::vector<Tuning>& tunings)>;

// Chooses all settings that the options leave open for the ranks of a node. Collective through
// `measure`, which is not called if ranks share cores.
Tuning choose_tuning(const hsgd_options& options, int ranks, bool shares_cores,
                     const MeasureTunings& measure);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_TUNING_HPP_
