// Which process a communicator belongs to: a forked child inherits the handle, but is no rank.
//
// Owns one page that the kernel empties in a child of fork (MADV_WIPEONFORK), so that the question
// costs one load and no system call. Never acts on the answer.
#ifndef HSGD_CORE_OS_FORK_GUARD_HPP_
#define HSGD_CORE_OS_FORK_GUARD_HPP_

namespace hsgd {

class Owner {
 public:
  Owner();
  ~Owner();
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

  // False in a child of the process that made this object.
  bool is_this_process() const { return *mark_ == 1; }
  int pid() const { return pid_; }

 private:
  volatile int* mark_;
  int pid_;
};

}  // namespace hsgd

#endif  // HSGD_CORE_OS_FORK_GUARD_HPP_
