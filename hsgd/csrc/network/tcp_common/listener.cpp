// Finds the addresses of this node, and one port that is free at all of them.
#include "network/tcp_common/listener.hpp"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "core/base/error.hpp"
#include "network/tcp_common/socket.hpp"
#include "node/rendezvous/secret.hpp"

namespace hsgd {
namespace {

constexpr int kBacklog = 1024;
// The kernel gives a port that is free at the first address; at another address it may be in use.
constexpr int kTries = 32;

uint32_t port_of(const Fd& fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    fail_system("getsockname");
  }
  // The port has the same offset in both structs.
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  return reinterpret_cast<const sockaddr_in*>(&address)->sin_port;
}

}  // namespace

SocketAddress reach(const SocketPlace& from, const SocketPlace& to) {
  return socket_address(reach(from.addresses, to.addresses), to.port);
}

SocketListener::SocketListener(const std::string& interfaces) {
  place_.addresses = find_addresses(interfaces);
  draw_random(place_.token.data(), place_.token.size());
  int tries = kTries;
  while (!bind_all()) {
    if (--tries == 0) fail_system("bind");
  }
}

// Returns false, with errno, if the port is in use at one of the addresses.
bool SocketListener::bind_all() {
  fds_.clear();
  place_.port = 0;
  for (const auto& address : place_.addresses) {
    if (address.version == 0) break;
    Fd fd = new_tcp_socket(family_of(address));
    const SocketAddress wanted = socket_address(address, place_.port);
    if (::bind(fd.get(), wanted.get(), wanted.bytes) != 0) {
      if (errno == EADDRINUSE && place_.port != 0) return false;
      fail_system("bind");
    }
    place_.port = port_of(fd);
    fds_.push_back(std::move(fd));
  }
  return true;
}

std::vector<Fd> SocketListener::listen() {
  for (const Fd& fd : fds_) {
    if (::listen(fd.get(), kBacklog) != 0) fail_system("listen");
  }
  return std::move(fds_);
}

std::vector<Fd> SocketListener::listen(const std::vector<SocketPlace>& places,
                                       const std::vector<bool>& connect) {
  std::vector<IpAddress> used;
  for (size_t from = 0; from < places.size(); ++from) {
    if (connect[from]) used.push_back(reach(places[from].addresses, place_.addresses));
  }
  std::vector<Fd> open;
  for (size_t i = 0; i < fds_.size(); ++i) {
    const bool is_used = std::any_of(used.begin(), used.end(), [&](const IpAddress& one) {
      return is_same_host(one, place_.addresses[i]);
    });
    if (!is_used) continue;
    if (::listen(fds_[i].get(), kBacklog) != 0) fail_system("listen");
    open.push_back(std::move(fds_[i]));
  }
  fds_.clear();
  return open;
}

}  // namespace hsgd
