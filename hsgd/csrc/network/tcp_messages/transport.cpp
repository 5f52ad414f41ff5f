// Manages tickets and ready connections, and handles ended connections.
#include "network/tcp_messages/transport.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "core/base/first_count.hpp"
#include "network/tcp_common/socket.hpp"
#include "network/tcp_messages/message_frames.hpp"
#include "network/tcp_messages/message_receiver.hpp"
#include "network/tcp_messages/message_sender.hpp"

namespace hsgd {
namespace {

// A connection for data may end before the first connection has brought the reason.
constexpr int64_t kGraceNs = 500'000'000;

class TcpTransport final : public Transport {
 public:
  TcpTransport(std::vector<std::vector<Fd>> connections, std::vector<int> ranks, int node,
               double timeout_s)
      : ranks_(std::move(ranks)), node_(node), plan_(node_count()) {
    poll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
    if (!poll_.valid()) fail_system("epoll_create1");
    peers_.resize(ranks_.size());
    for (int other = 0; other < node_count(); ++other) {
      if (other != node_)
        take(other, std::move(connections[static_cast<size_t>(other)]), timeout_s);
    }
  }

  int node_rank() const override { return node_; }
  int node_count() const override { return static_cast<int>(ranks_.size()); }
  int descriptor() const override { return poll_.get(); }

  Ticket send(int node, Channel channel, const void* data, size_t bytes) override {
    const Ticket ticket = free_ticket({++messages_, node, false});
    Lane& lane = lane_of(node, channel);
    lane.out.add(ticket, data, bytes);
    for (Connection* connection : lane.connections) {
      if (connection->may_write && lane.out.next() != nullptr) write(*connection);
    }
    return ticket;
  }

  Ticket receive(int node, Channel channel, void* data, size_t capacity_bytes) override {
    const Ticket ticket = free_ticket({++messages_, node, true});
    Lane& lane = lane_of(node, channel);
    lane.in.add(ticket, data, capacity_bytes);
    for (Connection* connection : lane.connections) {
      if (std::exchange(connection->waits, false)) enlist(*connection);
    }
    return ticket;
  }

  // One call asks the kernel about all connections, so a caller that asks for each ticket in turn
  // causes one query.
  bool done(Ticket ticket) override {
    Slot& slot = slots_[ticket];
    if (!slot.complete && !std::exchange(slot.looked, false)) {
      progress(0);
      for (Slot& each : slots_) each.looked = true;
      slot.looked = false;
    }
    if (slot.complete) free_.push_back(ticket);
    return slot.complete;
  }

  int awaited_node() const override { return awaited_among(slots_); }
  int leader_of(int node) const override { return ranks_[static_cast<size_t>(node)]; }

  void part(const Parting& parting) noexcept override {
    if (std::exchange(parted_, true)) return;
    parting_ = parting;
    for (Peer& peer : peers_) say(peer);
  }

  bool heard(Parting* parting) override {
    progress(0);
    const int64_t now = now_ns();
    for (size_t node = 0; node < peers_.size(); ++node) {
      const Peer& peer = peers_[node];
      if (peer.broken_ns != 0 && now - peer.broken_ns >= kGraceNs) lose(node, "");
    }
    if (partings_.empty()) return false;
    *parting = partings_.front();
    partings_.pop_front();
    return true;
  }

  // Receives end at once: nothing is read any more. Sends are finished when the other kernels have
  // the data, because closing a socket with unread bytes drops what they do not have.
  bool quiesce(const Deadline& deadline) noexcept override {
    deaf_ = true;
    try {
      while (!is_flushed() && !deadline.passed()) progress(1);
    } catch (const std::exception&) {  // out of memory
    }
    if (!is_flushed()) return false;
    for (Connection& connection : connections_) ::shutdown(connection.fd.get(), SHUT_WR);
    while (!is_delivered() && !deadline.passed()) pause_ms(1);
    return is_delivered();
  }

