// Addresses and messages with descriptors (SCM_RIGHTS).
#include "node/rendezvous/unix_socket.hpp"

#include <fcntl.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/base/error.hpp"

namespace hsgd {

Address address_of(const std::string& path) {
  Address address;
  address.name.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.name.sun_path) {
    throw_invalid("set-up: path \"%s\" has %zu characters; give one with 1 to %zu", path.c_str(),
                  path.size(), sizeof address.name.sun_path - 1);
  }
  std::memcpy(address.name.sun_path, path.data(), path.size());
  size_t length = path.size() + 1;
  if (path[0] == '@') {
    address.name.sun_path[0] = '\0';
    --length;
  }
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  return address;
}

Fd new_socket() {
  Fd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket.valid()) fail_system("socket");
  return socket;
}

bool try_connect(const Fd& socket, const Address& address, int64_t limit_ms) {
  // A wait inside connect() keeps the place in the kernel's queue. Sending never waits, even with
  // this option.
  const timeval limit{limit_ms / 1000, limit_ms % 1000 * 1000};
  const int flags = ::fcntl(socket.get(), F_GETFL);
  if (::fcntl(socket.get(), F_SETFL, limit_ms > 0 ? flags : flags | O_NONBLOCK) != 0 ||
      ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) != 0) {
    fail_system("setting up a socket");
  }
  const auto* name = reinterpret_cast<const sockaddr*>(&address.name);
  const bool connected = ::connect(socket.get(), name, address.bytes) == 0;
  const int error = errno;
  ::fcntl(socket.get(), F_SETFL, flags);
  errno = error;
  return connected;
}

// If this process's user is not mapped in its user namespace, other users look the same: both are
// the kernel's overflow uid. The proof of the secret still holds there.
bool Peer::is_trusted() const { return user == ::geteuid() || user == 0; }

Peer peer_of(const Fd& socket) {
  ucred who{};
  socklen_t bytes = sizeof who;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &bytes) != 0) {
    fail_system("reading the credentials of a socket's peer");
  }
  return {who.uid, who.pid};
}

Sent send_message(int socket, const void* data, size_t bytes, const std::vector<int>& descriptors) {
  HSGD_CHECK(descriptors.size() <= kMostDescriptors);
  const size_t passed = sizeof(int) * descriptors.size();
  iovec piece{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (passed > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(passed);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(passed);
    std::memcpy(CMSG_DATA(header), descriptors.data(), passed);
  }
  ssize_t done = -1;
  do {
    done = ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (done < 0 && errno == EINTR);
  if (done >= 0) return Sent::kDone;
  if (errno == EAGAIN || errno == ETOOMANYREFS) return Sent::kLater;
  // If the receiver is gone, its socket is closed; other errors are this rank's fault.
  if (errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN) return Sent::kGone;
  fail_system("set-up: passing file descriptors");
}

ssize_t receive_message(int socket, void* data, size_t bytes, std::vector<Fd>* received) {
  iovec piece{data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMostDescriptors)] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t done = -1;
  bool reset = false;
  for (;;) {
    done = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
    if (done >= 0) break;
    // A peer that closes with unread data resets the socket; what it sent before can still be read.
    if (errno != EINTR && (errno != ECONNRESET || std::exchange(reset, true))) break;
  }
  if (done <= 0) return done;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t sent = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < sent; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(header) + i * sizeof(int), sizeof descriptor);
      received->emplace_back(descriptor);
    }
  }
  // The descriptors that did fit are owned by now.
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    throw_error(HSGD_ERR_SYSTEM, -1,
                "set-up: this process has no room for more descriptors; raise ulimit -n");
  }
  return done;
}

}  // namespace hsgd
