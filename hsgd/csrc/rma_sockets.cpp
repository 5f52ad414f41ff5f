// The connections, and the thread that serves them.
#include "rma_sockets.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "error.hpp"

namespace hsgd {
namespace {

// Of what the kernel holds for one rank no more than this is not yet on its way: the rest waits
// here, where what is needed first may still go first.
constexpr int kNotSentBytes = 256 << 10;
constexpr int kBacklog = 1024;

struct Hello {
  std::array<uint8_t, 16> token;
  int64_t rank;
};
// What comes before each write. A version has no bytes after it. Back comes, now and then, how many
// versions have been stored, as uint64_t.
struct Header {
  uint64_t offset;
  uint64_t bytes;
  uint64_t version;  // 0: data
};

int checked(int result, const char* what) {
  if (result < 0) fail_system(what);
  return result;
}

void set_option(int fd, int level, int name, int value) {
  ::setsockopt(fd, level, name, &value, sizeof value);  // all of them only make it faster
}

// The address of a rank that lies in a network of ours, or else its first. Not one that we have,
// too, as bridges of containers do on every host, unless nothing else is shared.
uint32_t reach(const SocketPlace& from, const SocketPlace& to) {
  uint32_t both = 0;
  for (const auto& own : from.addresses) {
    for (const auto& other : to.addresses) {
      if (own.host == 0 || other.host == 0) continue;
      if ((own.host & own.mask) != (other.host & own.mask)) continue;
      const bool ours = std::any_of(from.addresses.begin(), from.addresses.end(),
                                    [&](const auto& mine) { return mine.host == other.host; });
      if (!ours) return other.host;
      both = other.host;
    }
  }
  if (both != 0) return both;
  return to.addresses.front().host;
}

class SocketRma final : public Rma {
 public:
  SocketRma(SocketListener listener, std::vector<SocketPlace> places, int rank, void* base,
            size_t bytes)
      : places_(std::move(places)),
        rank_(rank),
        base_(static_cast<std::byte*>(base)),
        bytes_(bytes),
        listener_(listener.take()),
        poll_(checked(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
        wake_(checked(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
    follow(listener_.get(), EPOLLIN);
    follow(wake_.get(), EPOLLIN);
  }
  ~SocketRma() override { stop(); }

  bool drives_itself() const override { return true; }

  void start(std::function<void()> arrived) override {
    arrived_ = std::move(arrived);
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's threads
    thread_ = std::thread([this] { serve(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  Ticket put(int target, const void* data, size_t bytes, size_t offset) override {
    return post(target, {offset, bytes, 0}, static_cast<const std::byte*>(data));
  }
  Ticket replace(int target, const uint64_t* version, size_t offset) override {
    return post(target, {offset, 0, *version}, nullptr);
  }
  bool done(Ticket ticket) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return open_.count(ticket) == 0;
  }
  void flush(int) override {}  // order is kept
  void sync() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) throw *failure_;
  }
  bool lost(int rank) const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return lost_.count(rank) != 0;
  }
  bool close(const Deadline& deadline) noexcept override {
    for (;;) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (open_.empty() || failure_ || deadline.passed()) break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    stop();
    return true;
  }

 private:
  struct Frame {
    Header header;
    const std::byte* data;
    Ticket ticket;
    size_t sent = 0;  // of header and data
  };
  struct Sender {
    Fd fd;
    bool connected = false;
    bool waits_for_room = false;
    Hello hello{};
    size_t hello_sent = 0;
    std::deque<Frame> frames;
    std::deque<Ticket> unconfirmed;  // versions
    uint64_t confirmed = 0;          // how many were
    uint64_t news = 0;               // what comes back, and how much of it is here
    size_t news_got = 0;
  };
  struct Receiver {
    Fd fd;
    Hello hello{};
    size_t hello_got = 0;
    Header header{};
    size_t header_got = 0;
    uint64_t data_got = 0;
    uint64_t stored = 0;  // versions
  };

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
    checked(::epoll_ctl(poll_.get(), EPOLL_CTL_MOD, fd, &event), "epoll_ctl");
  }

  void stop() noexcept {
    if (!thread_.joinable()) return;
    stopping_.store(true, std::memory_order_relaxed);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
    thread_.join();
  }

  // --- sending: by the caller as far as there is room, then by the thread ---

  Ticket post(int target, const Header& header, const std::byte* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) throw *failure_;
    const Ticket ticket = ++last_ticket_;
    Sender& sender = sender_to(target);
    open_.insert(ticket);
    sender.frames.push_back({header, data, ticket});
    if (sender.connected && !sender.waits_for_room) send_some(target, sender);
    if (failure_) throw *failure_;
    return ticket;
  }

  Sender& sender_to(int target) {
    const auto found = senders_.find(target);
    if (found != senders_.end()) return found->second;
    Sender sender;
    sender.fd =
        Fd(checked(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), "socket"));
    const int fd = sender.fd.get();
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, kNotSentBytes);
    const SocketPlace& to = places_[static_cast<size_t>(target)];
    sender.hello = {to.token, rank_};
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = static_cast<in_port_t>(to.port);
    address.sin_addr.s_addr = reach(places_[static_cast<size_t>(rank_)], to);
    if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
        errno != EINPROGRESS) {
      fail_system(text("connect to rank %d", target).c_str());
    }
    sender.waits_for_room = true;
    Sender& kept = senders_.emplace(target, std::move(sender)).first->second;
    target_of_fd_[fd] = target;
    follow(fd, EPOLLOUT | EPOLLIN);
    return kept;
  }