 private:
  struct Lane;
  struct Connection {
    Fd fd;
    size_t node = 0;
    Lane* lane = nullptr;  // nullptr: the first connection of the pair, for partings
    MessageSender sender = {};
    MessageReceiver receiver = {};
    bool may_read = true;  // until the kernel reports that there is no data
    bool may_write = true;
    bool waits = false;   // for a receive to be posted
    bool listed = false;  // in ready_
    bool ended = false;
  };
  // One channel to one node.
  struct Lane {
    std::vector<Connection*> connections;
    MessageQueue out;
    ReceiveQueue in;
  };
  struct Peer {
    std::array<Lane, ConnectionPlan::kChannels> lanes;
    Connection* control = nullptr;  // nullptr: this node
    Parting in;                     // as far as it has arrived
    size_t in_got = 0;
    size_t out_sent = 0;
    bool parted = false;    // it parted, or is lost
    int64_t broken_ns = 0;  // time at which a connection for data broke; 0: none is broken
  };
  struct Slot {
    bool complete = false;
    bool looked = false;  // found open, since done() was last called for it
    MessageOrder order;
  };

  void take(int other, std::vector<Fd> fds, double timeout_s) {
    Peer& peer = peers_[static_cast<size_t>(other)];
    for (int index = 0; index < plan_.count(); ++index) {
      connections_.push_back(
          {std::move(fds[static_cast<size_t>(index)]), static_cast<size_t>(other)});
      Connection& connection = connections_.back();
      const bool is_control = index == ConnectionPlan::kControl;
      const int fd = connection.fd.get();
      watch_host(fd, timeout_s, is_control ? TcpEnd::kReads : TcpEnd::kWrites);
      if (is_control) {
        peer.control = &connection;
      } else {
        connection.lane = &peer.lanes[static_cast<size_t>(plan_.channel(index))];
        connection.lane->connections.push_back(&connection);
      }
      epoll_event event{};
      event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
      event.data.ptr = &connection;
      if (::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) fail_system("epoll_ctl");
    }
  }

  Lane& lane_of(int node, Channel channel) {
    HSGD_CHECK(node >= 0 && node < node_count() && node != node_ && !deaf_);
    return peers_[static_cast<size_t>(node)]
        .lanes[static_cast<size_t>(ConnectionPlan::index_of(channel))];
  }

  Ticket free_ticket(const MessageOrder& order) {
    if (free_.empty()) {
      slots_.emplace_back();
      free_.reserve(slots_.size());
      free_.push_back(static_cast<Ticket>(slots_.size() - 1));
    }
    const Ticket ticket = free_.back();
    free_.pop_back();
    slots_[ticket] = {false, false, order};
    return ticket;
  }

  // --- progress ---

  void enlist(Connection& connection) {
    if (connection.ended || std::exchange(connection.listed, true)) return;
    ready_.push_back(&connection);
  }

  void progress(int limit_ms) {
    std::array<epoll_event, 64> events;
    const int count = ::epoll_wait(poll_.get(), events.data(), static_cast<int>(events.size()),
                                   ready_.empty() ? limit_ms : 0);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      auto& connection = *static_cast<Connection*>(event.data.ptr);
      connection.may_read |= (event.events & ~uint32_t{EPOLLOUT}) != 0;
      connection.may_write |= (event.events & EPOLLOUT) != 0;
      enlist(connection);
    }
    // Connections enlisted from here on have their turn next time: each has one turn.
    working_.swap(ready_);
    for (Connection* connection : working_) {
      connection->listed = false;
      serve(*connection);
    }
    working_.clear();
  }

  void serve(Connection& connection) {
    if (connection.ended) return;
    if (connection.lane == nullptr) {
      if (connection.may_write) say(peers_[connection.node]);
      if (connection.may_read && !connection.ended) listen(connection);
      return;
    }
    if (connection.may_write) write(connection);
    if (connection.may_read && !connection.waits && !connection.ended && !deaf_) read(connection);
  }

  void write(Connection& connection) {
    finished_.clear();
    const auto state =
        connection.sender.send(connection.fd.get(), connection.lane->out, &finished_);
    for (const Ticket ticket : finished_) slots_[ticket].complete = true;
    if (state == MessageSender::State::kLost) return end(connection);
    connection.may_write = state == MessageSender::State::kSent;
    // It used its share of this turn and has more to send.
    if (connection.may_write &&
        (connection.sender.busy() || connection.lane->out.next() != nullptr))
      enlist(connection);
  }

