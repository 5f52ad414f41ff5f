// UNIX sockets between processes of one node: addresses, and messages with file descriptors.
//
// Also identifies the process at the other end. Sending never waits; connecting and receiving wait
// only as long as the caller allows.
#ifndef HSGD_NODE_RENDEZVOUS_UNIX_SOCKET_HPP_
#define HSGD_NODE_RENDEZVOUS_UNIX_SOCKET_HPP_

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/os/shared_memory.hpp"

namespace hsgd {

inline constexpr int kMostDescriptors = 128;  // per message; the kernel allows 253

struct Address {
  sockaddr_un name{};
  socklen_t bytes = 0;
};

// Returns the address of a path; with '@' it is an abstract name. Throws HSGD_ERR_ARGUMENT if it is
// too long.
Address address_of(const std::string& path);
Fd new_socket();  // SOCK_SEQPACKET: messages arrive whole

// Returns false on failure, with errno. EAGAIN: the listener's queue is full, and stayed full for
// `limit_ms` (0: it did not wait).
bool try_connect(const Fd& socket, const Address& address, int64_t limit_ms);

// The process at the other end: the one that connected, or, on the side that connected, the one
// that listens.
struct Peer {
  uint32_t user = 0;
  int32_t pid = 0;  // 0: outside this PID namespace
  // Returns true for this process's own user and root. Nothing is sent to other users, and nothing
  // that they send is read.
  bool is_trusted() const;
};
Peer peer_of(const Fd& socket);

enum class Sent {
  kDone,
  kGone,   // the other side is gone
  kLater,  // no room now: errno is EAGAIN, or ETOOMANYREFS when this user's processes have more
           // descriptors under way than RLIMIT_NOFILE
};

// Sends one message with up to kMostDescriptors descriptors. Throws if the system refuses.
Sent send_message(int socket, const void* data, size_t bytes, const std::vector<int>& descriptors);
// Returns the bytes received; 0 or less: the other side is gone (see errno). Adds the descriptors
// to `received`.
ssize_t receive_message(int socket, void* data, size_t bytes, std::vector<Fd>* received);

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_UNIX_SOCKET_HPP_
