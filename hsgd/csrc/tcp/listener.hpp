// Where a rank can be reached over TCP, and the sockets that wait there.
//
// Owns the listening sockets, one for each address of this node, all of one port. They are bound at
// once, so that the port is known, but listen only at addresses that other ranks will use, when
// these are known. Never accepts.
#ifndef HSGD_TCP_LISTENER_HPP_
#define HSGD_TCP_LISTENER_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "os/shared_memory.hpp"
#include "tcp/frames.hpp"

namespace hsgd {

// What all ranks tell one another at set-up, byte by byte.
struct SocketPlace {
  struct Address {
    uint32_t host;  // IPv4, network order; 0: none
    uint32_t mask;
  };
  std::array<Address, 8> addresses;
  SocketToken token;  // who does not know it is no rank
  uint32_t port;      // network order
  uint32_t reserved;
};
static_assert(sizeof(SocketPlace) == 88, "is exchanged as bytes");

// The address of `to` that `from` connects to: one that lies in a network of its own, or else the
// first. 0: there is none.
uint32_t reach(const SocketPlace& from, const SocketPlace& to);

class SocketListener {
 public:
  SocketListener();  // throws HSGD_ERR_SYSTEM
  const SocketPlace& place() const { return place_; }
  // The sockets at the addresses that the ranks use which `connect`, by rank, listening; the rest
  // is closed. Throws HSGD_ERR_SYSTEM.
  std::vector<Fd> listen(const std::vector<SocketPlace>& places, const std::vector<bool>& connect);

 private:
  bool bind_all();

  std::vector<Fd> fds_;  // as place_.addresses
  SocketPlace place_{};
};

}  // namespace hsgd

#endif  // HSGD_TCP_LISTENER_HPP_