  void read(Connection& connection) {
    finished_.clear();
    const auto state =
        connection.receiver.receive(connection.fd.get(), connection.lane->in, &finished_);
    for (const Ticket ticket : finished_) slots_[ticket].complete = true;
    switch (state) {
      case MessageReceiver::State::kMore:
        return enlist(connection);
      case MessageReceiver::State::kDrained:
        connection.may_read = false;
        return;
      case MessageReceiver::State::kWaits:
        connection.waits = true;
        return;
      case MessageReceiver::State::kEnded:
        return end(connection);
      case MessageReceiver::State::kGarbage:
        end(connection);
        return lose(connection.node,
                    "it sent an invalid message; use the same version of hsgd on all nodes");
    }
  }

  // Handles the end of a connection for data.
  void end(Connection& connection) {
    connection.ended = true;
    Peer& peer = peers_[connection.node];
    if (peer.broken_ns == 0) peer.broken_ns = now_ns();
  }

  // --- partings ---

  void say(Peer& peer) noexcept {
    if (!parted_ || peer.control == nullptr || peer.control->ended) return;
    while (peer.out_sent < sizeof parting_) {
      const auto* from = reinterpret_cast<const std::byte*>(&parting_) + peer.out_sent;
      const ssize_t sent = ::send(peer.control->fd.get(), from, sizeof parting_ - peer.out_sent,
                                  MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) {
        // After other errors, the end of the connection is read later, too.
        peer.control->may_write = errno != EAGAIN && errno != EWOULDBLOCK;
        return;
      }
      peer.out_sent += static_cast<size_t>(sent);
    }
  }

  void listen(Connection& connection) {
    Peer& peer = peers_[connection.node];
    while (peer.in_got < sizeof peer.in) {
      auto* into = reinterpret_cast<std::byte*>(&peer.in) + peer.in_got;
      const ssize_t got =
          ::recv(connection.fd.get(), into, sizeof peer.in - peer.in_got, MSG_DONTWAIT);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        connection.may_read = false;
        return;
      }
      if (got <= 0) {
        connection.ended = true;
        return lose(connection.node, got == 0 ? "its connection was closed" : std::strerror(errno));
      }
      peer.in_got += static_cast<size_t>(got);
    }
    connection.may_read = false;
    if (std::exchange(peer.parted, true)) return;
    peer.in.line[sizeof peer.in.line - 1] = '\0';
    partings_.push_back(peer.in);
  }

  // Handles a node whose first connection ended without a valid parting.
  void lose(size_t node, const char* why) {
    Peer& peer = peers_[node];
    peer.broken_ns = 0;
    if (std::exchange(peer.parted, true)) return;
    const int rank = ranks_[node];
    const std::string line = text("rank %d on another node died or was cut off (%s)", rank,
                                  *why != '\0' ? why : "one of its connections was closed");
    partings_.push_back(Parting(0, rank, Parting::kClosed, line));
  }

  // --- the end ---

  bool is_flushed() const {
    return std::all_of(peers_.begin(), peers_.end(), [this](const Peer& peer) {
      if (peer.control == nullptr) return true;
      const bool said = !parted_ || peer.control->ended || peer.out_sent == sizeof parting_;
      return said && std::all_of(peer.lanes.begin(), peer.lanes.end(), [](const Lane& lane) {
               const bool reachable =
                   std::none_of(lane.connections.begin(), lane.connections.end(),
                                [](const Connection* each) { return each->ended; });
               return lane.out.empty() || !reachable;
             });
    });
  }

  bool is_delivered() const {
    return std::all_of(connections_.begin(), connections_.end(), [](const Connection& connection) {
      return connection.ended || hsgd::is_delivered(connection.fd.get());
    });
  }

  const std::vector<int> ranks_;  // names, by node
  const int node_;
  const ConnectionPlan plan_;
  Fd poll_;
  std::deque<Connection> connections_;  // deque: addresses are stable
  std::vector<Peer> peers_;             // by node; never grows after the constructor
  std::vector<Connection*> ready_;      // connections that may have something to do
  std::vector<Connection*> working_;
  std::vector<Ticket> finished_;
  std::vector<Slot> slots_;
  uint64_t messages_ = first_count();
  std::vector<Ticket> free_;
  Parting parting_;  // this node's, once `parted_`
  bool parted_ = false;
  bool deaf_ = false;             // receives were cancelled
  std::deque<Parting> partings_;  // from others, not fetched yet
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(std::vector<std::vector<Fd>> connections,
                                              std::vector<int> ranks, int node, double timeout_s) {
  return std::make_unique<TcpTransport>(std::move(connections), std::move(ranks), node, timeout_s);
}

}  // namespace hsgd
