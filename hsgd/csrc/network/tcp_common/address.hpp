// IpAddress: IPv4 and IPv6 addresses of a node's interfaces, and the choice between them.
//
// Never resolves names, and never opens a connection. Link-local IPv6 addresses (fe80::/10) are
// left out: they need the number of an interface, which differs between hosts.
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
  uint8_t network_bits;  // number of first bits of `host` that are its network's
  uint8_t reserved[2];
  std::array<uint8_t, 16> host;  // network order; IPv4 uses the first four bytes
};
static_assert(sizeof(IpAddress) == 20, "is exchanged as bytes");

constexpr size_t kMostAddresses = 16;  // per node
using IpAddresses = std::array<IpAddress, kMostAddresses>;

// Returns the addresses of interfaces that are up: those named in `interfaces`, separated by
// commas, in that order; "": all except loopback, which is used only if a machine has no network.
// Throws HSGD_ERR_ARGUMENT for a name without an address, or HSGD_ERR_SYSTEM.
IpAddresses find_addresses(const std::string& interfaces);

// Returns the addresses of `to` at which `from` may reach it, the most likely first: those in a
// network of `from`, those whose protocol `from` has, and then those that both nodes have, such as
// that of a container bridge. If `from` has the protocol of none, returns the first of `to`.
std::vector<IpAddress> routes(const IpAddresses& from, const IpAddresses& to);

// A socket address for system calls.
struct SocketAddress {
  sockaddr_storage storage;
  socklen_t bytes;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};
SocketAddress socket_address(const IpAddress& address, uint32_t port);  // port in network order
bool is_same_host(const IpAddress& one, const IpAddress& other);
int family_of(const IpAddress& address);         // AF_INET or AF_INET6
std::string words_of(const IpAddress& address);  // as users write it
// Joins what is known of each address, by commas; leaves out empty words.
std::string listed(const std::vector<std::string>& words);

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_COMMON_ADDRESS_HPP_
