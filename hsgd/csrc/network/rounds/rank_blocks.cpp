// Places of ranks, pieces of blocks and steps.
#include "network/rounds/rank_blocks.hpp"

#include <algorithm>
#include <numeric>

#include "core/base/error.hpp"
#include "node/segments/segment_layout.hpp"

namespace hsgd {

NodeMap::NodeMap(const std::vector<int>& node_of_rank, int size, int node, int local_rank)
    : ranks_(static_cast<size_t>(size)),
      nodes_(static_cast<size_t>(size)),
      node_(node),
      local_rank_(local_rank) {
  std::iota(ranks_.begin(), ranks_.end(), 0);
  places_ = ranks_;
  if (node_of_rank.empty()) {
    first_ = {0, size};
    return;
  }
  std::stable_sort(ranks_.begin(), ranks_.end(), [&](int a, int b) {
    return node_of_rank[static_cast<size_t>(a)] < node_of_rank[static_cast<size_t>(b)];
  });
  for (int place = 0; place < size; ++place) {
    const int of_place = node_of_rank[static_cast<size_t>(rank(place))];
    places_[static_cast<size_t>(rank(place))] = place;
    nodes_[static_cast<size_t>(place)] = of_place;
    while (nodes() < of_place) first_.push_back(place);
  }
  first_.push_back(size);
}

int NodeMap::most_ranks() const {
  int most = 0;
  for (int node = 0; node < nodes(); ++node) most = std::max(most, ranks_on(node));
  return most;
}

uint64_t steps_for(uint64_t total, uint64_t capacity, uint64_t slack) {
  HSGD_CHECK(capacity > slack);
  const uint64_t room = capacity - slack;
  return std::max<uint64_t>(1, total / room + (total % room > 0 ? 1 : 0));
}

void Block::cut(uint64_t steps, uint64_t unit) {
  pitch = round_up((count + steps - 1) / steps, unit);
}

std::vector<Block> blocks_of(const uint64_t* counts, const NodeMap& map) {
  std::vector<uint64_t> begins(static_cast<size_t>(map.size()));
  std::exclusive_scan(counts, counts + map.size(), begins.begin(), uint64_t{0});
  std::vector<Block> blocks;
  for (int place = 0; place < map.size(); ++place) {
    const auto rank = static_cast<size_t>(map.rank(place));
    blocks.push_back({begins[rank], counts[rank], 0});
  }
  return blocks;
}

BlockTable::BlockTable(const uint64_t* counts, const NodeMap& map, size_t element_bytes)
    : map_(map),
      line_(kLine / element_bytes),
      blocks_(blocks_of(counts, map)),
      offsets_(static_cast<size_t>(map.size()) + 1) {}

void BlockTable::cut(uint64_t steps) {
  steps_ = steps;
  for (Block& block : blocks_) block.cut(steps, line_);
}

uint64_t BlockTable::offset(int place, uint64_t step) const {
  if (offsets_step_ != step) {
    offsets_step_ = step;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      offsets_[i + 1] = offsets_[i] + blocks_[i].piece(step).count();
    }
  }
  return offsets_[static_cast<size_t>(place)];
}

}  // namespace hsgd
