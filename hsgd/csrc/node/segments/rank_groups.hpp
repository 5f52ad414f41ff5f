// In which groups the ranks of a node arrive.
//
// Owns arithmetic over the places of all local ranks, a table that all of them see: each computes
// the same groups without a message. Groups order waiting alone, never sums, so that no result
// depends on them. Never reads a file and never waits.
#ifndef HSGD_NODE_SEGMENTS_RANK_GROUPS_HPP_
#define HSGD_NODE_SEGMENTS_RANK_GROUPS_HPP_

#include <cstddef>
#include <vector>

#include "core/topology/cpu_topology.hpp"

namespace hsgd {

inline constexpr int kMostGroup = 16;

// The local ranks of each group, ascending; the first one leads. Groups are in the order of their
// leaders, so local rank 0 leads the first.
using RankGroups = std::vector<std::vector<int>>;

// Each local rank (the index of `places`) in one group of at most kMostGroup ranks, of one domain
// where that can be: the ranks of a last-level cache within a NUMA node, whatever their numbers
// are. Domains of many ranks are cut into equal runs of at most 8, on a node of more than 64 ranks
// 16, and so are ranks that are bound to nothing: about as many groups as a group has ranks.
// Domains of fewer than 4 ranks join neighbours up to the same bound, in the NUMA node if they can,
// else in the package, else anywhere. Where there still are more than 16 groups (or L / 16), larger
// ones join likewise. `most`: in a group, instead of 8 or 16.
RankGroups rank_groups(const std::vector<CpuPlace>& places, size_t most = 0);

}  // namespace hsgd

#endif  // HSGD_NODE_SEGMENTS_RANK_GROUPS_HPP_
