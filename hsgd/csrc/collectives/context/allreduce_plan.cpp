// plan_allreduce(): computes the sizes without a communicator.
#include "collectives/context/allreduce_plan.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "collectives/context/links.hpp"
#include "collectives/context/step_sizes.hpp"
#include "core/base/error.hpp"
#include "network/rounds/slice_allreduce.hpp"

namespace hsgd {
namespace {

Place place_in(int nodes, int ranks_per_node) {
  constexpr int kMostRanks = 1 << 24;
  if (nodes < 1 || ranks_per_node < 1 || ranks_per_node > kMostRanks / nodes) {
    throw_invalid("%d nodes of %d ranks; give at least 1 of both, and at most %d ranks in all",
                  nodes, ranks_per_node, kMostRanks);
  }
  std::vector<int> node_of_rank;
  for (int rank = 0; rank < nodes * ranks_per_node; ++rank) {
    node_of_rank.push_back(rank / ranks_per_node);
  }
  return place_on(std::move(node_of_rank), 0);
}

uint64_t memory_of_node(const Place& place, const RoundSchedule& rounds, const StepSizes& sizes,
                        const hsgd_options& options) {
  const SegmentLayout layout = sizes.layout();
  const bool one_out_ring = place.node_count > 1;
  const auto others = static_cast<size_t>(place.local_size - 1);
  uint64_t bytes = layout.bytes(true) + others * layout.bytes(!one_out_ring);
  if (place.node_count > 1) {
    bytes += static_cast<size_t>(sizes.most_leaders()) *
             SliceAllreduce::buffer_bytes(rounds, sizes.slice_bytes(), options.slots,
                                          options.wire_dtype != HSGD_FLOAT32);
    bytes += HeaderExchange::buffer_bytes(rounds, header_room(rounds, sizes));
  }
  return bytes;
}

}  // namespace

hsgd_allreduce_plan plan_allreduce(const hsgd_options& options, int nodes, int ranks_per_node,
                                   uint64_t bytes) {
  const Place place = place_in(nodes, ranks_per_node);
  const hsgd_options with_slots = with_wire_slots(nodes, options);
  const NodeMap map(place.node_of_rank, place.size, 0, 0);
  const RoundSchedule rounds(nodes, static_cast<int>(with_slots.wire_radix));
  const StepSizes sizes(place, map, rounds, with_slots);
  hsgd_allreduce_plan plan{};
  plan.memory_bytes = memory_of_node(place, rounds, sizes, with_slots);
  plan.rounds = rounds.rounds();
  plan.messages = rounds.messages();
  const bool is_small = bytes <= sizes.allreduce_oneshot_bytes();
  const WirePlan wire = sizes.wire_plan(bytes);
  plan.leaders = is_small ? std::min(1, wire.leaders) : wire.leaders;
  plan.step_bytes = is_small ? bytes : wire.step_bytes;
  plan.steps = is_small ? 0 : (bytes + wire.step_bytes - 1) / wire.step_bytes;
  return plan;
}

}  // namespace hsgd
