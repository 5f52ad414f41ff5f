// Sizes by nodes, ranks, leaders and options.
#include "context/step_sizes.hpp"

#include <algorithm>

namespace hsgd {
namespace {

// What rounding costs the blocks of all ranks (see internode/rank_blocks.hpp) is at most half of
// such a step.
size_t least_block_step_bytes(const NodeMap& map) {
  const auto most = static_cast<size_t>(map.most_ranks());
  const size_t per_rank = map.nodes() == 1 ? 4 * kLine : std::max(4 * kLine, 24 * most + 2 * kLine);
  return round_up(static_cast<size_t>(map.nodes()) * most * per_rank, StepSizes::kChunkUnit);
}

// Messages of this size are small enough that MPI sends them at once (Open MPI over TCP up to 64
// KiB), without asking the receiver first, and that they spread over its sockets. Larger ones left
// the link idle for up to a third of the time, much smaller ones cost processor time
// (docs/performance.md).
constexpr size_t kMessageBytes = 56 << 10;

// Payload of one pipeline step; between nodes, where it is not given, it makes such messages.
size_t chunk_bytes_for(const Place& place, const NodeMap& map, const hsgd_options& options) {
  constexpr size_t kLeastMessageBytes = 16 << 10;
  constexpr size_t kMostChunkBytes = 2 << 20;  // many nodes: smaller messages, of which more fly
  const auto messages = static_cast<size_t>(place.leaders) * static_cast<size_t>(place.node_count);
  const size_t wanted = place.node_count == 1 ? Tuning::of(options, 0).chunk_bytes
                        : options.wire_chunk_bytes > 0
                            ? options.wire_chunk_bytes
                            : std::max(std::min(kMessageBytes * messages, kMostChunkBytes),
                                       kLeastMessageBytes * messages);
  return std::max(least_block_step_bytes(map), round_up(wanted, StepSizes::kChunkUnit));
}

// What one cell holds: on one node as much as a measurement may choose, between nodes, where each
// sends its whole sum to all others, the switch point itself, which must be the same on all.
size_t cell_bytes_for(const Place& place, const hsgd_options& options) {
  constexpr uint64_t kAlwaysBytes = 4096;  // latency, whatever the number of nodes
  if (place.node_count > 1) {
    return std::max(std::min(options.wire_oneshot_bytes, kAlwaysBytes),
                    options.wire_oneshot_bytes / static_cast<uint64_t>(place.node_count - 1));
  }
  const bool measured = place.local_size > 1;
  return Tuning::of(options, measured ? Tuning::kMostOneshotBytes : Tuning().oneshot_bytes)
      .oneshot_bytes;
}

Tuning tuning_for(const Place& place, const hsgd_options& options) {
  Tuning tuning = Tuning::of(options, Tuning().oneshot_bytes);
  if (place.node_count > 1) tuning.oneshot_bytes = cell_bytes_for(place, options);
  return tuning;
}

}  // namespace

StepSizes::StepSizes(const Place& place, const NodeMap& map, const hsgd_options& options)
    : place_(place),
      map_(map),
      options_(options),
      chunk_bytes_(chunk_bytes_for(place, map, options)),
      tuning_(tuning_for(place, options)) {}

SegmentLayout StepSizes::layout() const {
  const size_t own_slice = chunk_bytes_ / static_cast<size_t>(place_.local_size) + 2 * kLine;
  return SegmentLayout(cell_bytes_for(place_, options_), chunk_bytes_,
                       place_.node_count == 1 ? own_slice : chunk_bytes_, options_.slots);
}

size_t StepSizes::slice_bytes() const {
  return std::max(kChunkUnit, chunk_bytes_ / static_cast<size_t>(place_.leaders)) + 2 * kLine;
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

// A message carries the whole step of a broadcast.
size_t StepSizes::broadcast_step_bytes() const {
  const bool chosen = place_.node_count > 1 && options_.wire_chunk_bytes == 0;
  return chosen ? std::min(chunk_bytes_, kMessageBytes) : step_bytes();
}

// One leader where more would only make more and smaller messages. With fewer leaders steps are
// shorter: messages stay as large.
WirePlan StepSizes::wire_plan(size_t bytes) const {
  constexpr size_t kWorthwhileBytes = 10 << 10;  // of one message
  if (place_.node_count == 1) return {0, step_bytes()};
  const auto all = static_cast<size_t>(place_.leaders);
  const size_t wanted = bytes / (kWorthwhileBytes * static_cast<size_t>(place_.node_count));
  const size_t leaders = std::clamp<size_t>(wanted, 1, all);
  const size_t step_bytes = chunk_bytes_ / all * leaders / kChunkUnit * kChunkUnit;
  return {static_cast<int>(leaders),
          leaders == all ? chunk_bytes_ : std::max(kChunkUnit, step_bytes)};
}

}  // namespace hsgd
