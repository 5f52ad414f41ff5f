// Affinity and cgroup quota of this process.
#include "core/os/cpu_budget.hpp"

#include <sched.h>

#include <algorithm>

#include "core/os/cgroup.hpp"

namespace hsgd {

// Weak: tests replace it.
__attribute__((weak)) Cores own_cores() {
  Cores cores{};
  cores.quota = Cgroups().cores();
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int cpu = 0; cpu < std::min(CPU_SETSIZE, 64 * Cores::kWords); ++cpu) {
    if (CPU_ISSET(cpu, &set)) cores.affinity[cpu / 64] |= uint64_t{1} << cpu % 64;
  }
  return cores;
}

void add_cores(Cores* all, const Cores& one) {
  for (int word = 0; word < Cores::kWords; ++word) all->affinity[word] |= one.affinity[word];
  all->quota = std::min(all->quota, one.quota);
}

int count_cores(const Cores& cores) {
  int count = 0;
  for (const uint64_t word : cores.affinity) count += __builtin_popcountll(word);
  return std::max(1, std::min<int>(count, cores.quota));
}

}  // namespace hsgd
