// Connects the leaders, and exchanges hellos.
#include "network/tcp_messages/tcp_leader.hpp"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "network/tcp_common/door.hpp"
#include "network/tcp_common/socket.hpp"
#include "network/tcp_messages/message_frames.hpp"
#include "network/tcp_messages/transport.hpp"
#include "node/rendezvous/bootstrap.hpp"
#include "node/rendezvous/secret.hpp"

namespace hsgd {
namespace {

// Time for a hello. Leaders send it at once; the limit is longer because one may be stopped.
constexpr int64_t kHelloNs = 10'000'000'000;
// Number of attempts if a connection is closed together with silent ones.
constexpr int kMostTries = 4;
// Interval between checks of the deadline.
constexpr int kLookMs = 20;
// Time for a connection at one address if there are others: a firewall may drop what is sent.
constexpr int64_t kRouteNs = 3'000'000'000;

int checked(int result, const char* what) {
  if (result < 0) fail_system(what);
  return result;
}

void check_nodes(int nodes, int node) {
  if (nodes >= 1 && node >= 0 && node < nodes) return;
  throw_invalid("node %d of %d: give a node from 0 to nodes - 1", node, nodes);
}

bool no_more() { return errno == EAGAIN || errno == EWOULDBLOCK; }

// Connects each pair: the higher node connects to the lower one.
class Meeting {
 public:
  Meeting(std::vector<Fd> listeners, const TcpLeaders& leaders)
      : leaders_(leaders),
        nodes_(static_cast<int>(leaders.places.size())),
        plan_(nodes_),
        poll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
        door_(std::move(listeners), poll_.get(), kHelloNs,
              static_cast<size_t>(plan_.count()) * leaders.places.size()),
        open_(static_cast<size_t>(nodes_)) {
    for (auto& pair : open_) pair.resize(static_cast<size_t>(plan_.count()));
    missing_ = static_cast<size_t>(nodes_ - 1) * static_cast<size_t>(plan_.count());
  }

  std::vector<std::vector<Fd>> meet(const Deadline& deadline) {
    for (int node = 0; node < leaders_.node; ++node) {
      for (int index = 0; index < plan_.count(); ++index) call({Fd(), node, index});
    }
    HSGD_FAULT_POINT("over TCP: connecting");
    while (missing_ > 0) {
      if (deadline.passed()) fail_late(deadline.timeout_s());
      if (deadline.interrupted()) {
        throw_error(HSGD_ERR_INTERRUPTED, -1, "set-up between nodes: rank %d was interrupted",
                    rank_of(leaders_.node));
      }
      deadline.check_watch();
      look();
    }
    return std::move(open_);
  }

 private:
  // A connection that this leader makes: sends a hello and waits for the answer.
  struct Call {
    Fd fd;
    int node;
    int index;
    int tries = 1;
    bool greeted = false;
    size_t route = 0;   // number of its address in routes()
    size_t failed = 0;  // addresses in a row that refused
    int64_t since_ns = 0;
    std::vector<std::string> tried{};  // what each address did, by number
  };
  // An accepted connection, with its hello as far as it has arrived.
  struct Guest {
    Fd fd;
    LeaderHello hello{};
    size_t got = 0;
  };

  int rank_of(int node) const { return leaders_.ranks[static_cast<size_t>(node)]; }
  const SocketPlace& place_of(int node) const { return leaders_.places[static_cast<size_t>(node)]; }

