// ProcessWatch: tells whether another process lives, through a descriptor that the other process
// passes on. There is one descriptor per process, however many communicators watch it.
//
// The descriptor is a pidfd, or an open /proc/self/stat if the kernel or a seccomp filter refuses a
// pidfd (before Linux 5.3). Both mean exactly this process, in any PID namespace, even if its
// number is used again later. Never waits.
#ifndef HSGD_CORE_OS_PROCESS_LIFE_HPP_
#define HSGD_CORE_OS_PROCESS_LIFE_HPP_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "core/os/fork_guard.hpp"
#include "core/os/shared_memory.hpp"

namespace hsgd {

// Returns the descriptor of this process; invalid if neither kind is available.
Fd own_life();

// Also returns false if it cannot be known: then deadlines end waits for the process. The pid is
// not enough: in another PID namespace it is another process's number.
bool has_ended(const Fd& life);

// Another process, while it is watched.
class WatchedProcess {
 public:
  // Returns the result of the last ProcessWatch::look(), or the present state if epoll does not
  // follow the process.
  bool ended() const {
    return ended_.load(std::memory_order_relaxed) || (!is_followed_ && has_ended(life_));
  }

 private:
  friend class ProcessWatch;
  Fd life_;
  uint64_t id_ = 0;
  bool is_followed_ = false;
  std::atomic<bool> ended_{false};  // no ordering: the writes of a dead process are visible
};

// The processes that this one watches, each once for all communicators. Outlives them. Thread-safe.
class ProcessWatch {
 public:
  // Adds a process. `life`: the descriptor that it passed on. `pid`: its number in its own
  // namespace. The result is shared with others that watch it already.
  std::shared_ptr<const WatchedProcess> add(Fd life, int pid);
  // Learns which processes have ended, with one system call for all.
  void look();

 private:
  void follow(const std::shared_ptr<WatchedProcess>& process);
  void forget(WatchedProcess* process);

  const Owner owner_;  // a forked child has the same epoll instance and must not change it
  std::mutex mutex_;
  Fd epoll_;  // while processes are watched; without it, each process is polled
  uint64_t last_id_ = 0;
  std::map<uint64_t, std::weak_ptr<WatchedProcess>> by_id_;  // processes that epoll follows
  std::map<int, std::weak_ptr<WatchedProcess>> by_pid_;      // the newest process with this pid
};

}  // namespace hsgd

#endif  // HSGD_CORE_OS_PROCESS_LIFE_HPP_
