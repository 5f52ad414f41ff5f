// The TCP form of Transport: connections between the leaders of nodes that have one local rank.
//
// Owns the connections, and what is under way on them. Makes progress when it is asked, in the
// thread that asks; it has none of its own. A leader that ends without a word, whose connections
// the kernel then ends, counts as one that parted before all collectives: so it is named at once.
#ifndef HSGD_NETWORK_TCP_MESSAGES_TRANSPORT_HPP_
#define HSGD_NETWORK_TCP_MESSAGES_TRANSPORT_HPP_

#include <memory>
#include <vector>

#include "core/os/shared_memory.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

// `connections`: by node, as of ConnectionPlan, to leaders that let this one in; of the own node
// `node` they are ignored. `ranks`: world ranks of the leaders, by node, for messages. `timeout_s`:
// see watch_host(). Throws HSGD_ERR_SYSTEM.
std::unique_ptr<Transport> make_tcp_transport(std::vector<std::vector<Fd>> connections,
                                              std::vector<int> ranks, int node, double timeout_s);

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_MESSAGES_TRANSPORT_HPP_
