// Where an allgather or a reduce_scatter between nodes puts what.
//
// In each step a piece of each node's section, which is the blocks of its ranks side by side, goes
// from this node or to it. Each leader carries a share of the piece, in an area of the step of its
// own where the shares of all nodes lie in the order of RoundSchedule::nodes_by_leaf().
//
// Owns the arithmetic, which is the same on all ranks. Never touches data.
#ifndef HSGD_COLLECTIVES_KINDS_SECTION_LAYOUT_HPP_
#define HSGD_COLLECTIVES_KINDS_SECTION_LAYOUT_HPP_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "network/rounds/rank_blocks.hpp"
#include "network/rounds/round_schedule.hpp"

namespace hsgd {

class SectionLayout {
 public:
  // `counts`: elements by rank; `step_count`: of a step, more than there are nodes; `piece_count`:
  // of a node in a step, at most.
  SectionLayout(const NodeMap& map, const RoundSchedule& rounds, const uint64_t* counts,
                int leaders, uint64_t step_count, uint64_t piece_count = UINT64_MAX);
  uint64_t steps() const { return steps_; }
  int leaders() const { return leaders_; }
  // Of the section of its node, the block of the rank at `place`.
  Range block(int place) const;
  // The same in the packed buffer of all ranks' blocks.
  const Block& packed(int place) const { return blocks_[static_cast<size_t>(place)]; }
  // Of the section of `node`, what passes through `leader` in a step.
  Range share(int node, int leader, uint64_t step) const;
  // Where that begins in the step, in elements. Not for use by two threads at a time.
  uint64_t offset(int node, int leader, uint64_t step) const;
  uint64_t count(uint64_t step) const;  // of all shares
  // Where the shares of a leader begin in a step, by node, and the end of all.
  std::vector<uint64_t> area(int leader, uint64_t step) const;
  // The first place of `node` whose block ends behind `element` of its section.
  int place_at(int node, uint64_t element) const;

 private:
  void place_shares(uint64_t step) const;
  size_t index(int node, int leader) const {
    return static_cast<size_t>(leader) * static_cast<size_t>(map_.nodes()) +
           static_cast<size_t>(node);
  }

  const NodeMap& map_;
  const int leaders_;
  std::vector<int> order_;       // of nodes in an area
  std::vector<Block> blocks_;    // by place, in the packed buffer
  std::vector<uint64_t> ends_;   // by place, in the section of its node
  std::vector<uint64_t> pitch_;  // by node, of a piece
  uint64_t steps_ = 0;
  mutable std::vector<uint64_t> offsets_;  // of the step asked for last, and the end
  mutable uint64_t offsets_step_ = UINT64_MAX;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_SECTION_LAYOUT_HPP_
