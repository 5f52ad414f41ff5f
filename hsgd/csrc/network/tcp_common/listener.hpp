// Where a rank can be reached over TCP, and the sockets that wait there.
//
// Owns the listening sockets, one for each address of this node, all of one port. They are bound at
// once, so that the port is known, but listen only at addresses that other ranks will use, when
// these are known. Never accepts.
#ifndef HSGD_NETWORK_TCP_COMMON_LISTENER_HPP_
#define HSGD_NETWORK_TCP_COMMON_LISTENER_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "core/os/shared_memory.hpp"
#include "network/tcp_common/address.hpp"
#include "network/tcp_common/frames.hpp"

namespace hsgd {

// What all ranks tell one another at set-up, byte by byte.
struct SocketPlace {
  IpAddresses addresses;
  SocketToken token;  // who does not know it is no rank
  uint32_t port;      // network order, at all addresses
  uint32_t reserved;
};
static_assert(sizeof(SocketPlace) == 184, "is exchanged as bytes");

// Where `from` connects to `to`.
SocketAddress reach(const SocketPlace& from, const SocketPlace& to);

class SocketListener {
 public:
  // `interfaces`: as of find_addresses(), and throws what that does.
  explicit SocketListener(const std::string& interfaces = "");
  const SocketPlace& place() const { return place_; }
  // The sockets at the addresses that the ranks use which `connect`, by rank, listening; the rest
  // is closed. Throws HSGD_ERR_SYSTEM.
  std::vector<Fd> listen(const std::vector<SocketPlace>& places, const std::vector<bool>& connect);
  // Those at all addresses, for who does not know the others' places yet. Throws HSGD_ERR_SYSTEM.
  std::vector<Fd> listen();

 private:
  bool bind_all();

  std::vector<Fd> fds_;  // as place_.addresses
  SocketPlace place_{};
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_COMMON_LISTENER_HPP_
