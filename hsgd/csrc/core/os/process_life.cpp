// Makes and reads the descriptors that tell whether a process lives.
#include "core/os/process_life.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

namespace hsgd {
namespace {

// Parses /proc/PID/stat, see proc_pid_stat(5): the state stands after the name, which may hold any
// character; the number of threads is the 18th field after it. A process whose first thread alone
// has ended is not a zombie.
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
  if (got < 0) return errno == ESRCH;  // it ended and was reaped
  text[got] = '\0';
  return is_zombie(text);
}

// Returns the process of a pidfd, in the PID namespace of this process; 0 if it has ended or has no
// number here. Files in /proc hold the number in their opener's namespace, so they get 0.
int pid_of(const Fd& life) {
  char text[1024];
  std::snprintf(text, sizeof text, "/proc/self/fdinfo/%d", life.get());
  const Fd info(::open(text, O_RDONLY | O_CLOEXEC));
  const ssize_t got = info.valid() ? ::read(info.get(), text, sizeof text - 1) : 0;
  text[std::max<ssize_t>(got, 0)] = '\0';
  const char* line = std::strstr(text, "\nPid:");
  return line == nullptr ? 0 : std::max(0, std::atoi(line + 5));
}

// Returns true if both are one process. A number means the same process only while that one lives.
bool are_same(const Fd& known, const Fd& other) {
  const int pid = known.valid() && other.valid() ? pid_of(known) : 0;
  return pid != 0 && pid == pid_of(other);
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
  // poll() reports a file always as writable, a pidfd never.
  pollfd watched{life.get(), POLLIN | POLLOUT, 0};
  if (::poll(&watched, 1, 0) <= 0) return false;
  return (watched.revents & POLLOUT) == 0 || file_says_ended(life.get());
}

std::shared_ptr<const WatchedProcess> ProcessWatch::add(Fd life, int pid) {
  const auto release = [this](WatchedProcess* process) {
    forget(process);
    delete process;
  };
  std::shared_ptr<WatchedProcess> known;  // released without the lock, because forget() takes it
  std::shared_ptr<WatchedProcess> added(new WatchedProcess, release);
  added->life_ = std::move(life);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<WatchedProcess>& newest = by_pid_[pid];
  known = newest.lock();
  if (known != nullptr && are_same(known->life_, added->life_)) return known;
  newest = added;
  follow(added);
  return added;
}

void ProcessWatch::follow(const std::shared_ptr<WatchedProcess>& process) {
  if (!epoll_.valid()) epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  process->id_ = ++last_id_;
  by_id_[process->id_] = process;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = process->id_;
  process->is_followed_ =
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, process->life_.get(), &event) == 0;
}

// All processes have the same open file of a passed descriptor, and epoll follows it until all have
// closed it. So it must be removed from epoll if the process is not watched any more.
void ProcessWatch::forget(WatchedProcess* process) {
  if (!owner_.is_this_process()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (process->is_followed_ && !process->ended_.load(std::memory_order_relaxed))
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, process->life_.get(), nullptr);
  by_id_.erase(process->id_);
  if (by_id_.empty()) epoll_ = Fd();
  for (auto entry = by_pid_.begin(); entry != by_pid_.end();) {
    entry = entry->second.expired() ? by_pid_.erase(entry) : std::next(entry);
  }
}

void ProcessWatch::look() {
  constexpr int kAtOnce = 16;
  epoll_event events[kAtOnce];
  std::vector<std::shared_ptr<WatchedProcess>> ended;  // released without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const int count = ::epoll_wait(epoll_.get(), events, kAtOnce, 0);
  for (int i = 0; i < count; ++i) {  // the next look finds the others
    const auto found = by_id_.find(events[i].data.u64);
    std::shared_ptr<WatchedProcess> process =
        found == by_id_.end() ? nullptr : found->second.lock();
    if (process == nullptr) continue;  // not watched any more: forget() waits for the lock
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, process->life_.get(), nullptr);
    process->ended_.store(true, std::memory_order_relaxed);
    ended.push_back(std::move(process));
  }
}

}  // namespace hsgd
