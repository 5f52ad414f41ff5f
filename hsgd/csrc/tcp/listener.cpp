// Addresses of this node, and one port that is free at all of them.
#include "tcp/listener.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "rendezvous/secret.hpp"
#include "tcp/socket.hpp"

namespace hsgd {
namespace {

constexpr int kBacklog = 1024;
// The kernel gives a port that is free at the first address; at another one it may be taken.
constexpr int kTries = 32;

sockaddr_in at(uint32_t host, uint32_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = static_cast<in_port_t>(port);
  address.sin_addr.s_addr = host;
  return address;
}

uint32_t port_of(const Fd& fd) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    fail_system("getsockname");
  }
  return address.sin_port;
}

// Of interfaces that are up; loopback only on a machine without a network, where nothing else is of
// use.
void find_addresses(SocketPlace* place) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) fail_system("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, ::freeifaddrs);
  auto& found = place->addresses;
  size_t count = 0;
  for (const bool loopback : {false, true}) {
    if (loopback && count > 0) break;
    for (const ifaddrs* each = all; each != nullptr && count < found.size();
         each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
      if ((each->ifa_flags & IFF_UP) == 0 || ((each->ifa_flags & IFF_LOOPBACK) != 0) != loopback) {
        continue;
      }
      const auto host = reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr.s_addr;
      const auto mask = reinterpret_cast<const sockaddr_in*>(each->ifa_netmask)->sin_addr.s_addr;
      const auto end = found.begin() + static_cast<std::ptrdiff_t>(count);
      const bool twice =
          std::any_of(found.begin(), end, [&](const auto& one) { return one.host == host; });
      if (!twice && host != 0) found[count++] = {host, mask};
    }
  }
}

}  // namespace

// Not an address that both have, as bridges of containers do on every host, unless nothing else is
// shared.
uint32_t reach(const SocketPlace& from, const SocketPlace& to) {
  uint32_t both = 0;
  for (const auto& own : from.addresses) {
    for (const auto& other : to.addresses) {
      if (own.host == 0 || other.host == 0) continue;
      if ((own.host & own.mask) != (other.host & own.mask)) continue;
      const bool ours = std::any_of(from.addresses.begin(), from.addresses.end(),
                                    [&](const auto& mine) { return mine.host == other.host; });
      if (!ours) return other.host;
      both = other.host;
    }
  }
  if (both != 0) return both;
  return to.addresses.front().host;
}

SocketListener::SocketListener() {
  find_addresses(&place_);
  draw_random(place_.token.data(), place_.token.size());
  int tries = kTries;
  while (!bind_all()) {
    if (--tries == 0) fail_system("bind");
  }
}

// False, and errno, when the port is taken at one of the addresses.
bool SocketListener::bind_all() {
  fds_.clear();
  place_.port = 0;
  for (const auto& address : place_.addresses) {
    if (address.host == 0) break;
    Fd fd = new_tcp_socket();
    const sockaddr_in wanted = at(address.host, place_.port);
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&wanted), sizeof wanted) != 0) {
      if (errno == EADDRINUSE && place_.port != 0) return false;
      fail_system("bind");
    }
    place_.port = port_of(fd);
    fds_.push_back(std::move(fd));
  }
  return true;
}

std::vector<Fd> SocketListener::listen(const std::vector<SocketPlace>& places,
                                       const std::vector<bool>& connect) {
  std::set<uint32_t> used;
  for (size_t from = 0; from < places.size(); ++from) {
    if (connect[from]) used.insert(reach(places[from], place_));
  }
  std::vector<Fd> open;
  for (size_t i = 0; i < fds_.size(); ++i) {
    if (used.count(place_.addresses[i].host) == 0) continue;
    if (::listen(fds_[i].get(), kBacklog) != 0) fail_system("listen");
    open.push_back(std::move(fds_[i]));
  }
  fds_.clear();
  return open;
}

}  // namespace hsgd
