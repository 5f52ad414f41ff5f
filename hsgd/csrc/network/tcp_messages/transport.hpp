// make_tcp_transport(): Transport over TCP, between the leaders of nodes with the same local rank.
//
// Owns the connections. Makes progress only in calls, in the caller's thread; it has no thread of
// its own. If a leader ends without a parting, the kernel ends its connections, and it counts as
// parted before all collectives, so it is reported at once.
#ifndef HSGD_NETWORK_TCP_MESSAGES_TRANSPORT_HPP_
#define HSGD_NETWORK_TCP_MESSAGES_TRANSPORT_HPP_

#include <memory>
#include <vector>

#include "core/os/shared_memory.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

// `connections`: by node, in the order of ConnectionPlan, to leaders that accepted this one; those
// of this node, `node`, are ignored. `ranks`: names of the leaders in errors, by node. `timeout_s`:
// see watch_host(). Throws HSGD_ERR_SYSTEM.
std::unique_ptr<Transport> make_tcp_transport(std::vector<std::vector<Fd>> connections,
                                              std::vector<int> ranks, int node, double timeout_s);

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_MESSAGES_TRANSPORT_HPP_
