// Messages between nodes that are threads of one process: for tests and for simulation.
//
// Owns the queues between all pairs of nodes. Messages of one channel between two nodes keep their
// order; with a seed, messages of different channels and pairs overtake one another and arrive
// late, in an order that depends on the seed and on timing. Never used by communicators over MPI.
#ifndef HSGD_TRANSPORT_INPROC_HPP_
#define HSGD_TRANSPORT_INPROC_HPP_

#include <cstdint>
#include <memory>

#include "network/transport/transport.hpp"

namespace hsgd {

// What connects `node_count` nodes. Outlives no transport: each holds it.
class InprocNetwork;

struct InprocOptions {
  int node_count = 1;
  uint64_t seed = 0;        // 0: messages arrive at once
  int most_late_polls = 8;  // a message is late by up to so many calls of done() at its receiver
};

HSGD_API std::shared_ptr<InprocNetwork> make_inproc_network(const InprocOptions& options);

// The end of `node` on `lane`: leaders of a node use one lane each, and hear only their own lane.
HSGD_API std::unique_ptr<Transport> make_inproc_transport(std::shared_ptr<InprocNetwork> network,
                                                          int node, int lane);

}  // namespace hsgd

#endif  // HSGD_TRANSPORT_INPROC_HPP_
