// Whether another process lives: a descriptor of it that it passes on itself, one for each process
// however many communicators watch it.
//
// Owns what such a descriptor is: a pidfd or, where the kernel or a filter of system calls refuses
// one (before Linux 5.3, seccomp), its open /proc/self/stat. Both mean this very process, whatever
// PID namespace the reader lives in and whoever gets its number later. Never waits.
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

// Of this process; invalid where there is neither.
Fd own_life();

// False too where nobody can know: deadlines end waits for such a process. The number alone would
// not do, which is another process's in another PID namespace.
bool has_ended(const Fd& life);

// Another process, while somebody watches it.
class WatchedProcess {
 public:
  // As ProcessWatch::look() has learned, or, where nothing tells that, as it is now.
  bool ended() const {
    return ended_.load(std::memory_order_relaxed) || (!is_followed_ && has_ended(life_));
  }

 private:
  friend class ProcessWatch;
  Fd life_;
  uint64_t id_ = 0;
  bool is_followed_ = false;
  std::atomic<bool> ended_{false};  // orders nothing: what a dead process wrote is there for long
};

// The processes that this one watches, each once, however many ask for it. Outlives them. May be
// used by several threads.
class ProcessWatch {
 public:
  // `life`: what the other process passed on. `pid`: the number that it goes by, in its namespace.
  // Shared with whoever watches it already.
  std::shared_ptr<const WatchedProcess> add(Fd life, int pid);
  // Learns which processes have ended: one system call, however many there are.
  void look();

 private:
  void follow(const std::shared_ptr<WatchedProcess>& process);
  void forget(WatchedProcess* process);

  const Owner owner_;  // a forked child has the same epoll instance, and leaves it as it is
  std::mutex mutex_;
  Fd epoll_;  // while processes are watched; where there is none, each is asked by itself
  uint64_t last_id_ = 0;
  std::map<uint64_t, std::weak_ptr<WatchedProcess>> by_id_;  // those that epoll follows
  std::map<int, std::weak_ptr<WatchedProcess>> by_pid_;      // the newest that goes by it
};

}  // namespace hsgd

#endif  // HSGD_CORE_OS_PROCESS_LIFE_HPP_
