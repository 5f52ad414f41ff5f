// Whether a process lives, with pidfds and where the kernel gives none.
#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "core/os/process_life.hpp"
#include "core/os/wait.hpp"
#include "support/check.hpp"
#include "support/kernel.hpp"

namespace {

// A child that ends when told to; its file of /proc stands for it.
class Child {
 public:
  explicit Child(const char* name) {
    int ends[2];
    CHECK(::pipe(ends) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[1]);
      char byte;
      ::prctl(PR_SET_NAME, name);
      if (::read(ends[0], &byte, 1) < 0) ::_exit(1);
      ::_exit(0);
    }
    ::close(ends[0]);
    end_ = hsgd::Fd(ends[1]);
    life = hsgd::Fd(::open(("/proc/" + std::to_string(pid_) + "/stat").c_str(), O_RDONLY));
  }
  // Ended, but nobody has waited for it.
  void end() {
    CHECK(::write(end_.get(), "", 1) == 1);  // children made later have the pipe, too
    siginfo_t info{};
    CHECK(::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) == 0);
  }
  void forget() { CHECK(::waitpid(pid_, nullptr, 0) == pid_); }
  int pid() const { return pid_; }
  hsgd::Fd pidfd() const { return hsgd::Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0))); }

  hsgd::Fd life;

 private:
  pid_t pid_ = -1;
  hsgd::Fd end_;
};

}  // namespace

TEST("this process lives, by its pidfd and by its file") {
  CHECK(!hsgd::has_ended(hsgd::own_life()));
  CHECK(!hsgd::has_ended(hsgd::Fd(::open("/proc/self/stat", O_RDONLY))));
}

TEST("nobody is taken for dead of whom nothing is known") { CHECK(!hsgd::has_ended(hsgd::Fd())); }

TEST("by its file a process has ended as a zombie and when it was waited for") {
  for (const char* name : {"rank", "Z) Z 1 (", ") X"}) {
    Child child(name);
    CHECK(child.life.valid());
    CHECK(!hsgd::has_ended(child.life));
    child.end();
    CHECK(hsgd::has_ended(child.life));
    child.forget();
    CHECK(hsgd::has_ended(child.life));
  }
}

TEST("a process whose first thread has ended lives") {
  int ends[2];
  CHECK(::pipe(ends) == 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::close(ends[1]);
    pthread_t thread;
    static int from = ends[0];
    ::pthread_create(
        &thread, nullptr,
        [](void*) -> void* {
          char byte;
          ::_exit(static_cast<int>(::read(from, &byte, 1)));
        },
        nullptr);
    ::pthread_exit(nullptr);
  }
  ::close(ends[0]);
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const hsgd::Fd life(::open(path.c_str(), O_RDONLY));
  const auto is_zombie = [&] {
    char text[512] = {};
    return ::pread(life.get(), text, sizeof text - 1, 0) > 0 &&
           std::string(text).find(") Z ") != std::string::npos;
  };
  for (int look = 0; look < 1000 && !is_zombie(); ++look) hsgd::pause_ms(5);
  CHECK(is_zombie());
  CHECK(!hsgd::has_ended(life));
  ::close(ends[1]);
  CHECK(::waitpid(pid, nullptr, 0) == pid);
  CHECK(hsgd::has_ended(life));
}

TEST("one look tells who has ended, by pidfd and by file") {
  hsgd::ProcessWatch watch;
  Child one("one");
  Child other("other");
  const auto by_pidfd = watch.add(one.pidfd(), one.pid());
  const auto by_file = watch.add(std::move(other.life), other.pid());
  watch.look();
  CHECK(!by_pidfd->ended() && !by_file->ended());
  one.end();
  watch.look();
  CHECK(by_pidfd->ended() && !by_file->ended());
  other.end();
  CHECK(by_file->ended());
  one.forget();
  other.forget();
  watch.look();
  CHECK(by_pidfd->ended() && by_file->ended());
}

TEST("a process takes one descriptor, however often it is watched") {
  hsgd::ProcessWatch watch;
  Child child("rank");
  const auto first = watch.add(child.pidfd(), child.pid());
  const auto again = watch.add(child.pidfd(), child.pid());
  CHECK(first == again);
  // By a file nobody can tell: its number is that of its own namespace.
  CHECK(first != watch.add(std::move(child.life), child.pid()));
  child.end();
  const auto late = watch.add(child.pidfd(), child.pid());
  watch.look();
  CHECK(first->ended() && late->ended());
  child.forget();
}

TEST("processes that go by the same number are not taken for one another") {
  hsgd::ProcessWatch watch;
  Child one("one");
  Child other("other");
  const auto first = watch.add(one.pidfd(), 1);
  const auto second = watch.add(other.pidfd(), 1);
  CHECK(first != second);
  other.end();
  watch.look();
  CHECK(!first->ended() && second->ended());
  one.end();
  watch.look();
  CHECK(first->ended());
  one.forget();
  other.forget();
}

TEST("who is watched no more is forgotten, and a forked child leaves all as it is") {
  if (!kernel::wipes_on_fork()) return;
  hsgd::ProcessWatch watch;
  Child gone("gone");
  Child child("rank");
  watch.add(gone.pidfd(), gone.pid());
  auto watched = watch.add(child.pidfd(), child.pid());
  const pid_t fork = ::fork();
  if (fork == 0) {
    watched.reset();
    ::_exit(0);
  }
  CHECK(::waitpid(fork, nullptr, 0) == fork);
  gone.end();
  child.end();
  watch.look();
  CHECK(watched->ended());
  gone.forget();
  child.forget();
}

TEST("several threads may add, look and forget") {
  hsgd::ProcessWatch watch;
  Child child("rank");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 300; ++turn) {
        const auto watched = watch.add(child.pidfd(), child.pid());
        watch.look();
        CHECK(!watched->ended());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  child.end();
  const auto watched = watch.add(child.pidfd(), child.pid());
  watch.look();
  CHECK(watched->ended());
  child.forget();
}
