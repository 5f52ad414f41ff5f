// Where ranks meet: names, secrets, files of sockets, and who is let in.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <array>
#include <atomic>
#include <numeric>
#include <optional>
#include <thread>

#include "node/rendezvous/bootstrap.hpp"
#include "node/rendezvous/listener.hpp"
#include "node/rendezvous/secret.hpp"
#include "node/rendezvous/unix_socket.hpp"
#include "support/ranks.hpp"

namespace {

using hsgd::Deadline;
using hsgd::Error;
using hsgd::Listener;
using hsgd::Member;

// A folder that is removed with what is in it.
class Folder {
 public:
  Folder() { CHECK(::mkdtemp(name_) != nullptr); }
  ~Folder() { CHECK_EQ(::rmdir(name_), 0); }
  std::string path(const char* name) const { return std::string(name_) + "/" + name; }

 private:
  char name_[32] = "/tmp/hsgd-meeting-XXXXXX";
};

void leave_stale(const std::string& path) {
  const hsgd::Fd socket = hsgd::new_socket();
  const hsgd::Address address = hsgd::address_of(path);
  CHECK_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.name), address.bytes),
           0);
}

std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::string name_of(const std::string& path) { return hsgd::meeting_point_of(path).name; }

// Processes that connect to a socket again and again, faster than anybody lets them in, and say
// nothing. They give up after a while, so that a test ends which they have beaten.
class Flood {
 public:
  explicit Flood(const std::string& path) {
    for (std::thread& thread : threads_) {
      thread = std::thread([this, address = hsgd::address_of(name_of(path))] {
        while (!over_ && !limit_.passed()) {
          hsgd::try_connect(hsgd::new_socket(), address, 0);
        }
      });
    }
  }
  ~Flood() {
    over_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  bool goes_on() const { return !limit_.passed(); }

 private:
  const Deadline limit_{20};
  std::atomic<bool> over_{false};
  std::array<std::thread, 16> threads_;
};

std::vector<int> called(int first, int size) {
  std::vector<int> names(static_cast<size_t>(size));
  std::iota(names.begin(), names.end(), first);
  return names;
}

// Ranks that share nothing but a file.
std::vector<Member> meet_with(const std::string& path, int rank, int size, Member self,
                              const Deadline& deadline) {
  hsgd::MeetingFile file;
  file.make = [] { return hsgd::new_memory_file(1); };
  file.prepare = [](const hsgd::Fd& descriptor) { CHECK(descriptor.valid()); };
  return hsgd::meet(path, nullptr, rank, called(0, size), std::move(self), file, deadline);
}

size_t meet(const std::string& path, int rank, int size, double timeout_s = 30) {
  Member self;
  self.pid = 100 + rank;
  return meet_with(path, rank, size, std::move(self), Deadline(timeout_s)).size();
}

}  // namespace

TEST("a path has a secret only where it ends in one, and the halves are two proofs") {
  const std::string secret = "0123456789abcdef00112233445566ff";
  const hsgd::MeetingPoint point = hsgd::meeting_point_of("@job#" + secret);
  CHECK_EQ(point.name, "@job");
  CHECK_EQ(point.proof_of_guest() + point.proof_of_host(), secret);
  for (const std::string& path :
       {std::string("@job#1"), "/tmp/job#" + secret, "@#" + secret,
        "@job#" + secret.substr(1) + "G", std::string("@"), std::string("")}) {
    CHECK_EQ(name_of(path), path);
  }
  const std::string drawn = hsgd::meeting_path(hsgd::draw_meeting_words());
  CHECK_EQ(hsgd::meeting_point_of(drawn).secret.size(), secret.size());
  CHECK(drawn != hsgd::meeting_path(hsgd::draw_meeting_words()));
}

TEST("secrets are the same only when every character is") {
  CHECK(hsgd::is_same_secret("abc", "abc", 3) && hsgd::is_same_secret("", "", 0));
  CHECK(!hsgd::is_same_secret("abc", "abd", 3) && !hsgd::is_same_secret("abc", "bbc", 3));
}

TEST("who does not know the secret is not let in, and holds nobody up") {
  const std::string path = hsgd::meeting_path(hsgd::draw_meeting_words());
  const std::string wrong = name_of(path) + "#" + std::string(32, '0');
  std::atomic<bool> refused{false};
  ranks::run(3, [&](int rank) {
    if (rank == 2) {
      const std::string line = failure_of([&] { meet(wrong, 1, 2); });
      CHECK(line.find("rank 0 left") != std::string::npos);
      refused = true;
      return;
    }
    while (rank == 1 && !refused) std::this_thread::yield();
    CHECK_EQ(meet(path, rank, 2), 2u);
  });
}

