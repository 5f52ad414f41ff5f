// Addresses and messages with descriptors (SCM_RIGHTS).
#include "unix_socket.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "error.hpp"

namespace hsgd {

Address address_of(const std::string& path) {
  Address address;
  address.name.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.name.sun_path) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("set-up: path \"%s\" has %zu characters; give one with 1 to %zu", path.c_str(),
                     path.size(), sizeof address.name.sun_path - 1));
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

bool try_connect(const Fd& socket, const Address& address) {
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.name), address.bytes) ==
         0;
}

bool send_message(int socket, const void* data, size_t bytes, const Fd* const* sent, int count) {
  int descriptors[kMostDescriptors];
  int valid = 0;
  HSGD_CHECK(count <= kMostDescriptors);
  for (int i = 0; i < count; ++i) {
    if (sent[i]->valid()) descriptors[valid++] = sent[i]->get();
  }
  iovec piece{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptors)] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (valid > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * static_cast<size_t>(valid));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * static_cast<size_t>(valid));
    std::memcpy(CMSG_DATA(header), descriptors, sizeof(int) * static_cast<size_t>(valid));
  }
  ssize_t done = -1;
  do {
    done = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (done < 0 && errno == EINTR);
  // A receiver that is gone shows itself by its closed socket; anything else is this rank's fault.
  if (done < 0 && errno != EPIPE && errno != ECONNRESET) {
    fail_system("set-up: passing of descriptors (ulimit -n may be too low)");
  }
  return done >= 0;
}

ssize_t receive_message(int socket, void* data, size_t bytes, Fd* const* received, int count) {
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
    // Who closes with something unread resets the socket; what it said before is still there.
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
      Fd taken(descriptor);  // closed where nobody expects it
      if (i < static_cast<size_t>(count)) *received[i] = std::move(taken);
    }
  }
  // What did fit is owned by now.
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    throw Error(HSGD_ERR_SYSTEM, -1,
                "set-up: this process has no room for more descriptors; raise ulimit -n");
  }
  return done;
}

}  // namespace hsgd
