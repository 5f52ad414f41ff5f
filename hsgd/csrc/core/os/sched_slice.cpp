// sched_setattr(2), for which the C library has no function.
#include "core/os/sched_slice.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace hsgd {
namespace {

// Copy of the struct in linux/sched/types.h; its name clashes with glibc's from 2.41 on.
struct Attributes {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns;  // for ordinary threads: length of a slice, since Linux 6.12
  uint64_t deadline;
  uint64_t period;
};
static_assert(sizeof(Attributes) == 48, "SCHED_ATTR_SIZE_VER0");

// The shortest slice that the kernel allows. A woken thread with a shorter slice than the running
// thread's runs first; with an equal one it waits for the end of that slice, up to some
// milliseconds.
constexpr uint64_t kTurnNs = 100'000;

}  // namespace

void ask_for_short_turns() noexcept {
#if defined(SYS_sched_setattr) && defined(SYS_sched_getattr)
  Attributes own{};
  if (::syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) != 0) return;
  if (own.policy != SCHED_OTHER) return;  // the program has chosen a policy
  own.size = sizeof own;
  own.runtime_ns = kTurnNs;
  ::syscall(SYS_sched_setattr, 0, &own, 0);
#endif
}

}  // namespace hsgd
