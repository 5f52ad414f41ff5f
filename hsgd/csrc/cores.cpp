// Affinity and cgroup quota of this process.
#include "cores.hpp"

#include <sched.h>

#include <algorithm>
#include <climits>
#include <cstdio>

namespace hsgd {
namespace {

// Cores granted by the cgroup (version 2, then 1), or a large number.
int quota_cores() {
  long long quota = -1;
  long long period = 0;
  if (std::FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "re")) {
    if (std::fscanf(file, "%lld %lld", &quota, &period) != 2) quota = -1;
    std::fclose(file);
  } else if (std::FILE* quota_file = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "re")) {
    if (std::fscanf(quota_file, "%lld", &quota) != 1) quota = -1;
    std::fclose(quota_file);
    if (std::FILE* period_file = std::fopen("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "re")) {
      if (std::fscanf(period_file, "%lld", &period) != 1) quota = -1;
      std::fclose(period_file);
    }
  }
  if (quota <= 0 || period <= 0) return INT_MAX;
  return static_cast<int>(std::max(1LL, quota / period));
}

}  // namespace

Cores own_cores() {
  Cores cores{};
  cores.quota = quota_cores();
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
