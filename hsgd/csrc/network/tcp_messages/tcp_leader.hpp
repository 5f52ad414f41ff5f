// A leader that can be reached over TCP, and its connections to those of the other nodes.
//
// Owns the listening sockets until all connections are there, and who may be at their other ends:
// whoever knows the token of this leader, which travels a way of its own. Strangers cost a
// descriptor for seconds at most. Never sends messages.
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

// The leaders with one local rank.
struct TcpLeaders {
  std::vector<SocketPlace> places;  // by node
  std::vector<int> ranks;           // world ranks, by node
  int node = 0;                     // the own one
};

class HSGD_API TcpLeader {
 public:
  // Listens from now on. `interfaces`: as of find_addresses(), and throws what that does, and
  // HSGD_ERR_SYSTEM where the descriptors for connections to so many `nodes` are missing: here, as
  // a leader that fails in connect() keeps the others waiting.
  TcpLeader(const std::string& interfaces, int nodes);
  const SocketPlace& place() const { return place_; }

  // Collective over the leaders, blocking: connects to all others. Throws CollectiveTimeout and
  // PeerLost naming one that cannot be reached. Once.
  void connect(TcpLeaders leaders, const Deadline& deadline);
  // Over these connections. Once, after connect(). `timeout_s`: see watch_host().
  std::unique_ptr<Transport> make_transport(double timeout_s);

 private:
  SocketPlace place_;
  std::vector<Fd> listeners_;
  TcpLeaders leaders_;
  std::vector<std::vector<Fd>> connections_;  // by node; as of ConnectionPlan
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_MESSAGES_TCP_LEADER_HPP_
