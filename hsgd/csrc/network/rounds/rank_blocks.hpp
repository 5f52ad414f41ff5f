// NodeMap, BlockTable: the order of ranks in staged data, and how blocks of unequal size are cut
// into steps.
//
// Pure arithmetic, the same on all ranks of all nodes. Never touches data.
#ifndef HSGD_NETWORK_ROUNDS_RANK_BLOCKS_HPP_
#define HSGD_NETWORK_ROUNDS_RANK_BLOCKS_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "network/rounds/reduction.hpp"

namespace hsgd {

// The ranks in the order of staged data: node by node, and on a node by local rank. The index of a
// rank in this order is its place.
class NodeMap {
 public:
  // `node_of_rank`: by world rank; empty on one node. Local ranks have the order of world ranks.
  NodeMap(const std::vector<int>& node_of_rank, int size, int node, int local_rank);
  int size() const { return static_cast<int>(ranks_.size()); }
  int nodes() const { return static_cast<int>(first_.size()) - 1; }
  int node() const { return node_; }                        // this node
  int place() const { return first(node_) + local_rank_; }  // of this rank
  int rank(int place) const { return ranks_[static_cast<size_t>(place)]; }
  int place_of(int rank) const { return places_[static_cast<size_t>(rank)]; }
  int node_at(int place) const { return nodes_[static_cast<size_t>(place)]; }
  int first(int node) const { return first_[static_cast<size_t>(node)]; }
  int end(int node) const { return first(node + 1); }
  bool is_here(int place) const { return place >= first(node_) && place < end(node_); }
  int ranks_on(int node) const { return end(node) - first(node); }
  int most_ranks() const;  // of one node

 private:
  std::vector<int> ranks_;   // by place
  std::vector<int> places_;  // by rank
  std::vector<int> nodes_;   // by place
  std::vector<int> first_;   // by node, and the end
  int node_;
  int local_rank_;
};

// Returns the least number of steps for `total` elements if each step has room for `capacity`, of
// which `slack` is lost to rounding.
uint64_t steps_for(uint64_t total, uint64_t capacity, uint64_t slack);

// One rank's block in a packed buffer, cut into pieces of equal size; the last pieces may be
// smaller or empty.
struct Block {
  uint64_t begin = 0;  // elements from the start of the buffer
  uint64_t count = 0;
  uint64_t pitch = 0;  // elements per step
  // Cuts the block; the pitch becomes a multiple of `unit` elements.
  void cut(uint64_t steps, uint64_t unit);
  Range piece(uint64_t step) const {  // in the packed buffer
    const uint64_t from = std::min(count, step * pitch);
    return {begin + from, begin + std::min(count, from + pitch)};
  }
};

// Returns the blocks of a buffer, by place; they lie packed in rank order.
std::vector<Block> blocks_of(const uint64_t* counts, const NodeMap& map);

// Blocks whose sizes are known on all ranks. In each step the pieces of all blocks lie packed in
// the order of places.
class BlockTable {
 public:
  BlockTable(const uint64_t* counts, const NodeMap& map, size_t element_bytes);
  uint64_t line() const { return line_; }  // elements that fill a cache line

  void cut(uint64_t steps);
  uint64_t steps() const { return steps_; }
  const Block& block(int place) const { return blocks_[static_cast<size_t>(place)]; }
  Range piece(int place, uint64_t step) const {  // in the packed buffer
    return block(place).piece(step);
  }
  // Returns where the piece begins in the step. Not thread-safe.
  uint64_t offset(int place, uint64_t step) const;
  const NodeMap& map() const { return map_; }

 private:
  const NodeMap& map_;
  uint64_t line_;
  uint64_t steps_ = 0;
  std::vector<Block> blocks_;
  mutable std::vector<uint64_t> offsets_;  // of the last step that was asked for
  mutable uint64_t offsets_step_ = UINT64_MAX;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_ROUNDS_RANK_BLOCKS_HPP_
