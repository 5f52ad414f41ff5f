// The rendezvous: rank 0 listens, the others introduce themselves with their descriptors, rank 0
// passes all of them on.
#include "bootstrap.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "error.hpp"
#include "fault.hpp"
#include "layout.hpp"
#include "unix_socket.hpp"

namespace hsgd {
namespace {

constexpr int kDescriptors = 2;  // segment, process

struct Hello {
  uint32_t magic = kMagic;
  uint32_t version = kLayoutVersion;
  int32_t rank = 0;
  int32_t size = 0;
  int32_t pid = 0;
  int32_t world_rank = 0;
  uint64_t settings = 0;
  int32_t failed = 0;  // hsgd_status; then `message` says why this rank, or the set-up, has failed
  char message[512] = {};
};

void look_around(const Deadline& deadline) {
  if (deadline.interrupted()) throw Error(HSGD_ERR_INTERRUPTED, -1, "set-up: interrupted");
  deadline.check_watch();
}

Fd connect_until(const std::string& path, const Deadline& deadline) {
  const Address address = address_of(path);
  for (int64_t pause = 1;; pause = std::min<int64_t>(20, pause * 2)) {
    Fd socket = new_socket();
    if (try_connect(socket, address)) return socket;
    if (errno != ENOENT && errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) {
      fail_system(("set-up: connecting to " + path).c_str());
    }
    look_around(deadline);
    if (deadline.passed()) {
      throw Error(
          HSGD_ERR_TIMEOUT, 0,
          text("set-up at %s: rank 0 did not come within %g s; start all ranks with the same path",
               path.c_str(), deadline.timeout_s()));
    }
    pause_ms(pause);
  }
}

void send_hello(int socket, const Hello& hello, const Fd& segment, const Fd& process) {
  const Fd* const sent[kDescriptors] = {&segment, &process};
  send_message(socket, &hello, sizeof hello, sent, kDescriptors);
}

// False when the other side is gone.
bool receive_hello(int socket, Hello* hello, Fd* segment, Fd* process) {
  Fd* const taken[kDescriptors] = {segment, process};
  const ssize_t received = receive_message(socket, hello, sizeof *hello, taken, kDescriptors);
  if (received <= 0) return false;
  if (received != sizeof *hello || hello->magic != kMagic || hello->version != kLayoutVersion) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                "set-up: a rank runs another version of hsgd; install the same one everywhere");
  }
  return true;
}

// Before it is said that a rank left: it may have left because of another one, whose sockets were
// closed a moment before the watch can see that it died.
void look_for_the_cause(const Deadline& deadline) {
  for (int look = 0; look < 10 && deadline.has_watch(); ++look) {
    deadline.check_watch();
    pause_ms(2);
  }
}

// One slice of waiting, so that the caller can look at other things.
bool wait_readable(std::vector<pollfd>& sockets, const Deadline& deadline) {
  look_around(deadline);
  constexpr int64_t kLongestMs = 50;
  const int64_t left_ms = std::clamp<int64_t>(deadline.remaining_ns() / 1'000'000, 0, kLongestMs);
  const int ready = ::poll(sockets.data(), sockets.size(), static_cast<int>(left_ms));
  if (ready < 0 && errno != EINTR) fail_system("poll");
  return ready > 0;
}

bool wait_readable_until(std::vector<pollfd>& sockets, const Deadline& deadline) {
  for (;;) {
    if (wait_readable(sockets, deadline)) return true;
    if (deadline.passed()) return false;
  }
}

Hello failure_hello(hsgd_status code, int rank, const std::string& message) {
  Hello hello;
  hello.failed = code;
  hello.rank = rank;
  std::strncpy(hello.message, message.c_str(), sizeof hello.message - 1);
  return hello;
}

Hello introduce(const Member& member, int rank, int size) {
  Hello hello = failure_hello(member.failed, rank, member.failure);
  hello.size = size;
  hello.pid = member.pid;
  hello.world_rank = member.world_rank;
  hello.settings = member.settings;
  return hello;
}

