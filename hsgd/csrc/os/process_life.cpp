// The descriptors, and reading them.
#include "os/process_life.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace hsgd {
namespace {

// By proc_pid_stat(5): the state stands behind the name, which may hold anything, and the number of
// threads is the 18th field after it. A process whose first thread has ended is no zombie.
bool is_zombie(const char* stat) {
  const char* name_end = std::strrchr(stat, ')');
  char state = 0;
  long threads = 0;
  if (name_end == nullptr ||
      std::sscanf(name_end + 1,
                  " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld", &state,
                  &threads) != 2) {
    return false;
  }
  return (state == 'Z' || state == 'X') && threads <= 1;
}

bool file_says_ended(int stat) {
  char text[1024];
  const ssize_t got = ::pread(stat, text, sizeof text - 1, 0);
  if (got < 0) return errno == ESRCH;  // it was waited for
  text[got] = '\0';
  return is_zombie(text);
}

}  // namespace

Fd own_life() {
#ifdef SYS_pidfd_open
  Fd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (pidfd.valid()) return pidfd;
#endif
  return Fd(::open("/proc/self/stat", O_RDONLY | O_CLOEXEC));
}

bool has_ended(const Fd& life) {
  if (!life.valid()) return false;
  // A file can always be written, as far as poll() knows; a pidfd never.
  pollfd watched{life.get(), POLLIN | POLLOUT, 0};
  if (::poll(&watched, 1, 0) <= 0) return false;
  return (watched.revents & POLLOUT) == 0 || file_says_ended(life.get());
}

}  // namespace hsgd
