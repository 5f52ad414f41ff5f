// sched_setattr(2), for which the C library has no function.
#include "core/os/sched_slice.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace hsgd {
namespace {

// As linux/sched/types.h has it, whose name clashes with the C library's from glibc 2.41 on.
struct Attributes {
  uint32_t size;
  uint32_t policy;
  uint64_t flags;
  int32_t nice;
  uint32_t priority;
  uint64_t runtime_ns;  // of ordinary threads: the length of a turn, since Linux 6.12
  uint64_t deadline;
  uint64_t period;
};
static_assert(sizeof(Attributes) == 48, "SCHED_ATTR_SIZE_VER0");

// The least that the kernel takes. A thread that is woken with shorter turns than the one that runs
// comes first; with equal ones it waits until that one's turn is over, up to some milliseconds.
constexpr uint64_t kTurnNs = 100'000;

}  // namespace

void ask_for_short_turns() noexcept {
#if defined(SYS_sched_setattr) && defined(SYS_sched_getattr)
  Attributes own{};
  if (::syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) != 0) return;
  if (own.policy != SCHED_OTHER) return;  // somebody has chosen already
  own.size = sizeof own;
  own.runtime_ns = kTurnNs;
  ::syscall(SYS_sched_setattr, 0, &own, 0);
#endif
}

}  // namespace hsgd