Member take(const Hello& hello, Fd segment, Fd process) {
  Member member;
  member.pid = hello.pid;
  member.world_rank = hello.world_rank;
  member.settings = hello.settings;
  member.segment = std::move(segment);
  member.process = std::move(process);
  return member;
}

// Rank 0's side.
class Host {
 public:
  Host(const std::string& path, Listener& listener, int size, Member self, const Deadline& deadline)
      : path_(path), listener_(listener), size_(size), deadline_(deadline) {
    members_.resize(static_cast<size_t>(size));
    sockets_.resize(static_cast<size_t>(size));
    members_[0] = std::move(self);
  }

  std::vector<Member> gather_and_tell() {
    try {
      while (present_ < size_) wait_for_someone();
      if (members_[0].failed != HSGD_OK) throw Error(members_[0].failed, 0, members_[0].failure);
    } catch (const Error& error) {
      tell_everybody(failure_hello(error.code(), error.rank(), error.what()));
      throw;
    }
    HSGD_FAULT_POINT("set-up: all have come");
    for (int to = 1; to < size_; ++to) {
      if (to == size_ - 1) HSGD_FAULT_POINT("set-up: all but one are told");
      for (int about = 0; about < size_; ++about) {
        const Member& member = members_[static_cast<size_t>(about)];
        send_hello(sockets_[static_cast<size_t>(to)].get(), introduce(member, about, size_),
                   member.segment, member.process);
      }
    }
    return std::move(members_);
  }

 private:
  // Those at the door, too: they have not said who they are. And who comes a moment later, so that
  // nobody waits a whole deadline for a rank that has left.
  void tell_everybody(const Hello& failure) {
    constexpr double kLateS = 1.0;
    constexpr int kLookMs = 20;
    // Where there is a watch, it tells them; and some of them may go on without this rank by then.
    const bool may_be_late = !deadline_.has_watch() && failure.failed != HSGD_ERR_TIMEOUT &&
                             failure.failed != HSGD_ERR_INTERRUPTED;
    const Deadline late = deadline_.renewed(may_be_late ? kLateS : 0);
    int told = 0;
    const auto tell = [&](const Fd& socket) {
      if (!socket.valid()) return;
      send_hello(socket.get(), failure, Fd(), Fd());
      ++told;
    };
    std::for_each(sockets_.begin(), sockets_.end(), tell);
    pollfd door{listener_.fd(), POLLIN, 0};
    for (;;) {
      while (::poll(&door, 1, 0) > 0 && let_in()) {
      }
      std::for_each(strangers_.begin(), strangers_.end(), tell);
      strangers_.clear();
      if (told >= size_ - 1 || late.passed() || late.interrupted()) return;
      ::poll(&door, 1, kLookMs);
    }
  }

