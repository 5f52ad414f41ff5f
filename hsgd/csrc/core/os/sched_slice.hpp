// Threads that sleep nearly always and shall run at once when they are woken.
//
// Owns the question to the scheduler. Needs no privilege, and never takes more than a fair share of
// a core: it asks for shorter turns.
#ifndef HSGD_CORE_OS_SCHED_SLICE_HPP_
#define HSGD_CORE_OS_SCHED_SLICE_HPP_

namespace hsgd {

// Of the calling thread. Does nothing where the kernel does not know such turns (before
// Linux 6.12).
void ask_for_short_turns() noexcept;

}  // namespace hsgd

#endif  // HSGD_CORE_OS_SCHED_SLICE_HPP_
