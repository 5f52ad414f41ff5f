// TCP sockets of ranks: nonblocking, with checks that the other host is alive.
#ifndef HSGD_NETWORK_TCP_COMMON_SOCKET_HPP_
#define HSGD_NETWORK_TCP_COMMON_SOCKET_HPP_

#include "core/os/shared_memory.hpp"

namespace hsgd {

// Makes a socket. `family`: AF_INET, or AF_INET6 for IPv6 only. Throws HSGD_ERR_SYSTEM.
Fd new_tcp_socket(int family);

// Sets an option. It is no error if the kernel does not have it: the connection is only slower, or
// notices later that a host is gone.
void set_tcp_option(int fd, int level, int name, int value);

// Makes the kernel probe the other host: a host that loses power or network ends no connection.
// Probes of an idle connection begin after a quarter of `timeout_s`, and it ends after half of it,
// at most 450 s. 0: the kernel's default. `kReads`: this end sends only confirmations; if they are
// not acknowledged for as long, the connection ends. `kWrites`: the kernel repeats unacknowledged
// data for its usual time (tcp_retries2); the Outbox ends writes that were not delivered at their
// deadline. TCP_USER_TIMEOUT would end the connection here, too, but also if a process is stopped
// and reads nothing. It also overrules the number of probes of an idle connection
// (tcp_keepalive_timer() of Linux), so it cannot be longer than these take.
enum class TcpEnd { kReads, kWrites };
void watch_host(int fd, double timeout_s, TcpEnd end);

// Returns true if the other kernel has all that was written, or will never have it because the
// connection is gone: the kernel keeps and counts what it still has to send (SIOCOUTQ).
bool is_delivered(int fd);

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_COMMON_SOCKET_HPP_
