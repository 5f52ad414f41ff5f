// find_nodes(): finds the ranks that share a node, and the sockets at which they meet.
//
// MPI's own answer (MPI_Comm_split_type) has no deadline and would need a proof anyway: ranks in
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

  // This rank's node: its ranks in order, and their meeting place.
  std::vector<int> ranks;
  std::string path;
  std::unique_ptr<Listener> listener;  // on its first rank
};

// Finds the nodes; collective. `words`: the same on all ranks, sent over MPI; they form the secret
// of the meetings.
Nodes find_nodes(Steps& steps, const MeetingWords& words);

// Returns the host names of all nodes by node, separated by commas; collective over the first ranks
// of all nodes. "" on other ranks, and on one node.
std::string find_hosts(Steps& steps, const Nodes& nodes);

}  // namespace hsgd

#endif  // HSGD_BINDINGS_MPI_COMMUNICATORS_NODES_HPP_
