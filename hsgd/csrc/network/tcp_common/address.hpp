// Where a node can be reached over TCP: IPv4 and IPv6 addresses of its interfaces.
//
// Owns their form, the choice of interfaces, and which address of another node one connects to.
// Never resolves names, and never opens a connection. IPv6 addresses of one link only (fe80::/10)
// are left out: they mean nothing without the number of an interface, which differs between hosts.
#ifndef HSGD_NETWORK_TCP_COMMON_ADDRESS_HPP_
#define HSGD_NETWORK_TCP_COMMON_ADDRESS_HPP_

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hsgd {

struct IpAddress {
  uint8_t version;       // 4 or 6; 0: none
  uint8_t network_bits;  // so many first bits of `host` are those of its network
  uint8_t reserved[2];
  std::array<uint8_t, 16> host;  // network order; of IPv4 the first four bytes
};
static_assert(sizeof(IpAddress) == 20, "is exchanged as bytes");

constexpr size_t kMostAddresses = 8;  // of a node
using IpAddresses = std::array<IpAddress, kMostAddresses>;

// Of interfaces that are up: those that `interfaces` names, separated by commas, in its order; "":
// all but loopback, which is left out unless a machine has no network. Throws HSGD_ERR_ARGUMENT for
// a name without an address, HSGD_ERR_SYSTEM.
IpAddresses find_addresses(const std::string& interfaces);

// The address of `to` that `from` connects to: one that lies in a network of its own, or else the
// first that it has the protocol for. Version 0: there is none.
IpAddress reach(const IpAddresses& from, const IpAddresses& to);

// What the calls of the kernel take.
struct SocketAddress {
  sockaddr_storage storage;
  socklen_t bytes;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};
SocketAddress socket_address(const IpAddress& address, uint32_t port);  // port in network order
bool is_same_host(const IpAddress& one, const IpAddress& other);
int family_of(const IpAddress& address);         // AF_INET or AF_INET6
std::string words_of(const IpAddress& address);  // as users write it

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_COMMON_ADDRESS_HPP_
