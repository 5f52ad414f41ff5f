// Owner: tells whether this process made a communicator. A forked child inherits the handle,
// but is no rank.
//
// Uses a page that the kernel clears in a forked child (MADV_WIPEONFORK), so the check costs one
// load and no system call.
#ifndef HSGD_CORE_OS_FORK_GUARD_HPP_
#define HSGD_CORE_OS_FORK_GUARD_HPP_

namespace hsgd {

class Owner {
 public:
  Owner();
  ~Owner();
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  // Returns false in a child of the process that made this object.
  bool is_this_process() const { return *mark_ == 1; }
  int pid() const { return pid_; }

 private:
  volatile int* mark_;
  int pid_;
};

}  // namespace hsgd

#endif  // HSGD_CORE_OS_FORK_GUARD_HPP_
