// UNIX sockets between processes of one node: addresses, and messages with file descriptors.
//
// Owns the system calls. Never decides who speaks to whom, and never waits but where a caller's
// socket does.
#ifndef HSGD_UNIX_SOCKET_HPP_
#define HSGD_UNIX_SOCKET_HPP_

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <string>

#include "segment.hpp"

namespace hsgd {

inline constexpr int kMostDescriptors = 2;  // of one message

struct Address {
  sockaddr_un name{};
  socklen_t bytes = 0;
};

// A path that starts with '@' is an abstract name. Throws HSGD_ERR_ARGUMENT when it is too long.
Address address_of(const std::string& path);
Fd new_socket();  // SOCK_SEQPACKET: messages arrive whole
bool try_connect(const Fd& socket, const Address& address);

// One message with the descriptors of `sent` that are valid, in order; up to kMostDescriptors.
// False: the other side is gone. Throws when the system refuses.
bool send_message(int socket, const void* data, size_t bytes, const Fd* const* sent, int count);
// The bytes received, 0 or less: the other side is gone (errno says). Takes up to kMostDescriptors.
ssize_t receive_message(int socket, void* data, size_t bytes, Fd* const* received, int count);

}  // namespace hsgd

#endif  // HSGD_UNIX_SOCKET_HPP_
