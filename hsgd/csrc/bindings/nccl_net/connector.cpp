#include "bindings/nccl_net/connector.hpp"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "bindings/nccl_net/peer_name.hpp"
#include "core/base/error.hpp"
#include "network/tcp_common/address.hpp"
#include "network/tcp_common/socket.hpp"
#include "node/rendezvous/secret.hpp"

namespace hsgd::nccl_net {
namespace {

// Time for an answer at one address if there are others: a firewall may drop what is sent.
constexpr int64_t kRouteNs = 3'000'000'000;
// Number of connections that may be closed before the answer, as a full receiver closes some.
constexpr int kMostTries = 16;

}  // namespace

Connector::Connector(const Handle& handle, const std::string& interfaces, double timeout_s)
    : handle_(handle), timeout_s_(timeout_s), deadline_(timeout_s) {
  const IpAddresses addresses = unpack_addresses(handle);
  if (handle.magic != kMagic || handle.connections != kConnections || addresses[0].version == 0) {
    throw_invalid(
        "a handle of another network plugin, or of another version of hsgd: set "
        "NCCL_NET_PLUGIN to the same library in all processes");
  }
  routes_ = routes(find_addresses(interfaces), addresses);
  tried_.resize(routes_.size());
  draw_random(&channel_, sizeof channel_);
  open_all();
}

void Connector::open_all() {
  route_ns_ = now_ns();
  lines_.clear();
  lines_.resize(kConnections);
  for (Line& line : lines_) open(line);
}

void Connector::open(Line& line) {
  const SocketAddress address = socket_address(routes_[route_], handle_.port);
  line = Line{new_tcp_socket(address.storage.ss_family)};
  set_tcp_option(line.fd.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  // Other failures are found at the next step, as those of a connection in progress.
  if (::connect(line.fd.get(), address.get(), address.bytes) != 0 && errno != EINPROGRESS) {
    line.fd = Fd();
    tried_[route_] = std::strerror(errno);
  }
}

std::unique_ptr<SendChannel> Connector::step() {
  if (deadline_.passed()) {
    throw_error(HSGD_ERR_TIMEOUT, -1,
                "%s did not accept a connection within %g s: it hangs, or routing or a firewall "
                "blocks the connection; choose other interfaces with NCCL_SOCKET_IFNAME",
                where().c_str(), timeout_s_);
  }
  for (uint32_t index = 0; index < kConnections; ++index) {
    // The addresses may change meanwhile, which begins all lines again.
    const size_t route = route_;
    if (!lines_[index].is_proved()) advance(lines_[index], index);
    if (route != route_) return nullptr;
  }
  if (std::all_of(lines_.begin(), lines_.end(),
                  [](const Line& line) { return line.is_proved(); })) {
    return commit();
  }
  const bool is_silent =
      std::none_of(lines_.begin(), lines_.end(), [](const Line& line) { return line.greeted; });
  if (is_silent && routes_.size() > 1 && now_ns() - route_ns_ > kRouteNs) {
    refused_ = 0;
    change_route("no answer");
  }
  return nullptr;
}

void Connector::advance(Line& line, uint32_t index) {
  if (!line.fd.valid()) return change_route(tried_[route_]);
  const int fd = line.fd.get();
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error == ECONNRESET) return come_again(line);  // it existed
  if (error != 0) return change_route(std::strerror(error));
  if (!line.greeted) {
    Hello hello{handle_.sender_token, kMagic, static_cast<uint32_t>(::getpid()), channel_, index,
                kConnections,         {}};
    write_host(hello.host);
    // A new connection has room for the hello, or is not connected yet.
    const ssize_t sent = ::send(fd, &hello, sizeof hello, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && (errno == EAGAIN || errno == ENOTCONN || errno == EINTR)) return;
    line.greeted = sent == sizeof hello;
    if (!line.greeted) return come_again(line);
  }
  auto* into = reinterpret_cast<std::byte*>(&line.answer) + line.got;
  const ssize_t got = ::recv(fd, into, sizeof line.answer - line.got, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (got <= 0) return come_again(line);
  line.got += static_cast<size_t>(got);
  if (!line.is_proved()) return;
  const SocketToken& token = handle_.receiver_token;
  if (line.answer.magic != kMagic ||
      !is_same_secret(line.answer.token.data(), token.data(), token.size())) {
    change_route("another process, which does not know the secret of the handle");
  }
}

void Connector::come_again(Line& line) {
  if (++tries_ <= kMostTries) return open(line);
  change_route(text("closed %d connections before it answered", tries_));
}

// Notes what the present address did, and takes the next one. Throws if all have refused.
void Connector::change_route(const std::string& why) {
  tried_[route_] = words_of(routes_[route_]) + " (" + why + ")";
  if (++refused_ >= routes_.size()) {
    throw_error(HSGD_ERR_PEER_LOST, -1,
                "%s did not accept a connection: it died, strangers flood its port, or routing or "
                "a firewall blocks the connection; choose other interfaces with NCCL_SOCKET_IFNAME",
                where().c_str());
  }
  route_ = (route_ + 1) % routes_.size();
  tries_ = 0;
  open_all();
}

std::unique_ptr<SendChannel> Connector::commit() {
  const std::string peer = peer_name(handle_.host, handle_.pid, lines_[0].fd.get());
  std::vector<Fd> connections;
  for (Line& line : lines_) {
    const ssize_t sent = ::send(line.fd.get(), &kGo, sizeof kGo, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent != static_cast<ssize_t>(sizeof kGo)) {
      throw_error(HSGD_ERR_PEER_LOST, -1, "%s ended while it was connected", peer.c_str());
    }
    connections.push_back(std::move(line.fd));
  }
  return std::make_unique<SendChannel>(std::move(connections), peer, timeout_s_);
}

// Returns "node2 (pid 412, TCP port 40112 of 10.0.0.2, ...)", with what is known of each address.
std::string Connector::where() const {
  std::vector<std::string> words;
  for (size_t i = 0; i < routes_.size(); ++i) {
    words.push_back(tried_[i].empty() ? words_of(routes_[i]) : tried_[i]);
  }
  return text("%s (pid %u, TCP port %d of %s)",
              foreign_words(handle_.host, sizeof handle_.host).c_str(), handle_.pid,
              ntohs(static_cast<in_port_t>(handle_.port)), listed(words).c_str());
}

}  // namespace hsgd::nccl_net
