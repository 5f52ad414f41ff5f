// Where an alltoall puts what: a slot holds what one rank sends to a group of ranks of one node, a
// segment for each.
//
// Owns the arithmetic, which is the same on all ranks. A slot begins with offsets, so that nobody
// needs to know how much others send one another:
//
//   where the segment of each rank of the group begins, and the end | segment | segment | ...
#ifndef HSGD_COLLECTIVES_KINDS_ALLTOALL_LAYOUT_HPP_
#define HSGD_COLLECTIVES_KINDS_ALLTOALL_LAYOUT_HPP_

#include <cstddef>
#include <cstdint>

#include "network/rounds/rank_blocks.hpp"

namespace hsgd {

// `count` offsets, and the end, at the beginning of a slot or a packet.
size_t offsets_bytes(int count);
uint32_t offset_at(const std::byte* header, int index);
void set_offset(std::byte* header, int index, uint64_t offset);

class AlltoallLayout {
 public:
  // `slot_bytes`: of a ring of one rank, and of the ring in which a node receives.
  AlltoallLayout(const NodeMap& map, size_t slot_bytes);
  // The pieces that the blocks which this rank sends must be cut into, so that they fit; `counts`
  // by rank.
  uint64_t pieces_needed(const uint64_t* counts, size_t element_bytes) const;
  int groups() const { return groups_; }
  Range group(uint64_t index) const;  // local ranks, of which smaller nodes lack some
  // Steps of one piece: a group of each node.
  uint64_t turns() const {
    return static_cast<uint64_t>(map_.nodes()) * static_cast<uint64_t>(groups_);
  }
  size_t unit_bytes() const { return unit_bytes_; }
  size_t header_bytes() const;
  // What a rank sends in one step at most; on a node the segments of remote ranks lie so far apart.
  size_t landing_bytes() const { return landing_bytes_; }

 private:
  const NodeMap& map_;
  size_t landing_bytes_;
  int group_ranks_;
  int groups_;
  size_t unit_bytes_;  // cache lines, unless so many ranks share a slot that too little remains
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_ALLTOALL_LAYOUT_HPP_