TEST("a process that listens and does not know the secret is told nothing but half of it") {
  const std::string path = hsgd::meeting_path(hsgd::draw_meeting_words());
  const std::string wrong =
      name_of(path) + "#" + hsgd::meeting_point_of(path).proof_of_guest() + std::string(16, '0');
  ranks::run(2, [&](int rank) {
    if (rank == 0) {
      CHECK(failure_of([&] { meet(wrong, 0, 2, 2); }).find("did not join") != std::string::npos);
      return;
    }
    const std::string line = failure_of([&] { meet(path, 1, 2); });
    CHECK(line.find("does not know the secret") != std::string::npos);
    CHECK(line.find('#') == std::string::npos);  // no message shows a secret
  });
}

TEST("of jobs that find the socket of a killed one, one gets the path and keeps it") {
  const Folder folder;
  const std::string path = folder.path("socket");
  for (int repeat = 0; repeat < 100; ++repeat) {
    leave_stale(path);
    constexpr int kJobs = 3;
    std::atomic<int> ready{0};
    std::atomic<int> tried{0};
    std::atomic<int> served{0};
    ranks::run(kJobs, [&](int) {
      std::optional<Listener> listener;
      ++ready;
      while (ready < kJobs) std::this_thread::yield();
      const std::string line = failure_of([&] { listener.emplace(path); });
      CHECK(line.empty() || line.find("another job is using this path") != std::string::npos);
      if (listener) ++served;
      ++tried;
      while (tried < kJobs) std::this_thread::yield();
      if (listener) CHECK(hsgd::reachable(path));
    });
    CHECK_EQ(served, 1);
    CHECK(!hsgd::reachable(path) && ::access(path.c_str(), F_OK) != 0);
  }
}

// Where there is no root, nobody can be somebody else.
constexpr uid_t kNobody = 65534;

// Of the calling thread alone; false: not allowed.
bool become_nobody() { return ::syscall(SYS_setresuid, -1, kNobody, -1) == 0; }

TEST("a socket at which another user's process listens is named and left where it is") {
  const Folder folder;
  const std::string path = folder.path("socket");
  CHECK_EQ(::chmod(folder.path("").c_str(), 0777), 0);
  const hsgd::Fd door = hsgd::new_socket();
  bool is_other = false;
  std::thread([&] {
    is_other = become_nobody();
    const hsgd::Address address = hsgd::address_of(path);
    CHECK_EQ(::bind(door.get(), reinterpret_cast<const sockaddr*>(&address.name), address.bytes),
             0);
    CHECK_EQ(::listen(door.get(), 8), 0);
  }).join();
  const std::string line = failure_of([&] { const Listener listener(path); });
  const std::string who =
      is_other ? hsgd::text("a process of another user (uid %u, pid %d) listens there", kNobody,
                            static_cast<int>(::getpid()))
               : "another job is using this path";
  CHECK(line.find(who) != std::string::npos);
  CHECK(hsgd::try_connect(hsgd::new_socket(), hsgd::address_of(path), 0));
  CHECK(hsgd::reachable(path) == !is_other);
  CHECK_EQ(::unlink(path.c_str()), 0);
}

TEST("a socket that takes no connection of this kind is not taken away") {
  const Folder folder;
  const std::string path = folder.path("socket");
  const hsgd::Fd door(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const hsgd::Address address = hsgd::address_of(path);
  CHECK_EQ(::bind(door.get(), reinterpret_cast<const sockaddr*>(&address.name), address.bytes), 0);
  CHECK_EQ(::listen(door.get(), 8), 0);
  CHECK_THROWS(const Listener listener(path), "another job is using this path");
  CHECK_EQ(::unlink(path.c_str()), 0);
}

TEST("a path may be as long as an address can be") {
  const Folder folder;
  const std::string longest(107 - folder.path("").size(), 'x');
  const std::string path = folder.path(longest.c_str());
  const std::string deep = folder.path("") + std::string(100 - folder.path("").size(), 'x');
  CHECK_EQ(::mkdir(deep.c_str(), 0700), 0);
  for (const std::string& each : {path, deep + "/socket"}) {
    CHECK_EQ(each.size(), 107u);
    const Listener listener(each);
    CHECK(hsgd::reachable(each));
  }
  CHECK_EQ(::rmdir(deep.c_str()), 0);
}

TEST("a socket's file is its owner's alone, and no other file of the process is") {
  const Folder folder;
  const std::string path = folder.path("socket");
  const std::string other = folder.path("other");
  const mode_t mask = ::umask(0022);
  std::atomic<bool> done{false};
  std::atomic<int> narrow{0};
  std::thread writer([&] {
    while (!done) {
      const int fd = ::open(other.c_str(), O_CREAT | O_EXCL | O_WRONLY, 0666);
      struct stat found{};
      CHECK_EQ(::fstat(fd, &found), 0);
      if ((found.st_mode & 0777) != 0644) ++narrow;
      ::close(fd);
      ::unlink(other.c_str());
    }
  });
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const Listener listener(path);
    struct stat found{};
    CHECK_EQ(::lstat(path.c_str(), &found), 0);
    CHECK_EQ(found.st_mode & 0777, 0600u);
  }
  done = true;
  writer.join();
  ::umask(mask);
  CHECK_EQ(narrow, 0);
}

