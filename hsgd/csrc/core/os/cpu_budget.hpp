// How many cores the ranks of a node may use together.
//
// Owns the reading of affinity and cgroup quota. Launchers bind ranks to cores of their own, so one
// rank's view says nothing: each describes its part, and what counts is the union. Never changes
// anything.
#ifndef HSGD_CORE_OS_CPU_BUDGET_HPP_
#define HSGD_CORE_OS_CPU_BUDGET_HPP_

#include <cstdint>

namespace hsgd {

// What one process may use; lies in shared memory.
struct Cores {
  static constexpr int kWords = 16;  // processors beyond 1024 are not counted
  uint64_t affinity[kWords];         // a bit per processor
  int32_t quota;                     // cores granted by the cgroup, at least 1
};

Cores own_cores();
void add_cores(Cores* all, const Cores& one);  // the union of processors, the smaller quota
int count_cores(const Cores& cores);           // at least 1

}  // namespace hsgd

#endif  // HSGD_CORE_OS_CPU_BUDGET_HPP_
