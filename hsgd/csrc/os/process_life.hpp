// Whether another process lives: a descriptor of it that it passes on itself.
//
// Owns what such a descriptor is: a pidfd or, where the kernel or a filter of system calls refuses
// one (before Linux 5.3, seccomp), its open /proc/self/stat. Both mean this very process, whatever
// PID namespace the reader lives in and whoever gets its number later. Never waits.
#ifndef HSGD_OS_PROCESS_LIFE_HPP_
#define HSGD_OS_PROCESS_LIFE_HPP_

#include "os/shared_memory.hpp"

namespace hsgd {

// Of this process; invalid where there is neither.
Fd own_life();

// False too where nobody can know: deadlines end waits for such a process. The number alone would
// not do, which is another process's in another PID namespace.
bool has_ended(const Fd& life);

}  // namespace hsgd

#endif  // HSGD_OS_PROCESS_LIFE_HPP_