  // With the mutex. Until there is no more, or no more room.
  void send_some(int target, Sender& sender) {
    for (;;) {
      if (sender.hello_sent < sizeof sender.hello) {
        const auto* bytes = reinterpret_cast<const std::byte*>(&sender.hello);
        const ssize_t sent =
            ::send(sender.fd.get(), bytes + sender.hello_sent,
                   sizeof sender.hello - sender.hello_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) return no_room(target, sender);
        sender.hello_sent += static_cast<size_t>(sent);
        continue;
      }
      if (sender.frames.empty()) break;
      Frame& frame = sender.frames.front();
      iovec parts[2];
      int count = 0;
      if (frame.sent < sizeof frame.header) {
        parts[count++] = {reinterpret_cast<std::byte*>(&frame.header) + frame.sent,
                          sizeof frame.header - frame.sent};
      }
      const size_t skipped =
          frame.sent > sizeof frame.header ? frame.sent - sizeof frame.header : 0;
      if (frame.header.bytes > skipped) {
        parts[count++] = {const_cast<std::byte*>(frame.data) + skipped,
                          frame.header.bytes - skipped};
      }
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = static_cast<size_t>(count);
      const ssize_t sent = ::sendmsg(sender.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) return no_room(target, sender);
      frame.sent += static_cast<size_t>(sent);
      if (frame.sent < sizeof frame.header + frame.header.bytes) continue;
      if (frame.header.version != 0) {
        sender.unconfirmed.push_back(frame.ticket);
      } else {
        open_.erase(frame.ticket);  // the kernel has it
      }
      sender.frames.pop_front();
    }
    if (sender.waits_for_room) expect(sender.fd.get(), EPOLLIN);
    sender.waits_for_room = false;
  }

  void no_room(int target, Sender& sender) {
    if (errno == EINTR) return send_some(target, sender);
    if (errno != EAGAIN && errno != EWOULDBLOCK) return lose(target, std::strerror(errno));
    if (!sender.waits_for_room) expect(sender.fd.get(), EPOLLOUT | EPOLLIN);
    sender.waits_for_room = true;
  }

  // With the mutex. A rank to which something is open is missed at once, others when somebody waits
  // for them.
  void lose(int rank, const char* why) {
    lost_.insert(rank);
    const auto found = senders_.find(rank);
    if (found == senders_.end()) return;
    if ((!found->second.frames.empty() || !found->second.unconfirmed.empty()) && !failure_) {
      failure_ = Error(HSGD_ERR_PEER_LOST, rank,
                       text("rank %d on another node died or closed its Exchange (%s)", rank, why));
    }
    target_of_fd_.erase(found->second.fd.get());
    senders_.erase(found);
  }