  // Adds a descriptor to the poll. If this fails, the caller closes it.
  bool follow(int fd, uint32_t events) const {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    return ::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  std::vector<IpAddress> routes_to(int node) const {
    return routes(place_of(leaders_.node).addresses, place_of(node).addresses);
  }

  void call(Call call) {
    const std::vector<IpAddress> addresses = routes_to(call.node);
    call.tried.resize(addresses.size());
    for (;;) {
      const SocketAddress address = socket_address(addresses[call.route], place_of(call.node).port);
      call.fd = new_tcp_socket(address.storage.ss_family);
      call.greeted = false;
      call.since_ns = now_ns();
      const int fd = call.fd.get();
      set_tcp_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
      if (::connect(fd, address.get(), address.bytes) == 0 || errno == EINPROGRESS) {
        if (!follow(fd, EPOLLOUT | EPOLLIN | EPOLLET)) fail_system("epoll_ctl");
        calls_.emplace(fd, std::move(call));
        return;
      }
      turn_away(call, errno);
    }
  }

  // Notes that an address refused, and takes the next one. Throws if all have refused.
  void turn_away(Call& call, int error) {
    note(call, std::strerror(error));
    if (++call.failed == call.tried.size()) fail_unreachable(call);
    call.route = (call.route + 1) % call.tried.size();
  }

  void note(Call& call, const char* what) const {
    call.tried[call.route] =
        words_of(routes_to(call.node)[call.route]) + " (" + std::string(what) + ")";
  }

  // Tries the next address of calls without an answer.
  void change_routes() {
    std::vector<int> silent;
    for (const auto& [fd, call] : calls_) {
      if (!call.greeted && call.tried.size() > 1 && now_ns() - call.since_ns > kRouteNs)
        silent.push_back(fd);
    }
    for (const int fd : silent) {
      Call again = std::move(calls_.at(fd));
      calls_.erase(fd);
      note(again, "no answer");
      again.failed = 0;
      again.route = (again.route + 1) % again.tried.size();
      call(std::move(again));
    }
  }

  void look() {
    std::array<epoll_event, 64> events{};
    const int own_ms = door_.wait_ms(now_ns());
    const int limit_ms = own_ms < 0 ? kLookMs : std::min(own_ms, kLookMs);
    const int count =
        ::epoll_wait(poll_.get(), events.data(), static_cast<int>(events.size()), limit_ms);
    for (int i = 0; i < count; ++i) {
      const int fd = events[static_cast<size_t>(i)].data.fd;
      if (calls_.count(fd) != 0) {
        go_on(fd);
      } else if (guests_.count(fd) != 0) {
        hear(fd);
      }
    }
    change_routes();
    for (const int fd : door_.overdue(now_ns())) hear_last(fd);
    for (Fd fd = door_.accept(now_ns()); fd.valid(); fd = door_.accept(now_ns())) {
      const int number = fd.get();
      set_tcp_option(number, IPPROTO_TCP, TCP_NODELAY, 1);
      if (follow(number, EPOLLIN)) {
        guests_.emplace(number, Guest{std::move(fd)});
      } else {
        door_.forget(number);
      }
    }
  }

  // --- connections that this leader makes ---

  void go_on(int fd) {
    Call& call = calls_.at(fd);
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    // A reset comes only from a connection that existed.
    if (error != 0 && error != ECONNRESET) {
      Call again = std::move(call);
      calls_.erase(fd);
      turn_away(again, error);
      return this->call(std::move(again));
    }
    if (error == 0 && !call.greeted) {
      const LeaderHello hello{place_of(call.node).token, kLeaderMagic, leaders_.node, call.index,
                              plan_.count()};
      // A new connection has room for the hello, or is not connected yet.
      const ssize_t sent = ::send(fd, &hello, sizeof hello, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && (errno == EAGAIN || errno == ENOTCONN)) return;
      call.greeted = sent == sizeof hello;
      if (!call.greeted) return come_again(fd);
    }
    uint32_t answer = 0;
    const ssize_t got = error != 0 ? 0 : ::recv(fd, &answer, sizeof answer, MSG_DONTWAIT);
    if (got < 0 && no_more()) return;
    if (got != sizeof answer || answer != kLeaderMagic) return come_again(fd);
    keep(std::move(call.fd), call.node, call.index);
    calls_.erase(fd);
  }

  void come_again(int fd) {
    Call again = std::move(calls_.at(fd));
    calls_.erase(fd);
    if (++again.tries > kMostTries) {
      throw_error(HSGD_ERR_PEER_LOST, rank_of(again.node),
                  "set-up between nodes: rank %d refused the connection of rank %d: it died, "
                  "or it runs another version of hsgd",
                  rank_of(again.node), rank_of(leaders_.node));
    }
    call(std::move(again));
  }

  // --- connections that others make ---

  void hear_last(int fd) {
    if (guests_.count(fd) == 0) return door_.forget(fd);
    hear(fd);  // its hello may have come while this thread did not run
    if (guests_.count(fd) != 0) show_out(fd);
  }

  void hear(int fd) {
    Guest& guest = guests_.at(fd);
    auto* into = reinterpret_cast<std::byte*>(&guest.hello) + guest.got;
    const ssize_t got = ::recv(fd, into, sizeof guest.hello - guest.got, MSG_DONTWAIT);
    if (got < 0 && (no_more() || errno == EINTR)) return;
    if (got <= 0) return show_out(fd);
    guest.got += static_cast<size_t>(got);
    if (guest.got < sizeof guest.hello) return;
    const uint32_t answer = kLeaderMagic;
    if (!is_expected(guest.hello) ||
        ::send(fd, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof answer) {
      return show_out(fd);
    }
    const LeaderHello hello = guest.hello;
    Fd kept = std::move(guest.fd);
    show_out(fd);
    keep(std::move(kept), hello.node, hello.connection);
  }

  // A leader whose connection broke before it saw the answer connects again: the later one counts.
  bool is_expected(const LeaderHello& hello) const {
    const SocketToken& token = place_of(leaders_.node).token;
    return is_same_secret(hello.token.data(), token.data(), token.size()) &&
           hello.magic == kLeaderMagic && hello.node > leaders_.node && hello.node < nodes_ &&
           hello.connections == plan_.count() && hello.connection >= 0 &&
           hello.connection < plan_.count();
  }

  void show_out(int fd) {
    door_.forget(fd);
    guests_.erase(fd);
  }

  void keep(Fd fd, int node, int index) {
    ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, fd.get(), nullptr);
    Fd& place = open_[static_cast<size_t>(node)][static_cast<size_t>(index)];
    if (!place.valid()) --missing_;
    place = Fd();
    place = std::move(fd);
  }

  // --- failures ---

  int port_of(int node) const { return ntohs(static_cast<in_port_t>(place_of(node).port)); }

  [[noreturn]] void fail_unreachable(const Call& call) const {
    throw_error(HSGD_ERR_PEER_LOST, rank_of(call.node),
                "set-up between nodes: rank %d did not accept a connection at TCP port %d of "
                "%s: it died, or routing or a firewall blocks the connection; choose other "
                "interfaces with HSGD_INTERFACES",
                rank_of(call.node), port_of(call.node), listed(call.tried).c_str());
  }

  // Returns the addresses at which this leader calls a node, with what is known of each.
  std::string where(int node) const {
    std::vector<std::string> words;
    for (const IpAddress& address : routes_to(node)) words.push_back(words_of(address));
    for (const auto& [fd, call] : calls_) {
      for (size_t i = 0; call.node == node && i < call.tried.size(); ++i) {
        if (!call.tried[i].empty()) words[i] = call.tried[i];
      }
    }
    return text("TCP port %d of %s", port_of(node), listed(words).c_str());
  }

  [[noreturn]] void fail_late(double timeout_s) const {
    int node = 0;
    const auto lacks = [](const Fd& fd) { return !fd.valid(); };
    while (node == leaders_.node || std::none_of(open_[static_cast<size_t>(node)].begin(),
                                                 open_[static_cast<size_t>(node)].end(), lacks)) {
      ++node;
    }
    const std::string how = node < leaders_.node
                                ? "did not accept a connection at " + where(node)
                                : "did not connect to rank " +
                                      std::to_string(rank_of(leaders_.node)) + " at its address";
    throw_error(HSGD_ERR_TIMEOUT, rank_of(node),
                "set-up between nodes: rank %d %s within %g s: it hangs, or routing or a "
                "firewall blocks the connection; choose other interfaces with HSGD_INTERFACES",
                rank_of(node), how.c_str(), timeout_s);
  }

  const TcpLeaders& leaders_;
  const int nodes_;
  const ConnectionPlan plan_;
  Fd poll_;
  SocketDoor door_;
  std::map<int, Call> calls_;    // by descriptor
  std::map<int, Guest> guests_;  // by descriptor
  std::vector<std::vector<Fd>> open_;
  size_t missing_ = 0;
};

}  // namespace

TcpLeader::TcpLeader(const std::string& interfaces, int nodes) {
  check_nodes(nodes, 0);
  check_descriptors(static_cast<size_t>(ConnectionPlan(nodes).count()) *
                    static_cast<size_t>(nodes - 1));
  SocketListener listener(interfaces);
  place_ = listener.place();
  listeners_ = listener.listen();
}

TcpLeader::~TcpLeader() = default;

void TcpLeader::connect(TcpLeaders leaders, const Deadline& deadline) {
  check_nodes(static_cast<int>(leaders.places.size()), leaders.node);
  HSGD_CHECK(!listeners_.empty());
  leaders_ = std::move(leaders);
  connections_ = Meeting(std::exchange(listeners_, {}), leaders_).meet(deadline);
}

std::unique_ptr<Transport> TcpLeader::make_transport(double timeout_s) {
  HSGD_CHECK(connections_.size() == leaders_.ranks.size());
  return make_tcp_transport(std::move(connections_), leaders_.ranks, leaders_.node, timeout_s);
}

}  // namespace hsgd
