// How much a collective does at once: the limit of the small form, the bytes of a pipeline step,
// and how many leaders carry it between nodes.
//
// Owns the arithmetic, whose answers are the same on all ranks, and the tuning that the start-up
// measurement chose. Never touches data.
#ifndef HSGD_COLLECTIVES_CONTEXT_STEP_SIZES_HPP_
#define HSGD_COLLECTIVES_CONTEXT_STEP_SIZES_HPP_

#include <cstddef>

#include "collectives/context/place.hpp"
#include "collectives/context/tuning.hpp"
#include "network/rounds/rank_blocks.hpp"
#include "network/rounds/round_schedule.hpp"
#include "node/segments/segment_layout.hpp"

namespace hsgd {

// How a broadcast travels between nodes: each step split among all, or in two trees.
enum class BroadcastForm { kSplit, kTrees };

// How a payload travels between nodes.
struct WirePlan {
  int leaders;  // local ranks that carry it; 0 on one node
  size_t step_bytes;
  BroadcastForm form = BroadcastForm::kSplit;
};

// The options of a communicator, with the slots that it has.
hsgd_options with_wire_slots(int node_count, hsgd_options options);

class StepSizes {
 public:
  static constexpr size_t kChunkUnit = 512;  // whole lines of every dtype

  StepSizes(const Place& place, const NodeMap& map, const RoundSchedule& rounds,
            const hsgd_options& options);
  const Tuning& tuning() const { return tuning_; }
  void set_tuning(const Tuning& tuning) { tuning_ = tuning; }

  size_t oneshot_bytes() const { return tuning_.oneshot_bytes; }
  size_t allreduce_oneshot_bytes() const { return tuning_.allreduce_bytes; }
  size_t cell_bytes() const;  // that a cell has room for: oneshot_bytes() at least
  size_t ring_bytes() const { return chunk_bytes_; }  // of one pipeline step at most
  size_t slice_bytes() const;                         // of a leader in such a step, at most
  size_t node_step_bytes() const;                     // inside a node
  size_t step_bytes() const;
  // step_bytes() of collectives whose ranks have different parts, each with a place in every step.
  size_t block_step_bytes() const;
  // Of one node, in a leader's slice of a step of a reduce_scatter, at most.
  size_t share_bytes() const;
  // Of a broadcast.
  WirePlan broadcast_plan(size_t bytes) const;
  WirePlan wire_plan(size_t bytes) const;
  int most_leaders() const;      // that carry slices of one step
  SegmentLayout layout() const;  // of a segment

 private:
  const Place& place_;
  const NodeMap& map_;
  const RoundSchedule& rounds_;
  const hsgd_options& options_;
  size_t chunk_bytes_;
  Tuning tuning_;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_STEP_SIZES_HPP_
