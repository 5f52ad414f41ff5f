// Writes between ranks over TCP, all of them in this process: data before versions, what is needed
// first goes first, and what one rank's end does to the others.
#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "core/base/error.hpp"
#include "network/tcp_common/door.hpp"
#include "network/tcp_common/frames.hpp"
#include "network/tcp_common/listener.hpp"
#include "network/tcp_common/socket.hpp"
#include "network/tcp_window/rma.hpp"
#include "network/tcp_window/sender.hpp"
#include "onesided/window/put_queue.hpp"
#include "support/check.hpp"
#include "support/ranks.hpp"

namespace {

// The next request for memory by a thread other than the tests' own fails.
std::atomic<bool> memory_is_short{false};
thread_local bool is_tests_own = false;
// In this thread: so many requests are granted, then one fails, or all.
thread_local int grants = -1;  // -1: no end
thread_local bool stays_short = false;

void* allocate(size_t bytes) {
  if (grants == 0) {
    if (!stays_short) grants = -1;
    throw std::bad_alloc();
  }
  if (grants > 0) --grants;
  if (!is_tests_own && memory_is_short.exchange(false)) throw std::bad_alloc();
  if (void* memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace {

using hsgd::Deadline;
using hsgd::Error;
using hsgd::Rma;
using hsgd::SocketHeader;
using hsgd::SocketHello;
using hsgd::SocketListener;
using hsgd::SocketPlace;
using hsgd::SocketSettings;

constexpr double kLimitS = 60.0;
constexpr size_t kSlots = 16;
constexpr size_t kSlice = 64 << 10;
constexpr size_t kFront = kSlots * sizeof(uint64_t);

// A rank's memory: slots, then data.
class Member {
 public:
  explicit Member(size_t bytes) : words_((kFront + bytes) / sizeof(uint64_t) + 1) {}

  void open(std::vector<SocketPlace> places, int rank, const SocketSettings& settings) {
    rma = hsgd::make_socket_rma(std::move(listener_), std::move(places), rank, words_.data(),
                                words_.size() * sizeof(uint64_t), settings);
    rma->await_tickets(1);
  }
  void start() {
    rma->start([this] {
      {
        const std::lock_guard<std::mutex> may_go_on(stalled_);
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      ++news_;
      changed_.notify_all();
    });
  }
  // Until it is true; the network tells when to look again.
  void wait(const std::function<bool()>& condition) {
    std::unique_lock<std::mutex> lock(mutex_);
    CHECK(changed_.wait_for(lock, std::chrono::duration<double>(kLimitS), condition));
  }
  // Once a version has come, nothing more is taken while the lock is held.
  std::unique_lock<std::mutex> stall() { return std::unique_lock<std::mutex>(stalled_); }
  uint64_t version(size_t slot) {
    return reinterpret_cast<std::atomic<uint64_t>*>(&words_[slot])->load();
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(words_.data()) + kFront; }
  const SocketPlace& place() const { return listener_.place(); }

  std::unique_ptr<Rma> rma;

 private:
  std::vector<uint64_t> words_;
  SocketListener listener_;
  std::mutex stalled_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t news_ = 0;
};

struct Job {
  Job(int size, size_t bytes, uint64_t slice_bytes = kSlice) {
    std::vector<SocketPlace> places;
    for (int rank = 0; rank < size; ++rank) {
      members.push_back(std::make_unique<Member>(bytes));
      places.push_back(members.back()->place());
    }
    for (int rank = 0; rank < size; ++rank) at(rank).open(places, rank, {false, slice_bytes});
  }
  ~Job() {
    for (auto& member : members) {
      if (member->rma != nullptr) member->rma->close(Deadline(kLimitS));
    }
  }
  Member& at(int rank) { return *members[static_cast<size_t>(rank)]; }
  void start() {
    for (auto& member : members) member->start();
  }
  std::vector<std::unique_ptr<Member>> members;
};

size_t slot_at(size_t slot) { return slot * sizeof(uint64_t); }

// Pieces, and a version for a slot.
Rma::Ticket post(Member& writer, int target, size_t slot, uint64_t version,
                 const std::vector<hsgd::Piece>& pieces = {}, uint32_t order = 0) {
  return writer.rma->post(pieces,
                          {target, static_cast<uint32_t>(slot), version, slot_at(slot), order});
}

// Of two ranks that are connected, the second takes nothing while the lock is held.
std::unique_lock<std::mutex> stall_reader(Job* job) {
  job->start();
  std::unique_lock<std::mutex> stalled = job->at(1).stall();
  post(job->at(0), 1, kSlots - 1, 1);
  const Deadline deadline(kLimitS);
  while (CHECK(!deadline.passed()) && job->at(1).version(kSlots - 1) == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it cannot tell
  }
  return stalled;
}

// The connected TCP sockets of this process, or those of them whose own port is `port`.
std::vector<int> connections(uint32_t port = 0) {
  std::vector<int> found;
  for (int fd = 0; fd < 4096; ++fd) {
    sockaddr_in own{};
    sockaddr_in other{};
    socklen_t size = sizeof own;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) continue;
    if (own.sin_family != AF_INET || (port != 0 && own.sin_port != port)) continue;
    size = sizeof other;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&other), &size) == 0) found.push_back(fd);
  }
  return found;
}

// The kernel holds data that the other end does not take: what was posted last has begun.
void await_begun() {
  const Deadline deadline(kLimitS);
  const auto holds = [](int fd) {
    int bytes = 0;
    return ::ioctl(fd, TIOCOUTQ, &bytes) == 0 && bytes > 0;
  };
  for (int seen = 0; CHECK(!deadline.passed()) && seen < 20;) {
    const std::vector<int> all = connections();
    seen = std::any_of(all.begin(), all.end(), holds) ? seen + 1 : 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // nothing tells
  }
}

constexpr size_t kRoom = 3 * kSlice + 64;  // of each writer

// What `writer` writes to `target`.
size_t bytes_of(uint64_t version, int writer, int target) {
  const std::vector<size_t> sizes = {0, 1, 63, kSlice - 1, kSlice, kSlice + 1, kRoom};
  return sizes[(version + static_cast<uint64_t>(3 * writer + target)) % sizes.size()];
}

void write_between_all(uint64_t slice_bytes) {
  constexpr int kRanks = 3;
  constexpr uint64_t kVersions = ranks::kOperations > 1000 ? 200 : 40;
  Job job(kRanks, kRanks * kRoom, slice_bytes);
  job.start();
  ranks::run(kRanks, [&](int rank) {
    Member& own = job.at(rank);
    std::vector<std::byte> data(kRoom);
    const auto all = [&](const std::function<void(int)>& body) {
      for (int other = 0; other < kRanks; ++other) {
        if (other != rank) body(other);
      }
    };
    for (uint64_t version = 1; version <= kVersions; ++version) {
      std::fill(data.begin(), data.end(), static_cast<std::byte>(version));
      std::vector<Rma::Ticket> open;
      all([&](int other) {
        const size_t bytes = bytes_of(version, rank, other);
        const size_t place = kFront + static_cast<size_t>(rank) * kRoom;
        open.push_back(
            post(own, other, static_cast<size_t>(rank), version, {{data.data(), bytes, place}}));
      });
      all([&](int other) {
        const auto from = static_cast<size_t>(other);
        own.wait([&] { return own.version(from) >= version; });
        const std::byte* there = own.data() + from * kRoom;
        CHECK(std::all_of(there, there + bytes_of(version, other, rank),
                          [&](std::byte byte) { return byte == static_cast<std::byte>(version); }));
        open.push_back(post(own, other, kRanks + static_cast<size_t>(rank), version));  // read
      });
      all([&](int other) {
        own.wait([&] { return own.version(kRanks + static_cast<size_t>(other)) >= version; });
      });
      own.wait([&] {
        return std::all_of(open.begin(), open.end(), [&](auto t) { return own.rma->done(t); });
      });
    }
  });
}

TEST("what was on its way to a process that is gone is not waited for") {
  hsgd::Fd door = hsgd::new_tcp_socket(AF_INET);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* name = reinterpret_cast<sockaddr*>(&address);
  CHECK_EQ(::bind(door.get(), name, size), 0);
  CHECK_EQ(::listen(door.get(), 1), 0);
  CHECK_EQ(::getsockname(door.get(), name, &size), 0);
  hsgd::Fd own = hsgd::new_tcp_socket(AF_INET);
  ::connect(own.get(), name, size);
  pollfd coming{door.get(), POLLIN, 0};
  CHECK_EQ(::poll(&coming, 1, 10'000), 1);
  hsgd::Fd other(::accept(door.get(), nullptr, nullptr));
  CHECK(other.valid());
  CHECK(hsgd::is_delivered(own.get()));
  const std::vector<char> data(1 << 20);
  while (::send(own.get(), data.data(), data.size(), MSG_NOSIGNAL) > 0) {
  }
  CHECK(!hsgd::is_delivered(own.get()));  // nobody reads
  other = hsgd::Fd();
  pollfd gone{own.get(), 0, 0};
  CHECK_EQ(::poll(&gone, 1, 10'000), 1);  // POLLERR, POLLHUP
  CHECK(hsgd::is_delivered(own.get()));
}

TEST("data is there before its version, between all ranks at once") { write_between_all(kSlice); }

TEST("so it is with slices that are smaller, or larger than any write") {
  write_between_all(4 << 10);
  write_between_all(4 * kRoom);
}

TEST("of what waits the least order goes first, also between the slices of a large write") {
  constexpr size_t kLarge = 64 << 20;  // more than the kernel holds for a rank that reads nothing
  Job job(2, kLarge);
  Member& writer = job.at(0);
  Member& reader = job.at(1);
  const std::vector<std::byte> large(kLarge, std::byte{7});
  const std::vector<std::byte> small(8, std::byte{1});
  auto stalled = stall_reader(&job);
  // All of them write at the end of the segment: what is there in the end came last.
  const size_t place = kFront + kLarge - small.size();
  post(writer, 1, 5, 1, {{small.data(), small.size(), place}}, 5);
  post(writer, 1, 9, 1, {{large.data(), kLarge, kFront}}, 9);
  await_begun();
  post(writer, 1, 2, 1, {{small.data(), small.size(), place}}, 2);
  stalled.unlock();
  for (const size_t slot : {2, 5, 9}) reader.wait([&] { return reader.version(slot) == 1; });
  CHECK(reader.data()[kLarge - 1] == std::byte{7});
  CHECK(std::all_of(reader.data(), reader.data() + kLarge,
                    [](std::byte byte) { return byte == std::byte{7}; }));
}

TEST("a write that has begun is overtaken by shorter ones only") {
  constexpr size_t kLarge = 64 << 20;
  Job job(2, kLarge + 8);
  Member& writer = job.at(0);
  Member& reader = job.at(1);
  const std::vector<std::byte> first(kLarge, std::byte{1});
  const std::vector<std::byte> second(kLarge + 8, std::byte{2});
  auto stalled = stall_reader(&job);
  post(writer, 1, 9, 1, {{first.data(), first.size(), kFront}}, 9);
  await_begun();
  post(writer, 1, 2, 1, {{second.data(), second.size(), kFront}}, 2);
  stalled.unlock();
  reader.wait([&] { return reader.version(2) == 1 && reader.version(9) == 1; });
  CHECK(std::all_of(reader.data(), reader.data() + second.size(),
                    [](std::byte byte) { return byte == std::byte{2}; }));
}

TEST("a write that was overtaken goes on before others begin") {
  constexpr size_t kLarge = 64 << 20;
  Job job(2, kLarge);
  Member& writer = job.at(0);
  Member& reader = job.at(1);
  const std::vector<std::byte> first(kLarge, std::byte{1});
  const std::vector<std::byte> second(kLarge, std::byte{2});
  auto stalled = stall_reader(&job);
  post(writer, 1, 9, 1, {{first.data(), kLarge, kFront}}, 9);
  await_begun();
  post(writer, 1, 2, 1, {{first.data(), 8, kFront}}, 2);
  post(writer, 1, 5, 1, {{second.data(), kLarge, kFront}}, 5);
  stalled.unlock();
  reader.wait([&] { return reader.version(5) == 1 && reader.version(9) == 1; });
  CHECK(std::all_of(reader.data(), reader.data() + kLarge,
                    [](std::byte byte) { return byte == std::byte{2}; }));
}

// A connection to a rank, by hand: what another rank would send at a bad moment.
class ByHand {
 public:
  explicit ByHand(const SocketPlace& place)
      : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const hsgd::SocketAddress address = hsgd::socket_address(place.addresses.front(), place.port);
    CHECK_EQ(::connect(fd_, address.get(), address.bytes), 0);
    const timeval limit{static_cast<time_t>(kLimitS), 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  }
  ~ByHand() { ::close(fd_); }
  ByHand(const ByHand&) = delete;
  ByHand& operator=(const ByHand&) = delete;

  bool send(const void* data, size_t bytes) const {
    return ::send(fd_, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
  }
  bool send(const SocketHeader& header) const { return send(&header, sizeof header); }
  // And is let in.
  bool greet(const SocketPlace& place, int64_t rank) const {
    const SocketHello hello{place.token, rank};
    return send(&hello, sizeof hello) && confirmed() == 0;
  }
  ssize_t receive(void* into, size_t bytes, int flags) const {
    return ::recv(fd_, into, bytes, flags);
  }
  // How many versions the rank says it has.
  uint64_t confirmed() const {
    uint64_t versions = 0;
    CHECK_EQ(receive(&versions, sizeof versions, MSG_WAITALL),
             static_cast<ssize_t>(sizeof versions));
    return versions;
  }

 private:
  int fd_;
};

constexpr uint64_t kEndless = uint64_t{1} << 40;

TEST("what comes within a write is stored and confirmed though the rest of that does not come") {
  Job job(2, 64);
  Member& reader = job.at(1);
  const SocketPlace place = reader.place();
  job.start();
  const ByHand writer(place);
  const uint64_t word = 0;
  CHECK(writer.greet(place, 0));
  for (const uint64_t version : {1, 2, 3}) {
    CHECK(writer.send({kFront, sizeof word, 0, kEndless}) && writer.send(&word, sizeof word));
    if (version == 2) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(writer.send({slot_at(0), 0, version, kEndless}));
    reader.wait([&] { return reader.version(0) == version; });
    CHECK_EQ(writer.confirmed(), version);
  }
}

TEST("versions are confirmed while a stream never pauses") {
  Job job(2, kSlice);
  const SocketPlace place = job.at(1).place();
  job.start();
  const ByHand writer(place);
  const std::vector<std::byte> data(kSlice);
  CHECK(writer.greet(place, 0) && writer.send({slot_at(0), 0, 1, kEndless}));
  const Deadline deadline(kLimitS);
  uint64_t versions = 0;
  while (CHECK(!deadline.passed()) &&
         writer.receive(&versions, sizeof versions, MSG_DONTWAIT) < 0) {
    const SocketHeader header{kFront, kSlice, 0, kEndless};
    if (!CHECK(writer.send(header) && writer.send(data.data(), kSlice))) break;
  }
  CHECK_EQ(versions, 1U);
}

TEST("a write that is sent piece by piece is progress before it is done") {
  int ends[2];
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  const hsgd::Fd other(ends[1]);
  hsgd::SocketSender sender(hsgd::Fd(ends[0]), SocketHello{}, kSlice);
  std::vector<uint64_t> done;
  const uint64_t none = 0;
  CHECK_EQ(::send(other.get(), &none, sizeof none, 0), static_cast<ssize_t>(sizeof none));
  CHECK(sender.hear(&done));
  const std::vector<std::byte> data(16 << 20);
  sender.add(0, {{0, data.size(), 0, 0}, data.data(), 1});
  std::vector<std::byte> taken(1 << 20);
  uint64_t before = 0;
  for (int turn = 0; turn < 3; ++turn) {
    CHECK(sender.send() == hsgd::SocketSender::State::kNoRoom);
    CHECK(sender.progress() > before);
    before = sender.progress();
    CHECK(sender.send() == hsgd::SocketSender::State::kNoRoom);
    CHECK_EQ(sender.progress(), before);
    while (::recv(other.get(), taken.data(), taken.size(), 0) > 0) {
    }
  }
}

TEST("who closes does not wait for a rank that takes nothing, where that is forgiven") {
  constexpr size_t kLarge = 64 << 20;
  Member own(64);
  const Member sleeper(64);  // is connected by the kernel, and reads nothing
  own.open({own.place(), sleeper.place()}, 0, {true, kSlice});
  own.start();
  const std::vector<std::byte> data(kLarge);
  post(own, 1, 0, 1, {{data.data(), kLarge, kFront}});
  const Deadline deadline(kLimitS);
  own.rma->close(deadline);
  CHECK(!deadline.passed());
}

TEST("a rank that cannot be reached is named with its address, or forgiven") {
  for (const bool forgiving : {false, true}) {
    Member own(64);
    SocketPlace nowhere = own.place();
    nowhere.addresses = {};
    nowhere.addresses.front() = {4, 32, {}, {255, 255, 255, 255}};
    const std::vector<SocketPlace> places = {own.place(), nowhere};
    own.open(places, 0, {forgiving, kSlice});
    own.start();
    if (forgiving) {
      const uint64_t before = own.rma->news();
      CHECK(own.rma->done(post(own, 1, 0, 1)));
      CHECK(own.rma->news() != before);  // so that who waits looks at once
      CHECK(own.rma->lost(1) && !own.rma->failure(1).has_value());
    } else {
      CHECK_THROWS(
          post(own, 1, 0, 1),
          "rank 1 on another node did not accept a connection at 255.255.255.255, TCP port ");
    }
    own.rma->close(Deadline(kLimitS));
  }
}

TEST("a rank that ends is lost, and the others go on") {
  Job job(3, 64);
  job.start();
  Member& own = job.at(0);
  for (const int other : {1, 2}) {
    const auto ticket = post(own, other, 0, 1);
    own.wait([&] { return own.rma->done(ticket); });
  }
  job.at(1).rma.reset();
  own.wait([&] { return own.rma->lost(1); });
  CHECK(!own.rma->failure(1).has_value());  // nothing was under way
  try {
    const auto ticket = post(own, 1, 0, 2);
    own.wait([&] { return own.rma->failure(1).has_value(); });
    CHECK(own.rma->done(ticket));  // nobody waits for it any more
  } catch (const Error& error) {   // the kernel knew at once
    CHECK_EQ(error.rank(), 1);
  }
  CHECK_THROWS(post(own, 1, 0, 2), "rank 1 on another node died");
  const auto ticket = post(own, 2, 0, 2);
  own.wait([&] { return own.rma->done(ticket); });
  CHECK_EQ(job.at(2).version(0), 2U);
  CHECK(!own.rma->failure(2).has_value() && !own.rma->lost(2));
}

TEST("who does not know the token changes nothing") {
  Job job(2, 64);
  const SocketPlace place = job.at(1).place();
  job.start();
  const ByHand stranger(place);
  const std::vector<char> words(4096, 1);
  CHECK(stranger.send(words.data(), words.size()));
  char answer = 0;
  CHECK(stranger.receive(&answer, 1, 0) <= 0);  // it is shown the door
  post(job.at(0), 1, 0, 1);
  job.at(1).wait([&] { return job.at(1).version(0) == 1; });
  CHECK(!job.at(1).rma->lost(0) && !job.at(1).rma->lost(1));
  for (size_t slot = 1; slot < kSlots; ++slot) CHECK_EQ(job.at(1).version(slot), 0U);
}

TEST("neither end of a connection holds back what is short") {
  Job job(2, 64);
  job.start();
  for (const int rank : {0, 1}) {
    Member& own = job.at(rank);
    const auto ticket = post(own, 1 - rank, 0, 1);
    own.wait([&] { return own.rma->done(ticket); });
  }
  const std::vector<int> ends = connections();
  CHECK_EQ(ends.size(), 4U);
  for (const int fd : ends) {
    int at_once = 0;
    socklen_t size = sizeof at_once;
    CHECK_EQ(::getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, &size), 0);
    CHECK(at_once != 0);
  }
}

// Two ranks of which the first has written to the second.
struct ConnectedPair {
  explicit ConnectedPair(const SocketSettings& settings) {
    const std::vector<SocketPlace> places = {own.place(), other.place()};
    own.open(places, 0, settings);
    other.open(places, 1, settings);
    own.start();
    other.start();
    const auto ticket = post(own, 1, 0, 1);
    own.wait([&] { return own.rma->done(ticket); });
  }

  Member own{64};
  Member other{64};
};

int option(int fd, int level, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  CHECK_EQ(::getsockopt(fd, level, name, &value, &size), 0);
  return value;
}

TEST("both ends of a connection ask whether the other host is there, within the deadline") {
  for (const bool forgiving : {false, true}) {
    SocketSettings settings{forgiving, kSlice};
    settings.timeout_s = 60;
    ConnectedPair pair(settings);
    const std::vector<int> ends = connections();
    CHECK_EQ(ends.size(), 2U);
    int reading = 0;
    for (const int fd : ends) {
      CHECK(option(fd, SOL_SOCKET, SO_KEEPALIVE) == 1);
      const int asks_s =
          option(fd, IPPROTO_TCP, TCP_KEEPCNT) * option(fd, IPPROTO_TCP, TCP_KEEPINTVL);
      CHECK_EQ(option(fd, IPPROTO_TCP, TCP_KEEPIDLE) + asks_s, 30);
      const int unacknowledged_ms = option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT);
      CHECK(unacknowledged_ms == 0 || unacknowledged_ms == 30'000);  // longer overrules the others
      reading += unacknowledged_ms != 0 ? 1 : 0;
    }
    CHECK_EQ(reading, 1);
    pair.own.rma->close(Deadline(kLimitS));
    pair.other.rma->close(Deadline(kLimitS));
  }
}

// In a process with a network of its own, whose only interface is up until `cut` is called.
void in_own_network(const std::function<void(const std::function<void()>& cut)>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWNET) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) {
      std::printf("skipped: this user may make no network of its own\n");
      ::_exit(errno == EPERM ? 0 : 1);
    }
    const hsgd::Fd control(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const auto set_flags = [&](short flags) {
      ifreq request{};
      std::strcpy(request.ifr_name, "lo");
      request.ifr_flags = flags;
      CHECK_EQ(::ioctl(control.get(), SIOCSIFFLAGS, &request), 0);
    };
    set_flags(IFF_UP);
    body([&] { set_flags(0); });
    ::_exit(check::failures() == 0 ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

TEST("ranks miss one another before the deadline when all packets between their hosts are lost") {
  in_own_network([](const std::function<void()>& cut) {
    SocketSettings settings{false, kSlice};
    settings.timeout_s = 10;
    ConnectedPair pair(settings);
    cut();
    const Deadline deadline(settings.timeout_s);
    pair.own.wait([&] { return pair.own.rma->lost(1); });
    pair.other.wait([&] { return pair.other.rma->lost(0); });
    CHECK(!deadline.passed());
  });
}

TEST("without memory the network fails with an error, and the other ranks miss it") {
  is_tests_own = true;
  Job job(2, 64);
  job.start();
  Member& own = job.at(0);
  const auto ticket = post(own, 1, 0, 1);
  own.wait([&] { return own.rma->done(ticket); });
  memory_is_short = true;
  const ByHand stranger(own.place());
  own.wait([&] { return own.rma->failure(Rma::kAll).has_value(); });
  CHECK(!memory_is_short && own.rma->failure(Rma::kAll)->code() == HSGD_ERR_MEMORY);
  CHECK_THROWS(post(own, 1, 1, 1), "out of memory");
  job.at(1).wait([&] { return job.at(1).rma->lost(0); });
  is_tests_own = false;
}

// Posts three pieces and their version where the request for memory after `granted` ones fails,
// and perhaps all later ones. False: it needs no more than that.
bool post_without_memory(int granted, bool for_good) {
  Job job(3, 64);
  Rma* network = job.at(0).rma.get();
  hsgd::Outbox outbox(std::move(job.at(0).rma), 4, kLimitS, false);
  std::vector<uint64_t> words(3, 1);
  std::vector<hsgd::Piece> pieces;
  for (uint64_t& word : words) pieces.push_back({&word, sizeof word, kFront});
  uint64_t ticket = 0;
  bool is_short = false;
  stays_short = for_good;
  grants = granted;
  try {
    outbox.post(pieces, {1, 0, 1, slot_at(0), 0}, &ticket);
  } catch (const std::bad_alloc&) {
    is_short = true;
  }
  grants = -1;
  outbox.start([] {});
  job.at(1).start();
  job.at(2).start();
  if (granted == 0) {  // nothing had begun
    CHECK(is_short && outbox.post(pieces, {1, 0, 1, slot_at(0), 0}, &ticket));
  } else if (is_short) {
    CHECK(network->done(1));
    CHECK(for_good || outbox.empty());
    CHECK_THROWS(outbox.post(pieces, {1, 0, 2, slot_at(0), 0}, &ticket), "out of memory");
  }
  if (is_short && !for_good) {  // other ranks are written to as before
    CHECK(outbox.post(pieces, {2, 0, 1, slot_at(0), 0}, &ticket));
    job.at(2).wait([&] { return job.at(2).version(0) == 1; });
  }
  outbox.close(Deadline(kLimitS));
  return is_short;
}

TEST("what is short of memory in the midst of a write reads nothing of it later") {
  for (const bool for_good : {false, true}) {
    int granted = 0;
    while (post_without_memory(granted, for_good)) ++granted;
    CHECK(granted > 6);
  }
}

TEST("who says nothing is shown the door, and ranks come in all the same") {
  Member own(64);
  const Member other(64);
  const SocketPlace place = own.place();
  SocketSettings settings{false, kSlice};
  settings.hello_s = 0.05;
  own.open({own.place(), other.place()}, 0, settings);
  own.start();
  const ByHand silent(place);
  const ByHand slow(place);
  CHECK(slow.send(place.token.data(), 4));
  char answer = 0;
  CHECK_EQ(silent.receive(&answer, 1, 0), 0);
  CHECK_EQ(slow.receive(&answer, 1, 0), 0);
  const Deadline deadline(kLimitS);
  while (CHECK(!deadline.passed())) {
    const ByHand rank(place);
    const SocketHello hello{place.token, 1};
    uint64_t welcome = 1;
    // A rank that had no turn before it could say hello comes again.
    if (!rank.send(&hello, sizeof hello)) continue;
    if (rank.receive(&welcome, sizeof welcome, MSG_WAITALL) != sizeof welcome) continue;
    CHECK_EQ(welcome, 0U);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // stays, though it is silent now
    CHECK(rank.send({slot_at(0), 0, 1, 0}));
    own.wait([&] { return own.version(0) == 1; });
    CHECK(!own.rma->lost(1));
    break;
  }
  own.rma->close(Deadline(kLimitS));
}

TEST("how long somebody may be silent depends on who waits outside") {
  constexpr int64_t kSecond = 1'000'000'000;
  constexpr size_t kRoom = hsgd::SocketDoor::kMostStrangers + 1;
  SocketListener own;
  const SocketListener other;
  const SocketPlace place = own.place();
  const hsgd::Fd poll(::epoll_create1(EPOLL_CLOEXEC));
  hsgd::SocketDoor door(own.listen({place, other.place()}, {false, true}), poll.get(), 10 * kSecond,
                        1);
  std::vector<std::unique_ptr<ByHand>> strangers;
  std::vector<hsgd::Fd> let_in;
  const auto come = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) strangers.push_back(std::make_unique<ByHand>(place));
    for (hsgd::Fd fd = door.accept(0); fd.valid(); fd = door.accept(0)) {
      let_in.push_back(std::move(fd));
    }
  };
  come(1);
  CHECK(door.overdue(10 * kSecond - 1).empty());
  CHECK_EQ(door.overdue(10 * kSecond).size(), 1U);
  come(kRoom);  // one more than there is room for
  CHECK_EQ(let_in.size(), kRoom);
  CHECK(door.is_pressed() && door.overdue(kSecond / 5).empty());
  CHECK_EQ(door.overdue(kSecond / 4).size(), kRoom);
  for (const hsgd::Fd& fd : let_in) door.forget(fd.get());
  CHECK(door.overdue(10 * kSecond).empty() && door.accept(0).valid() && !door.accept(0).valid());
  CHECK(!door.is_pressed());
}

TEST("of those who say nothing a few are let in at a time, and ranks come in all the same") {
  constexpr size_t kStrangers = 300;
  constexpr size_t kMostSilent = hsgd::SocketDoor::kMostStrangers + 2;
  Job job(2, 64);
  const SocketPlace place = job.at(1).place();
  job.start();
  std::vector<std::unique_ptr<ByHand>> strangers;
  for (size_t i = 0; i < kStrangers; ++i) {
    strangers.push_back(std::make_unique<ByHand>(place));
    CHECK(connections(place.port).size() <= kMostSilent);
  }
  const auto ticket = post(job.at(0), 1, 0, 1);
  job.at(0).wait([&] { return job.at(0).rma->done(ticket); });
  CHECK_EQ(job.at(1).version(0), 1U);
  CHECK(connections(place.port).size() <= kMostSilent + 1);
}

TEST("ranks that come all at once are not taken for strangers") {
  constexpr size_t kRanks = 200;
  constexpr int64_t kSecond = 1'000'000'000;
  SocketListener own;
  const SocketListener other;
  const SocketPlace place = own.place();
  const hsgd::Fd poll(::epoll_create1(EPOLL_CLOEXEC));
  hsgd::SocketDoor door(own.listen({place, other.place()}, {false, true}), poll.get(), 10 * kSecond,
                        kRanks);
  std::vector<std::unique_ptr<ByHand>> ranks;
  for (size_t i = 0; i < kRanks; ++i) ranks.push_back(std::make_unique<ByHand>(place));
  std::vector<hsgd::Fd> let_in;
  for (hsgd::Fd fd = door.accept(0); fd.valid(); fd = door.accept(0)) {
    let_in.push_back(std::move(fd));
  }
  CHECK_EQ(let_in.size(), kRanks);
  CHECK(!door.is_pressed() && door.overdue(9 * kSecond).empty());
}

// A rank by hand that others come to.
class Doorkeeper {
 public:
  explicit Doorkeeper(SocketListener listener) : place_(listener.place()) {
    const SocketListener other;
    fds_ = listener.listen({place_, other.place()}, {false, true});
  }
  const SocketPlace& place() const { return place_; }
  hsgd::Fd accept() {
    pollfd watched{fds_.front().get(), POLLIN, 0};
    CHECK_EQ(::poll(&watched, 1, static_cast<int>(kLimitS * 1000)), 1);
    return hsgd::Fd(::accept4(fds_.front().get(), nullptr, nullptr, SOCK_CLOEXEC));
  }

 private:
  SocketPlace place_;
  std::vector<hsgd::Fd> fds_;
};

TEST("a rank that was shown the door before it was welcome comes again, and writes all of it") {
  Doorkeeper door((SocketListener()));
  Member own(64);
  own.open({own.place(), door.place()}, 0, {false, kSlice});
  own.start();
  const uint64_t word = 7;
  const auto ticket = post(own, 1, 0, 1, {{&word, sizeof word, kFront}});
  door.accept();  // and closes it
  SocketHello hello{};
  {
    const hsgd::Fd heard = door.accept();
    CHECK_EQ(::recv(heard.get(), &hello, sizeof hello, MSG_WAITALL), ssize_t{sizeof hello});
    char more = 0;  // nothing goes before the welcome
    CHECK(::recv(heard.get(), &more, 1, MSG_DONTWAIT) < 0);
    CHECK(!own.rma->done(ticket));
  }
  const hsgd::Fd stays = door.accept();
  CHECK_EQ(::recv(stays.get(), &hello, sizeof hello, MSG_WAITALL), ssize_t{sizeof hello});
  CHECK(hello.token == door.place().token && hello.rank == 0);
  uint64_t versions = 0;
  CHECK_EQ(::send(stays.get(), &versions, sizeof versions, 0), ssize_t{sizeof versions});
  struct {
    SocketHeader header;
    uint64_t word;
    SocketHeader version;
  } written{};
  CHECK_EQ(::recv(stays.get(), &written, sizeof written, MSG_WAITALL), ssize_t{sizeof written});
  CHECK(written.header.offset == kFront && written.word == word);
  CHECK_EQ(written.version.version, 1U);
  versions = 1;
  CHECK_EQ(::send(stays.get(), &versions, sizeof versions, 0), ssize_t{sizeof versions});
  own.wait([&] { return own.rma->done(ticket); });
  CHECK(!own.rma->lost(1) && !own.rma->failure(1).has_value());
  own.rma->close(Deadline(kLimitS));
}

TEST("a rank that is never welcome gives up") {
  Doorkeeper door((SocketListener()));
  Member own(64);
  own.open({own.place(), door.place()}, 0, {false, kSlice});
  own.start();
  post(own, 1, 0, 1);
  for (int tries = 0; tries < 4; ++tries) door.accept();
  own.wait([&] { return own.rma->lost(1); });
  CHECK_THROWS(post(own, 1, 0, 1), "rank 1 on another node died");
  own.rma->close(Deadline(kLimitS));
}

TEST("a rank listens only at addresses that another one may use") {
  SocketListener own;
  const SocketListener other;
  const std::vector<hsgd::IpAddress> used =
      hsgd::routes(other.place().addresses, own.place().addresses);
  const std::vector<hsgd::Fd> fds = own.listen({own.place(), other.place()}, {false, true});
  CHECK_EQ(fds.size(), used.size());
  for (const hsgd::Fd& fd : fds) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    CHECK_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
    CHECK(std::any_of(used.begin(), used.end(), [&](const hsgd::IpAddress& one) {
      const hsgd::SocketAddress wanted = hsgd::socket_address(one, own.place().port);
      return wanted.bytes == size && std::memcmp(wanted.get(), &address, size) == 0;
    }));
  }
  SocketListener alone;
  CHECK(alone.listen({alone.place()}, {false}).empty());
}

// An IPv4 address in a network of 8, 16, 24 ... bits, or an IPv6 one.
hsgd::IpAddress address(const char* words, uint8_t network_bits) {
  hsgd::IpAddress made{};
  made.version = std::strchr(words, ':') == nullptr ? 4 : 6;
  made.network_bits = network_bits;
  CHECK_EQ(::inet_pton(hsgd::family_of(made), words, made.host.data()), 1);
  return made;
}

TEST("an address in a network of both is taken, over others, over one that both have") {
  using hsgd::words_of;
  const hsgd::IpAddresses from = {address("172.17.0.1", 16), address("10.1.2.3", 24),
                                  address("fd00:1::7", 64)};
  CHECK_EQ(
      words_of(hsgd::routes(from, {address("172.17.0.1", 16), address("10.1.2.9", 24)}).front()),
      "10.1.2.9");
  CHECK_EQ(
      words_of(hsgd::routes(from, {address("172.17.0.1", 16), address("10.9.2.9", 24)}).front()),
      "10.9.2.9");
  CHECK_EQ(
      words_of(hsgd::routes(from, {address("192.0.2.1", 24), address("fd00:1::9", 64)}).front()),
      "fd00:1::9");
  CHECK_EQ(
      words_of(hsgd::routes(from, {address("192.0.2.1", 24), address("fd00:2::9", 64)}).front()),
      "192.0.2.1");
  const hsgd::IpAddresses six_only = {address("fd00:1::7", 64)};
  CHECK_EQ(
      words_of(hsgd::routes(six_only, {address("10.1.2.9", 24), address("fd00:2::9", 64)}).front()),
      "fd00:2::9");
  CHECK_EQ(hsgd::routes(from, {}).front().version, 0);
  const auto every = hsgd::routes(from, {address("172.17.0.1", 16), address("192.0.2.1", 24),
                                         address("10.1.2.9", 24), address("fd00:2::9", 64)});
  std::string words;
  for (const hsgd::IpAddress& one : every) words += words_of(one) + " ";
  CHECK_EQ(words, "10.1.2.9 192.0.2.1 fd00:2::9 172.17.0.1 ");
}

TEST("interfaces are taken as they are named, and a name that there is not is told") {
  const hsgd::IpAddresses loopback = hsgd::find_addresses("lo");
  CHECK_EQ(hsgd::words_of(loopback.front()), "127.0.0.1");
  CHECK_THROWS(hsgd::find_addresses("lo,nosuch0"),
               "no interface \"nosuch0\" is up with an address on this host; it has: lo");
  SocketListener own("lo");
  const SocketListener other("lo");
  CHECK(!own.listen({own.place(), other.place()}, {false, true}).empty());
}

TEST("a rank to which none connects listens nowhere") {
  Member own(64);
  Member near(64);
  SocketSettings settings{false, kSlice};
  settings.connect = {false, false};
  own.open({own.place(), near.place()}, 0, settings);
  near.open({own.place(), near.place()}, 1, {false, kSlice});
  own.start();
  near.start();
  try {  // the kernel may know at once
    post(near, 0, 0, 1);
    near.wait([&] { return near.rma->failure(0).has_value(); });
  } catch (const Error&) {
    CHECK(near.rma->failure(0).has_value());
  }
  CHECK_THROWS(post(near, 0, 0, 1), "(Connection refused)");
  own.rma->close(Deadline(kLimitS));
  near.rma->close(Deadline(kLimitS));
}

TEST("a connection that finds too many files open is accepted later") {
  Job job(2, 64);
  job.at(0).start();
  post(job.at(0), 1, 0, 1);  // has its socket; nobody accepts yet
  rlimit before{};
  CHECK_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  job.at(1).start();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // so that it tries, if it can
  CHECK_EQ(job.at(1).version(0), 0U);
  CHECK_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  job.at(1).wait([&] { return job.at(1).version(0) == 1; });
}

}  // namespace
