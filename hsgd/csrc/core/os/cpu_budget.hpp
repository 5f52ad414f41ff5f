// Counts the cores that the ranks of a node may use together.
//
// Reads affinity and cgroup quota. Launchers bind each rank to its own cores, so the view of one
// rank is not enough: each rank describes its part, and the union counts. Changes no affinity.
#ifndef HSGD_CORE_OS_CPU_BUDGET_HPP_
#define HSGD_CORE_OS_CPU_BUDGET_HPP_

#include <cstdint>

namespace hsgd {

// Cores that one process may use; lies in shared memory.
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
