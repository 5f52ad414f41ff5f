// SignalsBlocked: blocks signals while a thread of the core is started.
#ifndef HSGD_CORE_OS_SIGNAL_MASK_HPP_
#define HSGD_CORE_OS_SIGNAL_MASK_HPP_

#include <pthread.h>
#include <signal.h>

#include <initializer_list>

namespace hsgd {

// Signals go to the program's own threads: a handler that wakes a sleeping call must run there.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    ::sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) {
      ::sigdelset(&blocked, fault);
    }
    ::pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace hsgd

#endif  // HSGD_CORE_OS_SIGNAL_MASK_HPP_