  void wait_for_someone() {
    std::vector<pollfd> watched{{listener_.fd(), POLLIN, 0}};
    for (const Fd& socket : strangers_) watched.push_back({socket.get(), POLLIN, 0});
    std::vector<int> ranks;
    for (int rank = 1; rank < size_; ++rank) {
      const Fd& socket = sockets_[static_cast<size_t>(rank)];
      if (!socket.valid()) continue;
      watched.push_back({socket.get(), POLLIN, 0});
      ranks.push_back(rank);
    }
    if (!wait_readable(watched, deadline_)) {
      if (deadline_.passed()) fail_missing();
      return;
    }
    // Whoever is at the door comes in before anybody is missed.
    const size_t strangers = strangers_.size();
    bool news = watched[0].revents != 0;
    if (news) let_in();
    for (size_t i = strangers; i > 0; --i) {
      if (watched[i].revents == 0) continue;
      news = true;
      Fd socket = std::move(strangers_[i - 1]);
      strangers_.erase(strangers_.begin() + static_cast<std::ptrdiff_t>(i - 1));
      admit(std::move(socket));
    }
    if (news) return;
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (watched[1 + strangers + i].revents != 0) fail_left(ranks[i]);
    }
  }

  // Who connects is a stranger until it has introduced itself, and nobody waits for that.
  bool let_in() {
    Fd socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket.valid()) return false;
    ucred who{};
    socklen_t bytes = sizeof who;
    if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &bytes) != 0) return true;
    // Another user has no business here.
    if (who.uid == ::geteuid() || who.uid == 0) strangers_.push_back(std::move(socket));
    return true;
  }

  void admit(Fd socket) {
    Hello hello;
    Fd segment;
    Fd process;
    if (!receive_hello(socket.get(), &hello, &segment, &process)) return;
    std::string complaint;
    if (hello.size != size_) {
      complaint = text("set-up at %s: rank 0 says %d ranks, rank %d says %d", path_.c_str(), size_,
                       hello.rank, hello.size);
    } else if (hello.rank < 1 || hello.rank >= size_ ||
               sockets_[static_cast<size_t>(hello.rank)].valid()) {
      complaint =
          text("set-up at %s: rank %d came twice (pids %d and %d)", path_.c_str(), hello.rank,
               hello.rank >= 0 && hello.rank < size_ ? members_[static_cast<size_t>(hello.rank)].pid
                                                     : -1,
               hello.pid);
    } else if (hello.settings != members_[0].settings) {
      complaint =
          text("set-up at %s: ranks 0 and %d have different HSGD_* settings; use the same on all",
               path_.c_str(), hello.rank);
    }
    if (!complaint.empty() || hello.failed != HSGD_OK) {
      strangers_.push_back(std::move(socket));  // it is told with all others
      if (!complaint.empty()) throw Error(HSGD_ERR_ARGUMENT, hello.rank, complaint);
      throw Error(static_cast<hsgd_status>(hello.failed), hello.rank, hello.message);
    }
    members_[static_cast<size_t>(hello.rank)] = take(hello, std::move(segment), std::move(process));
    sockets_[static_cast<size_t>(hello.rank)] = std::move(socket);
    ++present_;
  }

  // After its introduction a rank sends nothing but a complaint that its deadline has passed.
  [[noreturn]] void fail_left(int rank) {
    Hello complaint;
    Fd segment;
    Fd process;
    const int socket = sockets_[static_cast<size_t>(rank)].get();
    if (receive_hello(socket, &complaint, &segment, &process)) fail_missing();
    look_for_the_cause(deadline_);
    throw Error(HSGD_ERR_PEER_LOST, rank,
                text("set-up at %s: rank %d (pid %d) left", path_.c_str(), rank,
                     members_[static_cast<size_t>(rank)].pid));
  }

  [[noreturn]] void fail_missing() {
    std::string missing;
    int first = -1;
    for (int rank = 1; rank < size_; ++rank) {
      if (sockets_[static_cast<size_t>(rank)].valid()) continue;
      if (first < 0) first = rank;
      missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
    }
    throw Error(HSGD_ERR_TIMEOUT, first,
                text("set-up at %s: of %d ranks, rank(s) %s did not come within %g s",
                     path_.c_str(), size_, missing.c_str(), deadline_.timeout_s()));
  }

  const std::string& path_;
  Listener& listener_;
  int size_;
  const Deadline& deadline_;
  int present_ = 1;
  std::vector<Member> members_;
  std::vector<Fd> sockets_;
  std::vector<Fd> strangers_;  // connected, not introduced yet or not accepted
};

std::vector<Member> join(const std::string& path, int rank, int size, Member self,
                         const Deadline& deadline) {
  Fd socket = connect_until(path, deadline);
  HSGD_FAULT_POINT("set-up: connected");
  send_hello(socket.get(), introduce(self, rank, size), self.segment, self.process);
  HSGD_FAULT_POINT("set-up: introduced");
  if (self.failed != HSGD_OK) throw Error(self.failed, rank, self.failure);
  std::vector<Member> members;
  while (static_cast<int>(members.size()) < size) {
    std::vector<pollfd> watched{{socket.get(), POLLIN, 0}};
    if (!wait_readable_until(watched,
                             deadline)) {  // rank 0, who may have come later, knows who is missing
      constexpr double kAnswerS = 1.0;
      send_hello(socket.get(), failure_hello(HSGD_ERR_TIMEOUT, rank, ""), Fd(), Fd());
      if (!wait_readable_until(watched, deadline.renewed(kAnswerS))) {
        throw Error(HSGD_ERR_TIMEOUT, 0,
                    text("set-up at %s: rank 0 did not answer within %g s; it is stopped, or busy "
                         "elsewhere",
                         path.c_str(), deadline.timeout_s()));
      }
    }
    Hello hello;
    Fd segment;
    Fd process;
    if (!receive_hello(socket.get(), &hello, &segment, &process)) {
      look_for_the_cause(deadline);
      throw Error(HSGD_ERR_PEER_LOST, 0, text("set-up at %s: rank 0 left", path.c_str()));
    }
    if (hello.failed != 0) {
      throw Error(static_cast<hsgd_status>(hello.failed), hello.rank, hello.message);
    }
    members.push_back(take(hello, std::move(segment), std::move(process)));
  }
  return members;
}

