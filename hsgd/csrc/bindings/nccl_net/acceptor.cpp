#include "bindings/nccl_net/acceptor.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <utility>

#include "bindings/nccl_net/peer_name.hpp"
#include "core/base/error.hpp"
#include "network/tcp_common/listener.hpp"
#include "network/tcp_common/socket.hpp"
#include "node/rendezvous/secret.hpp"

namespace hsgd::nccl_net {
namespace {

// Time for a hello. Senders send it at once; the limit is longer because one may be stopped.
constexpr int64_t kHelloNs = 10'000'000'000;
// Connections that may come at the same moment: a sender's, and those of one that began again.
constexpr size_t kExpected = 4 * kConnections;

bool no_more() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

}  // namespace

Acceptor::Acceptor(const std::string& where, double timeout_s, Handle* handle)
    : timeout_s_(timeout_s), poll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!poll_.valid()) fail_system("epoll_create1");
  SocketListener listener(where);
  const SocketPlace place = listener.place();
  *handle = Handle{};
  handle->magic = kMagic;
  handle->pid = static_cast<uint32_t>(::getpid());
  handle->port = place.port;
  handle->connections = kConnections;
  sender_token_ = place.token;
  draw_random(receiver_token_.data(), receiver_token_.size());
  handle->sender_token = sender_token_;
  handle->receiver_token = receiver_token_;
  write_host(handle->host);
  const size_t known = pack_addresses(place.addresses, *handle);
  std::vector<Fd> sockets = listener.listen();
  sockets.resize(std::min(sockets.size(), known));  // nobody learns of the others
  door_.emplace(std::move(sockets), poll_.get(), kHelloNs, kExpected);
}

std::unique_ptr<ReceiveChannel> Acceptor::step() {
  if (!deadline_.has_value()) deadline_.emplace(timeout_s_);
  std::array<epoll_event, 64> events{};
  const int count = ::epoll_wait(poll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const int fd = events[static_cast<size_t>(i)].data.fd;
    if (guests_.count(fd) != 0) hear(fd);
  }
  for (const int fd : door_->overdue(now_ns())) hear_last(fd);
  let_in();
  for (auto each = arrivals_.begin(); each != arrivals_.end();) {
    if (!is_complete(each->second)) {
      each = is_gone(each->second) ? arrivals_.erase(each) : std::next(each);
      continue;
    }
    std::unique_ptr<ReceiveChannel> channel = make_channel(each->second);
    arrivals_.erase(each);
    deadline_.reset();
    return channel;
  }
  if (deadline_->passed()) {
    throw_error(HSGD_ERR_TIMEOUT, -1,
                "no sender connected within %g s: it died or hangs, or routing or a firewall "
                "blocks the connection; choose other interfaces with NCCL_SOCKET_IFNAME",
                timeout_s_);
  }
  return nullptr;
}

void Acceptor::let_in() {
  for (Fd fd = door_->accept(now_ns()); fd.valid(); fd = door_->accept(now_ns())) {
    const int number = fd.get();
    set_tcp_option(number, IPPROTO_TCP, TCP_NODELAY, 1);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = number;
    if (::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, number, &event) != 0) {
      door_->forget(number);
      continue;
    }
    guests_.emplace(number, Guest{std::move(fd)});
    hear(number);
  }
}

// Its hello may have come while nobody called step().
void Acceptor::hear_last(int fd) {
  if (guests_.count(fd) == 0) return door_->forget(fd);
  hear(fd);
  if (guests_.count(fd) != 0) show_out(fd);
}

void Acceptor::hear(int fd) {
  Guest& guest = guests_.at(fd);
  auto* into = reinterpret_cast<std::byte*>(&guest.hello) + guest.got;
  const ssize_t got = ::recv(fd, into, sizeof guest.hello - guest.got, MSG_DONTWAIT);
  if (got < 0 && no_more()) return;
  if (got <= 0) return show_out(fd);
  guest.got += static_cast<size_t>(got);
  if (guest.got < sizeof guest.hello) return;
  const Answer answer{receiver_token_, kMagic, 0};
  if (!is_expected(guest.hello) ||
      ::send(fd, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) !=
          static_cast<ssize_t>(sizeof answer)) {
    return show_out(fd);
  }
  const Hello hello = guest.hello;
  Arrival& arrival = arrivals_[hello.channel];
  arrival.hello = hello;
  arrival.lines.resize(kConnections);
  // If a line comes again the later one counts: the sender has closed the other.
  Line fresh{std::move(guest.fd)};
  ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  std::swap(arrival.lines[hello.connection], fresh);
  show_out(fd);
}

bool Acceptor::is_expected(const Hello& hello) const {
  return is_same_secret(hello.token.data(), sender_token_.data(), sender_token_.size()) &&
         hello.magic == kMagic && hello.connections == kConnections &&
         hello.connection < kConnections;
}

void Acceptor::show_out(int fd) {
  door_->forget(fd);
  guests_.erase(fd);
}

// Reads the kGo of each line, and closes lines whose sender has gone back.
bool Acceptor::is_complete(Arrival& arrival) {
  bool complete = true;
  for (Line& line : arrival.lines) {
    if (line.fd.valid() && !line.is_ready()) {
      auto* into = reinterpret_cast<std::byte*>(&line.word) + line.got;
      const ssize_t got = ::recv(line.fd.get(), into, sizeof line.word - line.got, MSG_DONTWAIT);
      if (got > 0) line.got += static_cast<size_t>(got);
      const bool is_wrong = line.got == sizeof line.word && !line.is_ready();
      if (got == 0 || (got < 0 && !no_more()) || is_wrong) line = Line{};
    }
    complete = complete && line.fd.valid() && line.is_ready();
  }
  return complete;
}

bool Acceptor::is_gone(const Arrival& arrival) {
  return std::none_of(arrival.lines.begin(), arrival.lines.end(),
                      [](const Line& line) { return line.fd.valid(); });
}

std::unique_ptr<ReceiveChannel> Acceptor::make_channel(Arrival& arrival) const {
  const std::string peer =
      peer_name(arrival.hello.host, arrival.hello.pid, arrival.lines[0].fd.get());
  std::vector<Fd> connections;
  for (Line& line : arrival.lines) connections.push_back(std::move(line.fd));
  return std::make_unique<ReceiveChannel>(std::move(connections), peer, timeout_s_);
}

}  // namespace hsgd::nccl_net
