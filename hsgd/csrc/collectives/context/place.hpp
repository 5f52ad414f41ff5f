// Place: the position of a rank in its communicator; it never changes.
#ifndef HSGD_COLLECTIVES_CONTEXT_PLACE_HPP_
#define HSGD_COLLECTIVES_CONTEXT_PLACE_HPP_

#include <string>
#include <vector>

#include "core/base/rank_names.hpp"
#include "hsgd_core.h"

namespace hsgd {

// More leaders than this per node add messages, not bandwidth.
inline constexpr int kMostLeaders = 8;

// The layout of ranks and nodes: the same on all ranks, except for the rank's own position.
struct Place {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;
  int node_rank = 0, node_count = 1;
  int leaders = 0;                // 0 on one node
  int lane = -1;                  // index of this rank among the leaders of its node; -1: none
  std::vector<int> leader_ranks;  // local ranks of this node's leaders, by lane
  std::vector<int> node_of_rank;  // by world rank; empty on one node
  RankNames names;                // set by Context
  std::string one_thread;  // the reason why only one thread may use the transport; empty: any may
  // Returns true if this thread must not use the transport, which why_foreign explains. nullptr:
  // every thread may.
  bool (*is_foreign_thread)() = nullptr;
  std::string why_foreign;

  int name() const { return names.of(rank); }  // of this rank in errors
  // Returns true if this rank is one of the first `leaders` leaders of its node.
  bool leads(int leaders) const { return lane >= 0 && lane < leaders; }
};

// Returns the leaders as [lane][node]; leaders of one lane exchange with one another. Each node has
// the same number. Ranks near an adapter come first, in turn over the adapters, then the others;
// without adapters, in rank order. `nic_of_rank`: the adapter near each rank, from 1; 0: none; an
// empty vector: none for all ranks.
HSGD_API std::vector<std::vector<int>> leaders_of(const std::vector<int>& node_of_rank,
                                                  const std::vector<int>& nic_of_rank);

// Returns the place of `rank`, given the node of each rank; nodes are numbered by their first
// ranks. `nic_of_rank` is as in leaders_of().
HSGD_API Place place_on(std::vector<int> node_of_rank, int rank,
                        const std::vector<int>& nic_of_rank = {});

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_PLACE_HPP_