struct Descriptors {
  std::vector<int> held;
  ~Descriptors() {
    for (const int fd : held) ::close(fd);
  }
};

}  // namespace

Listener::Listener(const std::string& path) : path_(path), fd_(new_socket()) {
  const Address address = address_of(path);
  const auto bind_here = [&] {
    const mode_t old_mask = ::umask(0077);
    const int status =
        ::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&address.name), address.bytes);
    ::umask(old_mask);
    return status == 0;
  };
  bool bound = bind_here();
  if (!bound && errno == EADDRINUSE && path[0] != '@') {
    struct stat found{};
    if (::lstat(path.c_str(), &found) == 0 && !S_ISSOCK(found.st_mode)) {
      throw Error(
          HSGD_ERR_ARGUMENT, 0,
          text("set-up at %s: there is a file that is no socket; give another path", path.c_str()));
    }
    if (reachable(path)) {
      path_.clear();
      throw Error(HSGD_ERR_ARGUMENT, 0,
                  text("set-up at %s: another job is using this path; give each job its own",
                       path.c_str()));
    }
    ::unlink(path.c_str());  // left by a job that was killed during its set-up
    bound = bind_here();
  }
  if (!bound) {
    path_.clear();
    fail_system(("set-up: listening at " + path).c_str());
  }
  if (::listen(fd_.get(), SOMAXCONN) != 0) fail_system("listen");
}

Listener::~Listener() {
  if (!path_.empty() && path_[0] != '@') ::unlink(path_.c_str());
}

std::string random_socket_name() {
  uint64_t words[2] = {};
  if (::getrandom(words, sizeof words, 0) != sizeof words) fail_system("getrandom");
  return text("@hsgd-%016llx%016llx", static_cast<unsigned long long>(words[0]),
              static_cast<unsigned long long>(words[1]));
}

void check_descriptors(int local_size) {
  constexpr size_t kForOthers = 32;
  const size_t wanted = 4 * static_cast<size_t>(local_size) + kForOthers;
  Descriptors free;
  while (free.held.size() < wanted) {
    const int fd = ::eventfd(0, EFD_CLOEXEC);
    if (fd < 0) {
      throw Error(HSGD_ERR_SYSTEM, -1,
                  text("set-up: %zu file descriptors are needed and %zu are left; free unused "
                       "communicators, or raise the limit (ulimit -n)",
                       wanted, free.held.size()));
    }
    free.held.push_back(fd);
  }
}

bool reachable(const std::string& path) { return try_connect(new_socket(), address_of(path)); }

std::vector<Member> meet(const std::string& path, Listener* listener, int rank, int size,
                         Member self, const Deadline& deadline) {
  if (size == 1) {
    if (self.failed != HSGD_OK) throw Error(self.failed, rank, self.failure);
    std::vector<Member> alone;
    alone.push_back(std::move(self));
    return alone;
  }
  if (rank != 0) return join(path, rank, size, std::move(self), deadline);
  if (listener != nullptr)
    return Host(path, *listener, size, std::move(self), deadline).gather_and_tell();
  Listener own(path);
  HSGD_FAULT_POINT("set-up: door open");
  return Host(path, own, size, std::move(self), deadline).gather_and_tell();
}

}  // namespace hsgd
