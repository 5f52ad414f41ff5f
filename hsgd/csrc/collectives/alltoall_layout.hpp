// Where an alltoall puts what: its slots hold for each node a block with one segment per rank of
// it.
//
// Owns the arithmetic. Slots and blocks begin with offsets, so that nobody needs to know how much
// others send one another.
//
//   slot:  where the block of each node begins, and the end | block | block | ...
//   block: where the segment of each of its ranks begins, and the end | segment | segment | ...
#ifndef HSGD_COLLECTIVES_ALLTOALL_LAYOUT_HPP_
#define HSGD_COLLECTIVES_ALLTOALL_LAYOUT_HPP_

#include <cstddef>
#include <cstdint>

#include "internode/rank_blocks.hpp"

namespace hsgd {

// `count` offsets, and the end, at the beginning of a slot, a block or a packet.
size_t offsets_bytes(int count);
uint32_t offset_at(const std::byte* header, int index);
void set_offset(std::byte* header, int index, uint64_t offset);

class AlltoallLayout {
 public:
  AlltoallLayout(const NodeMap& map, size_t chunk_bytes);
  // The steps that what this rank sends needs, `counts` by rank, so that it fits everywhere.
  uint64_t steps_needed(const uint64_t* counts, size_t element_bytes) const;
  size_t unit_bytes() const { return unit_bytes_; }
  size_t slot_header_bytes() const;
  size_t block_header_bytes(int node) const;
  // What one remote rank may send to a node in one step.
  size_t landing_bytes(int node) const;
  // Where that of `place` lands on this node.
  size_t landing_offset(int place) const;

 private:
  const NodeMap& map_;
  size_t chunk_bytes_;
  size_t unit_bytes_;  // cache lines, unless so many ranks share a step that too little remains
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_ALLTOALL_LAYOUT_HPP_
