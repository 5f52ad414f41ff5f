// StepSizes: derives the sizes from nodes, ranks, leaders and options.
#include "collectives/context/step_sizes.hpp"

#include <algorithm>

#include "network/rounds/tree_broadcast.hpp"

namespace hsgd {
namespace {

// Returns the least bytes of a step with a block of each rank: rounding
// (network/rounds/rank_blocks.hpp) costs at most half of it.
size_t least_block_step_bytes(const NodeMap& map) {
  return round_up(static_cast<size_t>(map.most_ranks()) * 4 * kLine, StepSizes::kChunkUnit);
}

// The best message size. MPI sends such messages at once, without asking the receiver first (Open
// MPI over TCP: up to 64 KiB), and they spread over its sockets. Larger ones left the link idle for
// up to a third of the time; much smaller ones cost processor time (docs/performance.md).
constexpr size_t kMessageBytes = 56 << 10;
constexpr size_t kLeastMessageBytes = 16 << 10;

// Returns the bytes that one cell holds. On one node: the most that a measurement may choose.
// Between nodes, where each node sends its whole sum: the switch point, which must be the same on
// all ranks.
size_t cell_bytes_for(const Place& place, const RoundSchedule& rounds,
                      const hsgd_options& options) {
  constexpr uint64_t kAlwaysBytes = 4096;  // latency dominates, for any number of nodes
  if (place.node_count > 1) {
    return std::max(std::min(options.wire_oneshot_bytes, kAlwaysBytes),
                    options.wire_oneshot_bytes / static_cast<uint64_t>(rounds.messages()));
  }
  const bool measured = place.local_size > 1;
  return Tuning::of(options, measured ? Tuning::kMostOneshotBytes : Tuning().oneshot_bytes, 0)
      .oneshot_bytes;
}

// Returns the largest step that keeps the communicator of a node within the memory that
// docs/internals/scale.md promises: 4 MB per rank and 64 MB, minus a reserve for small items.
size_t most_chunk_bytes(const NodeMap& map, size_t cell_bytes, const hsgd_options& options) {
  constexpr size_t kRankBytes = 4 << 20;
  constexpr size_t kNodeBytes = 56 << 20;
  // Rings of a step's size in addition to the ranks' own: the node's out ring, the receive rings of
  // leaders, their wide form if larger, the narrowed data, and the data sent with headers.
  constexpr size_t kNodeRings = 8;
  const auto ranks = static_cast<size_t>(map.most_ranks());
  const size_t small = ranks * (2 * kCells * (cell_bytes + kLine) + sizeof(Control) + kPartUnit);
  const size_t budget = ranks * kRankBytes + kNodeBytes;
  return small >= budget ? 0 : (budget - small) / ((ranks + kNodeRings) * options.slots);
}

// Returns the payload of one pipeline step. Between nodes, if the options leave it open, it is
// chosen for good message sizes.
size_t chunk_bytes_for(const Place& place, const NodeMap& map, const RoundSchedule& rounds,
                       const hsgd_options& options) {
  constexpr size_t kMostChunkBytes = 2 << 20;  // many nodes: smaller messages, but more at a time
  if (place.node_count == 1) {
    const size_t most = Tuning::most_chunk_bytes(place.local_size);
    return std::max(least_block_step_bytes(map),
                    round_up(Tuning::of(options, 0, most).chunk_bytes, StepSizes::kChunkUnit));
  }
  // Rounding takes an element of each node in a step of an allgather, and of each rank of another
  // node in a step of an alltoall.
  const size_t least = std::max(static_cast<size_t>(place.node_count) * 4 * sizeof(double),
                                static_cast<size_t>(map.most_ranks()) * 4 * kLine);
  // From three rounds on, most messages are small shares of a step; longer steps make them cheaper.
  const size_t share = rounds.rounds() > 2 ? 2 : 1;
  const auto messages =
      share * static_cast<size_t>(place.leaders) * static_cast<size_t>(rounds.most_radix());
  const size_t most = most_chunk_bytes(map, cell_bytes_for(place, rounds, options), options);
  const size_t wanted = options.wire_chunk_bytes > 0
                            ? options.wire_chunk_bytes
                            : std::min({kMessageBytes * messages, kMostChunkBytes, most});
  return round_up(std::max(wanted, least), StepSizes::kChunkUnit);
}

Tuning tuning_for(const Place& place, const RoundSchedule& rounds, const hsgd_options& options) {
  const bool one_node = place.node_count == 1;  // on several nodes all have the same steps
  const size_t chunk_bytes =
      one_node ? Tuning::most_chunk_bytes(place.local_size) : Tuning().chunk_bytes;
  Tuning tuning = Tuning::of(options, Tuning().oneshot_bytes, chunk_bytes);
  if (!one_node) {
    tuning.oneshot_bytes = tuning.allreduce_bytes = cell_bytes_for(place, rounds, options);
  } else if (options.known_allreduce_bytes > 0) {
    tuning.allreduce_bytes = std::min(options.known_allreduce_bytes, tuning.oneshot_bytes);
  }
  return tuning;
}

}  // namespace

// Adds one slot between nodes. With four slots, the last of five steps (1 MB on two nodes) began
// only after the first was done, and its result crossed the link alone.
hsgd_options with_wire_slots(int node_count, hsgd_options options) {
  if (node_count > 1) ++options.slots;
  return options;
}

StepSizes::StepSizes(const Place& place, const NodeMap& map, const RoundSchedule& rounds,
                     const hsgd_options& options)
    : place_(place),
      map_(map),
      rounds_(rounds),
      options_(options),
      chunk_bytes_(chunk_bytes_for(place, map, rounds, options)),
      tuning_(tuning_for(place, rounds, options)) {}

size_t StepSizes::cell_bytes() const { return cell_bytes_for(place_, rounds_, options_); }

SegmentLayout StepSizes::layout() const {
  const size_t out_bytes = place_.node_count == 1 ? 0 : chunk_bytes_;
  return SegmentLayout(cell_bytes(), chunk_bytes_, out_bytes, options_.slots);
}

// If memory limits the steps, a few leaders carry them whole.
int StepSizes::most_leaders() const {
  if (options_.wire_chunk_bytes > 0) return place_.leaders;
  const auto radix = static_cast<size_t>(rounds_.most_radix());
  const auto fitting = static_cast<int>(chunk_bytes_ / (kLeastMessageBytes * radix));
  return std::clamp(fitting, 1, place_.leaders);
}

// Returns a size with room for an element of each node and of each of their partners, however small
// steps are.
size_t StepSizes::slice_bytes() const {
  const size_t least = 2 * static_cast<size_t>(rounds_.nodes()) * sizeof(double);
  const size_t share = chunk_bytes_ / static_cast<size_t>(most_leaders());
  return std::max({kChunkUnit, share, least}) + 2 * kLine;
}

size_t StepSizes::node_step_bytes() const {
  return std::min(chunk_bytes_, round_up(tuning_.chunk_bytes, kChunkUnit));
}

size_t StepSizes::step_bytes() const {
  return place_.node_count == 1 ? node_step_bytes() : chunk_bytes_;
}

size_t StepSizes::block_step_bytes() const {
  return std::max(step_bytes(), least_block_step_bytes(map_));
}

// Limits a core node's work, including that for its partner, to an equal part.
size_t StepSizes::share_bytes() const {
  const auto nodes = static_cast<size_t>(rounds_.cores() * (rounds_.folds() ? 2 : 1));
  return (slice_bytes() - 2 * kLine) / nodes;
}

// Uses one leader if more would only make more and smaller messages. With fewer leaders steps are
// shorter, so that messages keep their size.
WirePlan StepSizes::wire_plan(size_t bytes) const {
  constexpr size_t kWorthwhileBytes = 10 << 10;  // bytes of one message
  if (place_.node_count == 1) return {0, step_bytes()};
  const auto radix = static_cast<size_t>(rounds_.most_radix());
  const auto most = static_cast<size_t>(most_leaders());
  const size_t leaders = std::clamp<size_t>(bytes / (kWorthwhileBytes * radix), 1, most);
  if (leaders == most) return {static_cast<int>(most), chunk_bytes_};
  const size_t step_bytes = chunk_bytes_ / most * leaders / kChunkUnit * kChunkUnit;
  return {static_cast<int>(leaders), std::max(kChunkUnit, step_bytes)};
}

// Plans a broadcast. In a split step the root's group of the first round takes no part: messages
// keep their size. If there are several rounds, a payload of more than one such step goes along
// trees. The smaller it is, the shorter are its messages, because a step waits for one message on
// each level of a tree.
WirePlan StepSizes::broadcast_plan(size_t bytes) const {
  constexpr size_t kTreeSteps = 32;
  WirePlan plan = wire_plan(bytes);
  if (place_.node_count == 1) {
    // The root fills all its slots ahead; they should fit into the cache of a core
    // (docs/performance.md).
    constexpr size_t kMostStepBytes = 128 << 10;
    if (options_.chunk_bytes < 0) plan.step_bytes = std::min(plan.step_bytes, kMostStepBytes);
    return plan;
  }
  const auto radix = static_cast<size_t>(rounds_.most_radix());
  const size_t message_bytes =
      std::min(plan.step_bytes / radix, kMessageBytes * static_cast<size_t>(plan.leaders));
  const size_t split_bytes = message_bytes * (radix - 1) / kChunkUnit * kChunkUnit;
  if (rounds_.is_direct() || bytes <= split_bytes) {
    plan.step_bytes = std::max(kChunkUnit, split_bytes);
    return plan;
  }
  plan.form = BroadcastForm::kTrees;
  const size_t halves = TwoTrees::kTrees * static_cast<size_t>(plan.leaders);
  const size_t message =
      std::clamp(bytes / (kTreeSteps * halves), kLeastMessageBytes, kMessageBytes);
  plan.step_bytes = std::min(plan.step_bytes, round_up(halves * message, kChunkUnit));
  return plan;
}

}  // namespace hsgd
