// Which ranks share a node.
//
// Owns the question, and the sockets at which the ranks of a node meet. MPI's own answer
// (MPI_Comm_split_type) knows no deadline, and would have to be proven all the same: ranks in
// separate containers of one host, for example, share no memory. So ranks of one kernel and network
// namespace are candidates, and a socket under a random name proves it. Calls PMPI_* only.
#ifndef HSGD_BINDINGS_MPI_COMMUNICATORS_NODES_HPP_
#define HSGD_BINDINGS_MPI_COMMUNICATORS_NODES_HPP_

#include <memory>
#include <string>
#include <vector>

#include "bindings/mpi_communicators/steps.hpp"
#include "node/rendezvous/listener.hpp"

namespace hsgd {

struct Nodes {
  std::vector<int> node_of_rank;  // numbered in the order of their first ranks
  int count = 0;

  // The own one: its ranks in order, and where they meet.
  std::vector<int> ranks;
  std::string path;
  std::unique_ptr<Listener> listener;  // on its first rank
};

// Collective. `words`: the same on all ranks, told over MPI; they make the secret of the meetings.
Nodes find_nodes(Steps& steps, const MeetingWords& words);

// Among the first ranks of all nodes: the names of their hosts, separated by commas, by node. "" on
// other ranks, and of one node.
std::string find_hosts(Steps& steps, const Nodes& nodes);

}  // namespace hsgd

#endif  // HSGD_BINDINGS_MPI_COMMUNICATORS_NODES_HPP_
