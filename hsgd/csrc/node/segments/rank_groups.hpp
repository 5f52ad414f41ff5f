// rank_groups(): divides the ranks of a node into groups, in which they count their arrival.
//
// Each rank computes the same groups from a table of the places of all local ranks, without a
// message. Groups only order waits, never sums, so no result depends on them.
#ifndef HSGD_NODE_SEGMENTS_RANK_GROUPS_HPP_
#define HSGD_NODE_SEGMENTS_RANK_GROUPS_HPP_

#include <cstddef>
#include <vector>

#include "core/topology/cpu_topology.hpp"

namespace hsgd {

inline constexpr int kMostGroup = 16;

// The local ranks of each group, ascending; the first one leads. Groups are in the order of their
// leaders, so local rank 0 leads the first group.
using RankGroups = std::vector<std::vector<int>>;

// Puts each local rank (the index of `places`) in one group of at most kMostGroup ranks, of one
// domain if possible: the ranks of a last-level cache within a NUMA node, whatever their numbers
// are. Domains of many ranks are cut into equal runs of at most 8 ranks (16 on a node of more than
// 64 ranks), and so are unbound ranks: there are about as many groups as ranks in a group. Domains
// of fewer than 4 ranks are joined with neighbours up to the same bound: within the NUMA node if
// possible, else within the package, else anywhere. If there are still more than 16 groups (or L /
// 16), larger ones are joined likewise. `most`: bound for a group, instead of 8 or 16.
RankGroups rank_groups(const std::vector<CpuPlace>& places, size_t most = 0);

}  // namespace hsgd

#endif  // HSGD_NODE_SEGMENTS_RANK_GROUPS_HPP_
