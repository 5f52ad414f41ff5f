// AlltoallLayout: computes where an alltoall places its data; the same on all ranks.
//
// A slot holds what one rank sends to a group of ranks of one node, one segment for each. It begins
// with offsets, so that no rank needs to know how much others exchange:
//
//   begin of each rank's segment, and the end | segment | segment | ...
#ifndef HSGD_COLLECTIVES_KINDS_ALLTOALL_LAYOUT_HPP_
#define HSGD_COLLECTIVES_KINDS_ALLTOALL_LAYOUT_HPP_

#include <cstddef>
#include <cstdint>

#include "network/rounds/rank_blocks.hpp"

namespace hsgd {

// Access the header of a slot or a packet: `count` offsets and the end.
size_t offsets_bytes(int count);
uint32_t offset_at(const std::byte* header, int index);
void set_offset(std::byte* header, int index, uint64_t offset);

class AlltoallLayout {
 public:
  // `slot_bytes`: the size in a ring of one rank and in the ring in which a node receives.
  AlltoallLayout(const NodeMap& map, size_t slot_bytes);
  // Returns the number of pieces into which this rank's blocks must be cut to fit; `counts` by
  // rank.
  uint64_t pieces_needed(const uint64_t* counts, size_t element_bytes) const;
  int groups() const { return groups_; }
  Range group(uint64_t index) const;  // local ranks; smaller nodes lack some
  // Returns the steps of one piece: one for each group of each node.
  uint64_t turns() const {
    return static_cast<uint64_t>(map_.nodes()) * static_cast<uint64_t>(groups_);
  }
  size_t unit_bytes() const { return unit_bytes_; }
  size_t header_bytes() const;
  // Returns the most bytes that a rank sends in one step; also the stride between the places of
  // senders of other nodes in a node's ring.
  size_t landing_bytes() const { return landing_bytes_; }

 private:
  const NodeMap& map_;
  size_t landing_bytes_;
  int group_ranks_;
  int groups_;
  size_t unit_bytes_;  // a cache line, or less if many ranks share a slot
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_ALLTOALL_LAYOUT_HPP_
