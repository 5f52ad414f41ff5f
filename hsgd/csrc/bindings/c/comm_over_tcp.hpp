// Communicators over TCP, without MPI: which ranks lead, and the way to a communicator.
#ifndef HSGD_BINDINGS_C_COMM_OVER_TCP_HPP_
#define HSGD_BINDINGS_C_COMM_OVER_TCP_HPP_

#include <string>
#include <vector>

#include "hsgd_core.h"
#include "network/tcp_messages/tcp_leader.hpp"

namespace hsgd {

// The nodes of all ranks, numbered by their first ranks, and hsgd_near_nic() of each.
struct RankTable {
  std::vector<int> nodes, nics;
};

// Returns the world ranks of each lane, by node; see leaders_of(). Throws HSGD_ERR_ARGUMENT for a
// table that cannot be.
HSGD_API std::vector<std::vector<int>> checked_leaders(const RankTable& table);
// Collective over all ranks, blocking. `path`: see hsgd_comm_create_local; the same on all ranks of
// a node, different on each node. `leader`: connected, on leaders of several nodes, otherwise
// nullptr; not usable afterwards. The table is the same on all ranks.
HSGD_API hsgd_comm* new_comm_over_tcp(const std::string& path, const RankTable& table, int rank,
                                      TcpLeader* leader, const hsgd_options& options);

}  // namespace hsgd

#endif  // HSGD_BINDINGS_C_COMM_OVER_TCP_HPP_
