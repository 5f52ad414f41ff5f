// Where a rank stands in its communicator.
//
// Owns the numbers, which never change.
#ifndef HSGD_COLLECTIVES_CONTEXT_PLACE_HPP_
#define HSGD_COLLECTIVES_CONTEXT_PLACE_HPP_

#include <string>
#include <vector>

#include "hsgd_core.h"

namespace hsgd {

// More leaders than this per node add messages, not bandwidth.
inline constexpr int kMostLeaders = 8;

// The same picture on all ranks but for the rank's own place.
struct Place {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;
  int node_rank = 0, node_count = 1;
  int leaders = 0;                // 0 on one node
  int lane = -1;                  // which of its node's leaders this rank is; -1: none
  std::vector<int> leader_ranks;  // local ranks of this node's leaders, by lane
  std::vector<int> node_of_rank;  // by world rank; empty on one node
  std::string one_thread;         // why the transport serves one thread only; empty: it does not
  // Returns true if this thread must not use the transport, which why_foreign explains. nullptr:
  // every thread may.
  bool (*is_foreign_thread)() = nullptr;
  std::string why_foreign;

  // Whether this rank is one of the first `leaders` of its node.
  bool leads(int leaders) const { return lane >= 0 && lane < leaders; }
};

// The ranks that lead, [lane][node]: those of one lane exchange with one another. Each node has as
// many, ranks near an adapter first, by turns over the adapters, then the others; else in order.
// `nic_of_rank`: from 1, the adapter that each rank is near; 0: none. Empty: of all.
HSGD_API std::vector<std::vector<int>> leaders_of(const std::vector<int>& node_of_rank,
                                                  const std::vector<int>& nic_of_rank);

// That of `rank` where each rank is on this node: nodes are numbered by their first ranks.
// `nic_of_rank`: as leaders_of().
HSGD_API Place place_on(std::vector<int> node_of_rank, int rank,
                        const std::vector<int>& nic_of_rank = {});

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_PLACE_HPP_
