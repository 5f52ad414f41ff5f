// Connections, and the thread that serves them.
#include "network/tcp_window/rma.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/first_count.hpp"
#include "core/os/sched_slice.hpp"
#include "core/os/signal_mask.hpp"
#include "core/os/wait.hpp"
#include "network/tcp_common/door.hpp"
#include "network/tcp_common/socket.hpp"
#include "network/tcp_window/receiver.hpp"
#include "network/tcp_window/sender.hpp"

namespace hsgd {
namespace {

// Most slices per rank that the kernel holds unsent. The rest waits here, so that urgent writes can
// still go first.
constexpr uint64_t kNotSentSlices = 4;
// Most bytes that the kernel holds unsent: one system call per 256 KB, because the kernel wakes at
// half, and half a millisecond at 10 Gbit. A large slice then needs several calls.
constexpr uint64_t kMostNotSent = 512 << 10;
// How long a closing rank waits for a rank that reads nothing, if settings are forgiving.
constexpr std::chrono::seconds kPatience{1};
// How long bytes may wait in a connection that waits for more. This is longer than 128 KB take at 1
// Gbit; so many bytes wake the thread by themselves.
constexpr int kLateMs = 2;
constexpr int64_t kLateNs = kLateMs * 1'000'000;
// Number of attempts. A rank that was stopped, or did not run, before its hello is closed together
// with silent connections, and connects again.
constexpr int kMostTries = 4;
// How long an address may leave a connection attempt without an answer before the next one is
// tried.
constexpr int64_t kRouteNs = 3'000'000'000;
constexpr int kRouteLookMs = 1000;
constexpr double kConnectS = 120;  // for all addresses together, about as the kernel for one

int checked(int result, const char* what) {
  if (result < 0) fail_system(what);
  return result;
}

class SocketRma final : public Rma {
 public:
  SocketRma(SocketListener listener, std::vector<SocketPlace> places, int rank, void* base,
            size_t bytes, const SocketSettings& settings)
      : Rma(true),
        places_(std::move(places)),
        rank_(rank),
        target_{static_cast<std::byte*>(base), bytes, places_[static_cast<size_t>(rank)].token,
                static_cast<int64_t>(places_.size())},
        settings_(settings),
        poll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
        wake_(checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")),
        door_(listener.listen(places_, who_connects()), poll_.get(),
              static_cast<int64_t>(settings.hello_s * 1e9), places_.size()) {
    set_descriptor(poll_.get());
    follow(wake_.get(), EPOLLIN);
    for (int rank = 0; rank < static_cast<int>(places_.size()); ++rank) {
      has_choice_ = has_choice_ || (rank != rank_ && routes_to(rank).size() > 1);
    }
  }
  ~SocketRma() override {
    stop();
    for (const auto& [rank, peer] : peers_) part_with(peer.sender.fd());
    for (const auto& [fd, receiver] : receivers_) part_with(fd);
  }

  void start(std::function<void()> arrived) override {
    arrived_ = std::move(arrived);
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { serve(); });
    ::pthread_setname_np(thread_.native_handle(), "hsgd-sockets");
  }

