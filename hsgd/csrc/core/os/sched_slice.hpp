// Short time slices for threads that nearly always sleep and must run at once after a wake-up.
// Needs no privilege; the thread never gets more than its fair share of a core.
#ifndef HSGD_CORE_OS_SCHED_SLICE_HPP_
#define HSGD_CORE_OS_SCHED_SLICE_HPP_

namespace hsgd {

// Asks for short slices for the calling thread. Does nothing before Linux 6.12, which introduced
// them.
void ask_for_short_turns() noexcept;

}  // namespace hsgd

#endif  // HSGD_CORE_OS_SCHED_SLICE_HPP_
