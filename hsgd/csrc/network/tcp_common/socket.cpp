// Makes sockets and sets their options.
#include "network/tcp_common/socket.hpp"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>

#include "core/base/error.hpp"

namespace hsgd {

Fd new_tcp_socket(int family) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) fail_system("socket");
  if (family == AF_INET6) set_tcp_option(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
  return fd;
}

void set_tcp_option(int fd, int level, int name, int value) {
  ::setsockopt(fd, level, name, &value, sizeof value);
}

void watch_host(int fd, double timeout_s, TcpEnd end) {
  if (timeout_s <= 0) return;
  constexpr double kMostS = 900;
  constexpr double kLeastS = 4;
  constexpr int kQuestions = 3;
  const int limit_s = static_cast<int>(std::clamp(timeout_s, kLeastS, kMostS));
  const int idle_s = std::max(1, limit_s / 4);
  const int pause_s = std::max(1, limit_s / 12);
  set_tcp_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_tcp_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, idle_s);
  set_tcp_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, pause_s);
  set_tcp_option(fd, IPPROTO_TCP, TCP_KEEPCNT, kQuestions);
  if (end == TcpEnd::kWrites) return;
  set_tcp_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 1000 * (idle_s + kQuestions * pause_s));
}

bool is_delivered(int fd) {
  int held = 0;
  if (::ioctl(fd, SIOCOUTQ, &held) != 0 || held == 0) return true;
  tcp_info info{};
  socklen_t size = sizeof info;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_state == TCP_CLOSE;
}

}  // namespace hsgd
