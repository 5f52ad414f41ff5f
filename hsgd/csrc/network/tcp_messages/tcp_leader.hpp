// TcpLeader: a leader that can be reached over TCP, and its connections to the leaders of other
// nodes.
//
// Owns the listening sockets until all connections exist. Accepts only peers that know this
// leader's token, which is sent in another way. A stranger costs a descriptor for a few seconds at
// most. Never sends messages.
#ifndef HSGD_NETWORK_TCP_MESSAGES_TCP_LEADER_HPP_
#define HSGD_NETWORK_TCP_MESSAGES_TCP_LEADER_HPP_

#include <memory>
#include <string>
#include <vector>

#include "core/os/shared_memory.hpp"
#include "core/os/wait.hpp"
#include "network/tcp_common/listener.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

// The leaders of all nodes that have the same local rank.
struct TcpLeaders {
  std::vector<SocketPlace> places;  // by node
  std::vector<int> ranks;           // their names in errors, by node
  int node = 0;                     // this leader's node
};

class HSGD_API TcpLeader {
 public:
  // Listens from now on. `interfaces` and errors: see find_addresses(). Also throws HSGD_ERR_SYSTEM
  // if there are too few descriptors for connections to `nodes` nodes: here, because a leader that
  // fails in connect() would delay the others.
  TcpLeader(const std::string& interfaces, int nodes);
  ~TcpLeader();
  const SocketPlace& place() const { return place_; }

  // Collective over the leaders, blocking: connects to all others. Throws CollectiveTimeout and
  // PeerLost, which name one that cannot be reached. Call it once.
  void connect(TcpLeaders leaders, const Deadline& deadline);
  // Makes the transport over these connections. Call it once, after connect(). `timeout_s`: see
  // watch_host().
  std::unique_ptr<Transport> make_transport(double timeout_s);

 private:
  SocketPlace place_;
  std::vector<Fd> listeners_;
  TcpLeaders leaders_;
  std::vector<std::vector<Fd>> connections_;  // by node, in the order of ConnectionPlan
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_MESSAGES_TCP_LEADER_HPP_
