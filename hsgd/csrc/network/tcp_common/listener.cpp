// Finds the addresses of this node, and one port that is free at all of them.
#include "network/tcp_common/listener.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <utility>

#include "core/base/error.hpp"
#include "network/tcp_common/socket.hpp"
#include "node/rendezvous/secret.hpp"

namespace hsgd {
namespace {

constexpr int kBacklog = 1024;
// The kernel gives a port that is free at the first address; at another address it may be in use.
constexpr unsigned kTries = 32;

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

struct Ports {
  unsigned first;
  unsigned count;
};

Ports read_ports(const std::string& range) {
  unsigned first = 0;
  unsigned last = 0;
  int end = 0;
  if (std::sscanf(range.c_str(), "%5u-%5u%n", &first, &last, &end) != 2 ||
      range.size() != static_cast<size_t>(end) || first == 0 || first > last || last > UINT16_MAX) {
    throw_invalid("ports %s: give the first and the last, as 21000-21999", range.c_str());
  }
  return {first, last - first + 1};
}

}  // namespace

SocketListener::SocketListener(const std::string& where) {
  const size_t names = std::min(where.find(';'), where.size());
  const std::string range = where.substr(std::min(names + 1, where.size()));
  // The kernel chooses port 0.
  const Ports ports = range.empty() ? Ports{0, 1} : read_ports(range);
  place_.addresses = find_addresses(where.substr(0, names));
  draw_random(place_.token.data(), place_.token.size());
  uint32_t start = 0;  // at random, since many ranks may begin at once
  draw_random(&start, sizeof start);
  const unsigned tries = range.empty() ? kTries : ports.count;
  for (unsigned i = 0; i < tries; ++i) {
    if (bind_all(static_cast<uint16_t>(ports.first + (start + i) % ports.count))) return;
  }
  if (range.empty()) fail_system("bind");
  throw_error(HSGD_ERR_SYSTEM, -1,
              "no port of %s is free; each rank that other nodes reach needs one, set "
              "HSGD_PORTS to a wider range",
              range.c_str());
}

// Returns false, with errno, if the port is in use at one of the addresses.
bool SocketListener::bind_all(uint16_t port) {
  fds_.clear();
  place_.port = htons(port);
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
    if (!connect[from]) continue;
    const std::vector<IpAddress> all = routes(places[from].addresses, place_.addresses);
    used.insert(used.end(), all.begin(), all.end());
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
