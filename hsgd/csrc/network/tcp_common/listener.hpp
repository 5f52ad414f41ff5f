// SocketListener: listening TCP sockets of a rank; SocketPlace: where other ranks reach them.
//
// Owns one socket for each address of this node, all with one port. They are bound at once, so that
// the port is known, but listen only at addresses that other ranks will use, once these are known.
// Never accepts.
#ifndef HSGD_NETWORK_TCP_COMMON_LISTENER_HPP_
#define HSGD_NETWORK_TCP_COMMON_LISTENER_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "core/os/shared_memory.hpp"
#include "network/tcp_common/address.hpp"
#include "network/tcp_common/frames.hpp"

namespace hsgd {

// A rank's addresses, port and token, exchanged byte by byte between all ranks at set-up.
struct SocketPlace {
  IpAddresses addresses;
  SocketToken token;  // a process that does not know it is not a rank
  uint32_t port;      // network order, at all addresses
  uint32_t reserved;
};
static_assert(sizeof(SocketPlace) == 344, "is exchanged as bytes");

class SocketListener {
 public:
  // `where`: interfaces as for find_addresses(), whose errors it throws, and then ";FIRST-LAST" if
  // the port must lie in a range. Throws HSGD_ERR_ARGUMENT if that is no range, HSGD_ERR_SYSTEM if
  // it has no free port.
  explicit SocketListener(const std::string& where = "");
  const SocketPlace& place() const { return place_; }
  // Returns listening sockets at the addresses that the ranks in `connect` (by rank) use; closes
  // the others. Throws HSGD_ERR_SYSTEM.
  std::vector<Fd> listen(const std::vector<SocketPlace>& places, const std::vector<bool>& connect);
  // Returns listening sockets at all addresses, if the places of the other ranks are not known yet.
  // Throws HSGD_ERR_SYSTEM.
  std::vector<Fd> listen();

 private:
  bool bind_all(uint16_t port);

  std::vector<Fd> fds_;  // in the order of place_.addresses
  SocketPlace place_{};
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_COMMON_LISTENER_HPP_
