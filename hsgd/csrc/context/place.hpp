// Where a rank stands in its communicator.
//
// Owns the numbers, which never change.
#ifndef HSGD_CONTEXT_PLACE_HPP_
#define HSGD_CONTEXT_PLACE_HPP_

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
  std::vector<int> node_of_rank;  // by world rank; empty on one node
  std::string one_thread;         // why the transport serves one thread only; empty: it does not
  // Whether the caller's thread may not use the transport, and why; nullptr: any may.
  bool (*is_foreign_thread)() = nullptr;
  std::string why_foreign;
};

// That of `rank` where each rank is on this node: nodes are numbered by their first ranks.
HSGD_API Place place_on(std::vector<int> node_of_rank, int rank);

}  // namespace hsgd

#endif  // HSGD_CONTEXT_PLACE_HPP_
