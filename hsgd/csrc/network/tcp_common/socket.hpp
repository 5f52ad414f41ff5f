// TCP sockets as ranks use them: made not to block, and asking whether the other host is there.
//
// Owns the options. Never connects, and never closes what it was given.
#ifndef HSGD_NETWORK_TCP_COMMON_SOCKET_HPP_
#define HSGD_NETWORK_TCP_COMMON_SOCKET_HPP_

#include "core/os/shared_memory.hpp"

namespace hsgd {

// `family`: AF_INET, or AF_INET6, then for IPv6 alone. Throws HSGD_ERR_SYSTEM.
Fd new_tcp_socket(int family);

// Without such an option a connection is slower, or later to notice that a host is gone, and else
// the same: so it is no error where the kernel has it not.
void set_tcp_option(int fd, int level, int name, int value);

// A host without power or network ends no connection: the kernel has to ask. It asks an idle one
// from a quarter of `timeout_s` on, and gives up after half of it, 450 s at most. 0: as the kernel
// does.
// `kReads`: this end sends confirmations only. Those that nobody acknowledges end it after as long.
// `kWrites`: data that nobody acknowledges the kernel repeats as long as is usual (tcp_retries2);
// the Outbox ends what was not delivered at its deadline. TCP_USER_TIMEOUT would end it here, too,
// but also where a process stands still and takes nothing; and it overrules the number of questions
// to an idle connection (tcp_keepalive_timer() of Linux), so it can be no longer than these take.
enum class TcpEnd { kReads, kWrites };
void watch_host(int fd, double timeout_s, TcpEnd end);

// Whether the other kernel has all that was written, or will never have it, as the connection is
// gone: the kernel forgets neither what it had still to send nor to count it (SIOCOUTQ).
bool is_delivered(int fd);

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_COMMON_SOCKET_HPP_
