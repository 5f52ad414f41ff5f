// Whether a process lives, with pidfds and where the kernel gives none.
#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "os/process_life.hpp"
#include "os/wait.hpp"
#include "support/check.hpp"

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
    end_ = hsgd::Fd();
    siginfo_t info{};
    CHECK(::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) == 0);
  }
  void forget() { CHECK(::waitpid(pid_, nullptr, 0) == pid_); }

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
