// StepSizes: computes the limit of the small form, the bytes of a pipeline step, and the number of
// leaders.
//
// All answers are the same on all ranks. Holds the tuning that the start-up measurement chose.
// Never touches data.
#ifndef HSGD_COLLECTIVES_CONTEXT_STEP_SIZES_HPP_
#define HSGD_COLLECTIVES_CONTEXT_STEP_SIZES_HPP_

#include <cstddef>

#include "collectives/context/place.hpp"
#include "collectives/context/tuning.hpp"
#include "network/rounds/rank_blocks.hpp"
#include "network/rounds/round_schedule.hpp"
#include "node/segments/segment_layout.hpp"

namespace hsgd {

// The form of a broadcast between nodes: each step split among all nodes, or sent along two trees.
enum class BroadcastForm { kSplit, kTrees };

// The way of a payload between nodes.
struct WirePlan {
  int leaders;  // local ranks that carry it; 0 on one node
  size_t step_bytes;
  BroadcastForm form = BroadcastForm::kSplit;
};

// Returns `options` with the number of slots that the communicator uses.
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
  size_t cell_bytes() const;                          // room of a cell: at least oneshot_bytes()
  size_t ring_bytes() const { return chunk_bytes_; }  // of one pipeline step, at most
  size_t slice_bytes() const;                         // of a leader in such a step, at most
  size_t node_step_bytes() const;                     // inside a node
  size_t step_bytes() const;
  // Returns step_bytes() for collectives in which each rank has its own part in every step.
  size_t block_step_bytes() const;
  // Returns the most bytes of one node in a leader's slice of a step of a reduce_scatter.
  size_t share_bytes() const;
  // Returns the plan of a broadcast.
  WirePlan broadcast_plan(size_t bytes) const;
  WirePlan wire_plan(size_t bytes) const;
  int most_leaders() const;      // the most that carry slices of one step
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