  // --- the thread ---

  void serve() noexcept {
    std::array<epoll_event, 64> events{};
    while (!stopping_.load(std::memory_order_relaxed)) {
      const int count = ::epoll_wait(poll_.get(), events.data(), events.size(), -1);
      bool news = false;
      for (int i = 0; i < count; ++i) {
        const epoll_event& event = events[static_cast<size_t>(i)];
        const int fd = event.data.fd;
        if (fd == wake_.get()) continue;
        if (fd == listener_.get()) {
          accept_all();
        } else if (receivers_.count(fd) != 0) {
          news |= receive(fd);
        } else {
          news |= serve_sender(fd, event.events);
        }
      }
      if (news) arrived_();
    }
  }

  void accept_all() {
    for (;;) {
      Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!fd.valid()) return;
      const int number = fd.get();
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.fd = number;
      if (::epoll_ctl(poll_.get(), EPOLL_CTL_ADD, number, &event) != 0) continue;
      receivers_[number].fd = std::move(fd);
    }
  }

  // True when a ticket is done, or the connection ended.
  bool serve_sender(int fd, uint32_t events) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = target_of_fd_.find(fd);
    if (found == target_of_fd_.end()) return false;
    const int target = found->second;
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return lose(target, std::strerror(error)), true;
    Sender& sender = senders_.at(target);
    sender.connected = sender.connected || (events & EPOLLOUT) != 0;
    bool news = false;
    if ((events & (EPOLLIN | EPOLLHUP)) != 0) {
      const uint64_t before = sender.confirmed;
      if (!hear(sender)) return lose(target, "the connection ended"), true;
      news = sender.confirmed != before;
    }
    if ((events & EPOLLOUT) != 0) {
      try {
        send_some(target, sender);
      } catch (const Error& failure) {
        failure_ = failure;
      }
    }
    return news || failure_.has_value();
  }

  // What the target has stored; false when the connection ended.
  bool hear(Sender& sender) {
    for (;;) {
      const ssize_t got =
          ::recv(sender.fd.get(), reinterpret_cast<std::byte*>(&sender.news) + sender.news_got,
                 sizeof sender.news - sender.news_got, MSG_DONTWAIT);
      if (got == 0) return false;
      if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      sender.news_got += static_cast<size_t>(got);
      if (sender.news_got < sizeof sender.news) continue;
      sender.news_got = 0;
      while (sender.confirmed < sender.news && !sender.unconfirmed.empty()) {
        open_.erase(sender.unconfirmed.front());
        sender.unconfirmed.pop_front();
        ++sender.confirmed;
      }
    }
  }

  // True when a version came, or the connection ended.
  bool receive(int fd) {
    Receiver& receiver = receivers_.at(fd);
    const uint64_t before = receiver.stored;
    const bool alive = receive_all(receiver);
    const bool news = receiver.stored != before;
    // Eight bytes always fit: a sender has few operations open, and hears.
    const bool told = !news || ::send(fd, &receiver.stored, sizeof receiver.stored,
                                      MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof receiver.stored;
    return alive && told ? news : lose_receiver(fd);
  }

  // False when the connection ended, or was not one of ours.
  bool receive_all(Receiver& receiver) {
    for (;;) {
      ssize_t got = 0;
      if (receiver.hello_got < sizeof receiver.hello) {
        got = take(receiver, &receiver.hello, &receiver.hello_got, sizeof receiver.hello);
        if (receiver.hello_got == sizeof receiver.hello && !knows_us(receiver.hello)) {
          receiver.hello_got = 0;
          return false;
        }
      } else if (receiver.header_got < sizeof receiver.header) {
        got = take(receiver, &receiver.header, &receiver.header_got, sizeof receiver.header);
        if (got > 0 && receiver.header_got == sizeof receiver.header) {
          receiver.data_got = 0;
          if (!fits(receiver.header)) return false;
          finish(receiver);
        }
      } else {
        const Header& header = receiver.header;
        got = ::recv(receiver.fd.get(), base_ + header.offset + receiver.data_got,
                     header.bytes - receiver.data_got, MSG_DONTWAIT);
        if (got > 0) receiver.data_got += static_cast<uint64_t>(got);
        finish(receiver);
      }
      if (got > 0 || (got < 0 && errno == EINTR)) continue;
      return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    }
  }

  static ssize_t take(const Receiver& receiver, void* into, size_t* got, size_t size) {
    const ssize_t more =
        ::recv(receiver.fd.get(), static_cast<std::byte*>(into) + *got, size - *got, MSG_DONTWAIT);
    if (more > 0) *got += static_cast<size_t>(more);
    return more;
  }

  bool knows_us(const Hello& hello) const {
    return hello.token == places_[static_cast<size_t>(rank_)].token && hello.rank >= 0 &&
           hello.rank < static_cast<int64_t>(places_.size());
  }
  bool fits(const Header& header) const {
    if (header.version != 0)
      return header.bytes == 0 && header.offset % 8 == 0 && header.offset < bytes_;
    return header.offset <= bytes_ && header.bytes <= bytes_ - header.offset;
  }

  // Ends a write that is complete.
  void finish(Receiver& receiver) {
    const Header& header = receiver.header;
    if (receiver.header_got < sizeof header || receiver.data_got < header.bytes) return;
    receiver.header_got = 0;
    if (header.version == 0) return;
    // Partner: look() of the exchange. Forbids that the version is seen before the data, which this
    // thread has written; sequentially consistent for the sake of ring(), as in put_notify().
    reinterpret_cast<std::atomic<uint64_t>*>(base_ + header.offset)
        ->store(header.version, std::memory_order_seq_cst);
    ++receiver.stored;
  }

  bool lose_receiver(int fd) {
    const Receiver& receiver = receivers_.at(fd);
    if (receiver.hello_got == sizeof receiver.hello) {
      const std::lock_guard<std::mutex> lock(mutex_);
      lost_.insert(static_cast<int>(receiver.hello.rank));
    }
    receivers_.erase(fd);
    return true;
  }

  const std::vector<SocketPlace> places_;
  const int rank_;
  std::byte* const base_;
  const size_t bytes_;
  Fd listener_;
  Fd poll_;
  Fd wake_;
  std::function<void()> arrived_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};  // partner: serve(), woken by `wake_`

  std::map<int, Receiver> receivers_;  // by descriptor; of the thread alone

  mutable std::mutex mutex_;
  std::map<int, Sender> senders_;  // by rank
  std::map<int, int> target_of_fd_;
  std::set<Ticket> open_;
  std::set<int> lost_;
  Ticket last_ticket_ = 0;
  std::optional<Error> failure_;
};

}  // namespace

