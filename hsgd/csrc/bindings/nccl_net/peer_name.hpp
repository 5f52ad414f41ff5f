// Names of this process and of its peers for messages: host, pid and address. NCCL tells a plugin
// no ranks.
#ifndef HSGD_BINDINGS_NCCL_NET_PEER_NAME_HPP_
#define HSGD_BINDINGS_NCCL_NET_PEER_NAME_HPP_

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/base/error.hpp"

namespace hsgd::nccl_net {

// Writes the first part of this host's name, which ends with a zero.
template <size_t kBytes>
void write_host(char (&host)[kBytes]) {
  std::memset(host, 0, kBytes);
  if (::gethostname(host, kBytes - 1) != 0 && host[0] == '\0') host[0] = '?';
}

// Returns "node2 (pid 412, 10.0.0.2:40112)"; the host's name was written by the peer.
template <size_t kBytes>
std::string peer_name(const char (&host)[kBytes], uint32_t pid, int fd) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  char number[NI_MAXHOST] = "?";
  char port[NI_MAXSERV] = "?";
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (::getpeername(fd, generic, &bytes) == 0) {
    ::getnameinfo(generic, bytes, number, sizeof number, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV);
  }
  return text("%s (pid %u, %s:%s)", foreign_words(host, kBytes).c_str(), pid, number, port);
}

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_PEER_NAME_HPP_