TEST("a listener whose queue is full is there, and nobody waits to find that out") {
  const std::string path = ranks::meeting_point();
  CHECK(!hsgd::reachable(path));
  const hsgd::Fd door = hsgd::new_socket();
  const hsgd::Address address = hsgd::address_of(path);
  CHECK_EQ(::bind(door.get(), reinterpret_cast<const sockaddr*>(&address.name), address.bytes), 0);
  CHECK_EQ(::listen(door.get(), 0), 0);
  for (int look = 0; look < 5; ++look) CHECK(hsgd::reachable(path));
}

TEST("a meeting ends at its deadline where a process listens and lets nobody in") {
  const std::string path = ranks::meeting_point();
  const hsgd::Fd door = hsgd::new_socket();
  const hsgd::Address address = hsgd::address_of(path);
  CHECK_EQ(::bind(door.get(), reinterpret_cast<const sockaddr*>(&address.name), address.bytes), 0);
  CHECK_EQ(::listen(door.get(), 0), 0);
  const hsgd::Fd waiting = hsgd::new_socket();
  CHECK(hsgd::try_connect(waiting, address, 0));
  const std::string line = failure_of([&] { meet(path, 1, 2, 0.2); });
  CHECK(line.find("accepts no connections") != std::string::npos);
}

TEST("a missing rank is missed at the deadline though strangers never cease to connect") {
  const std::string path = hsgd::meeting_path(hsgd::draw_meeting_words());
  const Flood flood(path);
  const std::string line = failure_of([&] { meet(path, 0, 2, 0.2); });
  CHECK(line.find("rank(s) 1 did not join") != std::string::npos);
  CHECK(flood.goes_on());
}

TEST("a meeting that fails is over though strangers never cease to connect") {
  const std::string path = hsgd::meeting_path(hsgd::draw_meeting_words());
  const Flood flood(path);
  ranks::run(2, [&](int rank) {
    Member self;
    if (rank == 1) {
      self.failed = HSGD_ERR_MEMORY;
      self.failure = "rank 1 has no room";
    }
    CHECK_EQ(failure_of([&] { meet_with(path, rank, 2, std::move(self), Deadline(60)); }),
             "rank 1 has no room");
  });
  CHECK(flood.goes_on());
}

TEST("what one rank cannot do with the file all are told") {
  for (const int poor : {0, 1}) {
    const std::string path = hsgd::meeting_path(hsgd::draw_meeting_words());
    ranks::run(3, [&](int rank) {
      hsgd::MeetingFile file;
      file.make = [] { return hsgd::new_memory_file(1); };
      file.prepare = [&](const hsgd::Fd&) {
        if (rank == poor) throw Error(HSGD_ERR_MEMORY, -1, "no room");
      };
      Member self;
      const std::string line = failure_of([&] {
        hsgd::meet(path, nullptr, rank, called(7, 3), std::move(self), file, Deadline(60));
      });
      CHECK_EQ(line, "rank " + std::to_string(7 + poor) + ": no room");
    });
  }
}

TEST("errors call ranks what their communicator calls them") {
  const std::string path = hsgd::meeting_path(hsgd::draw_meeting_words());
  const auto alone = [&](int rank) {
    hsgd::MeetingFile file;
    file.make = [] { return hsgd::new_memory_file(1); };
    file.prepare = [](const hsgd::Fd&) {};
    return failure_of(
        [&] { hsgd::meet(path, nullptr, rank, called(7, 3), Member{}, file, Deadline(0.1)); });
  };
  CHECK(alone(0).find("of 3 ranks, rank(s) 8, 9 did not join") != std::string::npos);
  CHECK(alone(2).find("rank 7 did not join") != std::string::npos);
}

TEST("hundreds of ranks meet with a few messages of descriptors under way") {
  constexpr int kRanks = 150;  // three rosters each
  const std::string path = hsgd::meeting_path(hsgd::draw_meeting_words());
  ranks::run(kRanks, [&](int rank) { CHECK_EQ(meet(path, rank, kRanks), size_t{kRanks}); });
}