SocketListener::SocketListener()
    : fd_(checked(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), "socket")) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  checked(::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), "bind");
  checked(::listen(fd_.get(), kBacklog), "listen");
  socklen_t size = sizeof address;
  checked(::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &size), "getsockname");
  place_.port = address.sin_port;
  const auto drawn = ::getrandom(place_.token.data(), place_.token.size(), 0);
  if (drawn != static_cast<ssize_t>(place_.token.size())) fail_system("getrandom");
  ifaddrs* all = nullptr;
  checked(::getifaddrs(&all), "getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(all, ::freeifaddrs);
  size_t count = 0;
  for (const bool loopback : {false, true}) {
    if (loopback && count > 0) break;  // of no use but on a machine without a network
    for (const ifaddrs* each = all; each != nullptr && count < place_.addresses.size();
         each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
      if ((each->ifa_flags & IFF_UP) == 0 || ((each->ifa_flags & IFF_LOOPBACK) != 0) != loopback) {
        continue;
      }
      const auto host = reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr.s_addr;
      const auto mask = reinterpret_cast<const sockaddr_in*>(each->ifa_netmask)->sin_addr.s_addr;
      place_.addresses[count++] = {host, mask};
    }
  }
}

std::unique_ptr<Rma> make_socket_rma(SocketListener listener, std::vector<SocketPlace> places,
                                     int rank, void* base, size_t bytes) {
  return std::make_unique<SocketRma>(std::move(listener), std::move(places), rank, base, bytes);
}

}  // namespace hsgd
