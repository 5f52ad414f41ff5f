// SectionLayout: computes where an allgather or a reduce_scatter between nodes places its data; the
// same on all ranks.
//
// The section of a node is the blocks of its ranks side by side. Each step moves a piece of each
// node's section. Each leader carries a share of every piece in its own area of the step, with the
// shares of all nodes in the order of RoundSchedule::nodes_by_leaf().
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
  // `counts`: elements by rank. `step_count`: elements of a step, more than there are nodes.
  // `piece_count`: the most elements of a node in a step.
  SectionLayout(const NodeMap& map, const RoundSchedule& rounds, const uint64_t* counts,
                int leaders, uint64_t step_count, uint64_t piece_count = UINT64_MAX);
  uint64_t steps() const { return steps_; }
  int leaders() const { return leaders_; }
  // Returns the block of the rank at `place` in the section of its node.
  Range block(int place) const;
  // Returns the same block in the packed buffer of all ranks' blocks.
  const Block& packed(int place) const { return blocks_[static_cast<size_t>(place)]; }
  // Returns the part of `node`'s section that passes through `leader` in a step.
  Range share(int node, int leader, uint64_t step) const;
  // Returns the begin of that share in the step, in elements. Not for two threads at a time.
  uint64_t offset(int node, int leader, uint64_t step) const;
  uint64_t count(uint64_t step) const;  // of all shares
  // Returns the begins of a leader's shares in a step, by node, and the end of the last.
  std::vector<uint64_t> area(int leader, uint64_t step) const;
  // Returns the first place of `node` whose block ends behind `element` of its section.
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
  mutable std::vector<uint64_t> offsets_;  // of the last step queried, and the end
  mutable uint64_t offsets_step_ = UINT64_MAX;
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_SECTION_LAYOUT_HPP_