  // Sends in the caller's thread while there is room, then in the network's thread. If it throws,
  // nothing more goes to the rank: some of the pieces may be on their way.
  Ticket post(const std::vector<Piece>& pieces, const Notification& notification) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const std::optional<Error> why = failure_of(notification.target)) throw Error(*why);
    try {
      return post_all(pieces, notification);
    } catch (...) {
      part_with_peer(notification.target);
      throw;
    }
  }
  void drive() override {}  // the thread does it
  bool done(Ticket ticket) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return open_.count(ticket) == 0;
  }
  bool lost(int rank) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return lost_.count(rank) != 0;
  }
  std::optional<Error> failure(int rank) const override {
    // Partner: give_up(). Guards `why_broken_` only.
    if (broken_.load(std::memory_order_acquire)) return why_broken_;
    if (rank == kAll) return std::nullopt;
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_of(rank);
  }
  bool close(const Deadline& deadline) noexcept override {
    finish_open(deadline);
    stop();
    return true;
  }

 private:
  struct Peer {
    SocketSender sender;
    bool connected = false;
    bool waits_for_room = true;  // until it is connected
    int tries = 1;
    size_t route = 0;      // number of its address in routes_to()
    size_t failed = 0;     // addresses that refused
    int64_t since_ns = 0;  // of this attempt,
    int64_t begun_ns = 0;  // and of the first
  };

  std::vector<bool> who_connects() const {
    if (!settings_.connect.empty()) return settings_.connect;
    std::vector<bool> others(places_.size(), true);
    others[static_cast<size_t>(rank_)] = false;
    return others;
  }

  void follow(int fd, uint32_t events) const {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    checked(::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, fd, &event), "epoll_ctl");
  }
  void expect(int fd, uint32_t events) const {
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    // Fails only if out of memory; data that waits for room then goes with the next write.
    ::epoll_ctl(poll_.get(), EPOLL_CTL_MOD, fd, &event);
  }

  // Ends a connection before it is closed. Forked children may also have it; then close() would
  // neither end it nor remove it from the poll.
  void part_with(int fd) const {
    ::epoll_ctl(poll_.get(), EPOLL_CTL_DEL, fd, nullptr);
    ::shutdown(fd, SHUT_RDWR);
  }

  // Waits for open operations until the deadline. If settings are forgiving, waits only while data
  // moves, also of one large write.
  void finish_open(const Deadline& deadline) noexcept {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto over = [&] { return open_.empty() || broken_.load(std::memory_order_acquire); };
    for (uint64_t before = UINT64_MAX; !over() && !deadline.passed();) {
      const uint64_t now = progress();
      if (settings_.forgiving && now == before) return;
      before = now;
      const auto left = std::chrono::nanoseconds(std::max<int64_t>(deadline.remaining_ns(), 0));
      const auto limit =
          settings_.forgiving ? std::min<std::chrono::nanoseconds>(left, kPatience) : left;
      all_done_.wait_for(lock, limit, over);
    }
  }

  // Returns a number that changes whenever data has moved or a rank was lost. Call it with the
  // mutex.
  uint64_t progress() const {
    uint64_t sum = lost_.size();
    for (const auto& [rank, peer] : peers_) sum += peer.sender.progress();
    return sum;
  }

  void stop() noexcept {
    if (!thread_.joinable()) return;
    stopping_.store(true, std::memory_order_relaxed);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
    thread_.join();
  }

  // --- sending ---

  // The following functions need the mutex.
  std::optional<Error> failure_of(int rank) const {
    if (broken_.load(std::memory_order_acquire)) return why_broken_;
    const auto found = failures_.find(rank);
    return found == failures_.end() ? std::nullopt : std::optional<Error>(found->second);
  }

  Ticket post_all(const std::vector<Piece>& pieces, const Notification& notification) {
    const int target = notification.target;
    // nullptr: the rank is lost, and settings are forgiving
    Peer* peer = settings_.forgiving && lost_.count(target) != 0 ? nullptr : peer_of(target);
    const Ticket ticket = last_ticket_ + 1;
    if (peer == nullptr) return finish({++last_ticket_}), ticket;
    open_.insert(ticket);
    try {
      for (const Piece& piece : pieces) {
        const SocketHeader header{piece.offset, piece.bytes, 0, 0};
        if (piece.bytes == 0) continue;
        peer->sender.add(notification.order,
                         {header, static_cast<const std::byte*>(piece.data), ticket});
      }
      const SocketHeader header{notification.offset, 0, notification.version, 0};
      peer->sender.add(notification.order, {header, nullptr, ticket});
    } catch (...) {  // out of memory
      open_.erase(ticket);
      throw;
    }
    ++last_ticket_;
    if (peer->connected && !peer->waits_for_room) send(target, *peer);
    return ticket;
  }

  // Returns nullptr if the rank cannot be reached and settings are forgiving.
  Peer* peer_of(int target) {
    const auto found = peers_.find(target);
    if (found != peers_.end()) return &found->second;
    size_t route = 0;
    Fd connection = begin_connection(target, &route);
    if (!connection.valid()) {
      const Error why = unreachable(target, errno);
      lost_.insert(target);
      if (settings_.forgiving) return nullptr;
      throw failures_.emplace(target, why).first->second;
    }
    const int fd = connection.get();
    const SocketHello hello{places_[static_cast<size_t>(target)].token, rank_};
    Peer peer{SocketSender(std::move(connection), hello, settings_.slice_bytes)};
    peer.route = route;
    peer.since_ns = peer.begun_ns = now_ns();
    target_of_fd_[fd] = target;
    return &peers_.emplace(target, std::move(peer)).first->second;
  }

  // Begins a connection to `target`, which epoll follows, at the first address from `route` on that
  // does not fail at once; returns an invalid socket, with errno, if there is none.
  Fd begin_connection(int target, size_t* route) const {
    const std::vector<IpAddress> addresses = routes_to(target);
    for (size_t tried = 1;; ++tried) {
      *route %= addresses.size();
      Fd connection = begin_at(socket_address(addresses[*route], place_of(target).port));
      if (connection.valid() || tried == addresses.size()) return connection;
      ++*route;
    }
  }

  Fd begin_at(const SocketAddress& address) const {
    Fd connection = new_tcp_socket(address.storage.ss_family);
    const int fd = connection.get();
    set_tcp_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_tcp_option(
        fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT,
        static_cast<int>(std::min(kNotSentSlices * settings_.slice_bytes, kMostNotSent)));
    watch_host(fd, settings_.timeout_s, TcpEnd::kWrites);
    const bool begun = ::connect(fd, address.get(), address.bytes) == 0 || errno == EINPROGRESS;
    if (!begun) return Fd();
    follow(fd, EPOLLOUT | EPOLLIN);
    return connection;
  }

  const SocketPlace& place_of(int rank) const { return places_[static_cast<size_t>(rank)]; }
  std::vector<IpAddress> routes_to(int target) const {
    return routes(place_of(rank_).addresses, place_of(target).addresses);
  }

  void finish(const std::vector<Ticket>& tickets) {
    if (tickets.empty()) return;
    for (const Ticket ticket : tickets) open_.erase(ticket);
    tell_of_finished();
  }

  // A thread that sees the news takes the mutex and finds the tickets done.
  void tell_of_finished() {
    count_news();
    if (open_.empty()) all_done_.notify_all();
  }

  // Finishes tickets; returns true if a waiting thread must be woken for them.
  bool heard(const std::vector<Ticket>& tickets) {
    finish(tickets);
    return !tickets.empty() && is_awaited();
  }

  // Sends to a rank; returns true if the rank is lost. Sent data is no news: its version follows.
  bool send(int target, Peer& peer) {
    const SocketSender::State state = peer.sender.send();
    if (state == SocketSender::State::kLost) return end_peer(target, peer, std::strerror(errno));
    const bool full = state == SocketSender::State::kNoRoom;
    if (full != peer.waits_for_room) {
      expect(peer.sender.fd(), full ? EPOLLOUT | EPOLLIN : EPOLLIN);
    }
    peer.waits_for_room = full;
    return false;
  }

  Error ended(int rank, const char* why) const {
    const int name = settings_.names.of(rank);
    return Error(HSGD_ERR_PEER_LOST, name,
                 text("rank %d on another node died or closed its NotifiedWindow (%s)", name, why));
  }
  // Returns the error of a failed connection attempt. A rank that is known to be lost had a
  // connection.
  Error unreachable(int rank, int error) const {
    if (lost_.count(rank) != 0) return ended(rank, std::strerror(error));
    std::vector<std::string> addresses;
    for (const IpAddress& address : routes_to(rank)) addresses.push_back(words_of(address));
    const int name = settings_.names.of(rank);
    return Error(
        HSGD_ERR_PEER_LOST, name,
        text("rank %d on another node did not accept a connection at %s, TCP port %d (%s): it died "
             "or closed its NotifiedWindow, or routing or a firewall blocks the connection",
             name, listed(addresses).c_str(), ntohs(static_cast<in_port_t>(place_of(rank).port)),
             std::strerror(error)));
  }

  // Handles the end of a connection; returns true if the rank is lost. The other rank may have
  // closed it before the hello came: then nothing was written yet, and another connection replaces
  // it.
  bool end_peer(int target, Peer& peer, const char* why) {
    if (peer.sender.is_welcome() || peer.tries++ == kMostTries ||
        !connect_again(target, &peer, peer.route)) {
      lose(target, ended(target, why));
      return true;
    }
    return false;
  }

  // Connects at the address number `route`, or at the next one that does not refuse at once.
  bool connect_again(int target, Peer* peer, size_t route) {
    Fd connection = begin_connection(target, &route);
    if (!connection.valid()) return false;
    peer->route = route;
    peer->since_ns = now_ns();
    const int before = peer->sender.fd();
    target_of_fd_[connection.get()] = target;
    target_of_fd_.erase(before);
    part_with(before);
    peer->sender.renew(std::move(connection));
    peer->connected = false;
    peer->waits_for_room = true;
    return true;
  }

  // Tries the next address of connections without an answer; returns true if a rank is lost.
  bool change_routes() {
    const int64_t now = now_ns();
    if (!has_choice_ || now < next_look_ns_) return false;
    next_look_ns_ = now + int64_t{kRouteLookMs} * 1'000'000;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> silent;
    for (const auto& [target, peer] : peers_) {
      if (!peer.connected && now - peer.since_ns > kRouteNs && routes_to(target).size() > 1)
        silent.push_back(target);
    }
    bool lost = false;
    for (const int target : silent) {
      Peer& peer = peers_.at(target);
      const double limit_s = settings_.timeout_s > 0 ? settings_.timeout_s : kConnectS;
      const bool is_over = static_cast<double>(now - peer.begun_ns) > limit_s * 1e9;
      if (!is_over && connect_again(target, &peer, peer.route + 1)) continue;
      lose(target, unreachable(target, ETIMEDOUT));
      lost = true;
    }
    return lost;
  }

  // Records that a rank is lost. It is a failure at once if an operation to it is open, otherwise
  // when a caller waits for it. Operations to other ranks continue. If settings are forgiving, open
  // operations count as done.
  void lose(int rank, const Error& why) {
    lost_.insert(rank);
    const auto found = peers_.find(rank);
    if (found == peers_.end()) return;
    bool open = false;
    found->second.sender.for_each_open([&](Ticket) { open = true; });
    if (open && !settings_.forgiving) failures_.emplace(rank, why);
    part_with_peer(rank);  // failure() reports it
  }

  // Removes a peer. Allocates no memory.
  void part_with_peer(int rank) noexcept {
    const auto found = peers_.find(rank);
    if (found == peers_.end()) return;
    const SocketSender& sender = found->second.sender;
    sender.for_each_open([&](Ticket ticket) { open_.erase(ticket); });
    tell_of_finished();
    target_of_fd_.erase(sender.fd());
    part_with(sender.fd());
    peers_.erase(found);
  }

  // --- the thread ---

  void serve() noexcept {
    try {
      serve_until_stopped();
    } catch (...) {  // out of memory: no other exception is thrown
      give_up();
    }
  }

  // Gives up after memory ran out: callers get an error, and other ranks see the end of the
  // connections. Allocates no memory.
  void give_up() noexcept {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      broken_.store(true, std::memory_order_release);  // partner: failure()
      for (const auto& [rank, peer] : peers_) ::shutdown(peer.sender.fd(), SHUT_RDWR);
      count_news();
      all_done_.notify_all();
    }
    for (const auto& [fd, receiver] : receivers_) ::shutdown(fd, SHUT_RDWR);
    arrived_();
  }

  void serve_until_stopped() {
    ask_for_short_turns();
    std::array<epoll_event, 64> events{};
    while (!stopping_.load(std::memory_order_relaxed)) {
      const int limit = static_cast<int>(events.size());
      const int count = ::epoll_wait(poll_.get(), events.data(), limit, limit_ms());
      bool news = false;
      bool knock = false;
      for (int i = 0; i < count; ++i) {
        const epoll_event& event = events[static_cast<size_t>(i)];
        const int fd = event.data.fd;
        if (fd == wake_.get()) continue;
        if (door_.is_listener(fd)) {
          knock = true;
        } else if (receivers_.count(fd) != 0) {
          news |= receive(fd);
        } else {
          news |= serve_peer(fd, event.events);
        }
      }
      news |= receive_late();
      news |= mind_the_door(knock);
      news |= change_routes();
      if (news) arrived_();
    }
  }

  int limit_ms() const {
    const int door_ms = waiting_.empty() ? door_.wait_ms(now_ns()) : kLateMs;
    if (!has_choice_) return door_ms;
    return door_ms < 0 ? kRouteLookMs : std::min(door_ms, kRouteLookMs);
  }

  // Accepts connections and closes silent ones. Returns true if a version came.
  bool mind_the_door(bool knock) {
    bool news = false;
    for (const int fd : door_.overdue(now_ns())) {
      news |= receive(fd);  // its hello may have come while this thread did not run
      const auto found = receivers_.find(fd);
      if (found != receivers_.end() && found->second.rank() < 0) end_receiver(fd);
    }
    if (!knock && !door_.is_pressed()) return news;
    for (Fd fd = door_.accept(now_ns()); fd.valid(); fd = door_.accept(now_ns())) {
      let_in(std::move(fd));
    }
    return news;
  }

  void let_in(Fd fd) {
    const int number = fd.get();
    // Confirmations are short, and drain() of other ranks waits for them: they must not wait for a
    // delayed acknowledgement.
    set_tcp_option(number, IPPROTO_TCP, TCP_NODELAY, 1);
    watch_host(number, settings_.timeout_s, TcpEnd::kReads);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = number;
    if (::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, number, &event) != 0) return door_.forget(number);
    receivers_.emplace(number, SocketReceiver(std::move(fd), target_));
  }

  // Returns true if the ticket of a version is done and awaited, or the connection ended.
  bool serve_peer(int fd, uint32_t events) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = target_of_fd_.find(fd);
    if (found == target_of_fd_.end()) return false;
    const int target = found->second;
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    Peer& peer = peers_.at(target);
    if (error != 0) {
      // A reset comes only from a connection that existed; and a second attempt follows a first
      // connection.
      const bool was_there = peer.connected || error == ECONNRESET || peer.tries > 1;
      if (was_there) return end_peer(target, peer, std::strerror(error));
      const bool has_more = ++peer.failed < routes_to(target).size();
      if (has_more && connect_again(target, &peer, peer.route + 1)) return false;
      return lose(target, unreachable(target, error)), true;
    }
    bool news = false;
    bool may_send = (events & EPOLLOUT) != 0;
    peer.connected |= may_send;
    if ((events & (EPOLLIN | EPOLLHUP)) != 0) {
      const bool was_welcome = peer.sender.is_welcome();
      std::vector<Ticket> done;
      const bool alive = peer.sender.hear(&done);
      news = heard(done);
      if (!alive) return end_peer(target, peer, "the connection was closed");
      may_send |= peer.sender.is_welcome() != was_welcome;
    }
    if (may_send) news |= send(target, peer);
    return news;
  }

  // Serves connections with too few bytes to be ready, or more than the kernel's buffer holds.
  bool receive_late() {
    if (waiting_.empty()) return false;
    bool news = false;
    const int64_t now = now_ns();
    for (auto next = waiting_.begin(); next != waiting_.end();) {
      const auto [fd, since_ns] = *next++;  // receive() may remove it
      if (now - since_ns >= kLateNs) news |= receive(fd, true);
    }
    return news;
  }

  // Returns true if a version came, or the connection of a rank ended.
  bool receive(int fd, bool late = false) {
    SocketReceiver& receiver = receivers_.at(fd);
    const uint64_t before = receiver.stored();
    const bool silent = receiver.rank() < 0;
    if (!(late ? receiver.receive_late() : receiver.receive())) return end_receiver(fd);
    if (silent && receiver.rank() >= 0) door_.forget(fd);
    if (receiver.waits()) {
      waiting_[fd] = now_ns();
    } else {
      waiting_.erase(fd);
    }
    return receiver.stored() != before;
  }

  // Removes a receiver; returns true if it had a rank.
  bool end_receiver(int fd) {
    const int rank = receivers_.at(fd).rank();
    if (rank >= 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      lost_.insert(rank);
    }
    waiting_.erase(fd);
    door_.forget(fd);
    part_with(fd);
    receivers_.erase(fd);
    return rank >= 0;
  }

  const std::vector<SocketPlace> places_;
  const int rank_;
  const SocketReceiver::Target target_;
  const SocketSettings settings_;
  Fd poll_;
  Fd wake_;
  SocketDoor door_;  // used only by the thread
  std::function<void()> arrived_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};  // partner: serve(), woken by `wake_`
  std::atomic<bool> broken_{false};
  const Error why_broken_{HSGD_ERR_MEMORY, -1,
                          "NotifiedWindow: out of memory in the thread that serves TCP "
                          "connections; close the NotifiedWindow and make a new one"};

  std::map<int, SocketReceiver> receivers_;  // by descriptor; used only by the thread
  bool has_choice_ = false;                  // a rank has several addresses
  int64_t next_look_ns_ = 0;                 // used only by the thread
  std::map<int, int64_t> waiting_;  // start times of connections that wait for several bytes

  mutable std::mutex mutex_;
  std::map<int, Peer> peers_;  // by rank
  std::map<int, int> target_of_fd_;
  std::set<Ticket> open_;
  std::condition_variable all_done_;
  std::set<int> lost_;
  std::map<int, Error> failures_;  // by rank
  Ticket last_ticket_ = first_count();
};

}  // namespace

std::unique_ptr<Rma> make_socket_rma(SocketListener listener, std::vector<SocketPlace> places,
                                     int rank, void* base, size_t bytes,
                                     const SocketSettings& settings) {
  return std::make_unique<SocketRma>(std::move(listener), std::move(places), rank, base, bytes,
                                     settings);
}

}  // namespace hsgd
