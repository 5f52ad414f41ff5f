// Which last-level cache, NUMA node and package a process is bound to.
//
// Owns the reading of what the kernel says of caches, nodes and packages, of the first processor
// that the process may use: a rank of many that start together opens a dozen files, not those
// of all processors. Never binds anything, and never fails: what is not said is not known.
// Source: Documentation/ABI/testing/sysfs-devices-system-cpu and stable/sysfs-devices-node of
// Linux.
#ifndef HSGD_CORE_TOPOLOGY_CPU_TOPOLOGY_HPP_
#define HSGD_CORE_TOPOLOGY_CPU_TOPOLOGY_HPP_

#include <cstdint>
#include <string>
#include <type_traits>

#include "core/os/cpu_budget.hpp"

namespace hsgd {

// The domains that hold all processors that a process may use. -1 where it may leave the domain, or
// nothing is known. Two processes in one domain have the same number. Lies in shared memory.
struct CpuPlace {
  int32_t cache = -1;    // lowest processor that shares the last-level cache
  int32_t numa = -1;     // number of the node
  int32_t package = -1;  // lowest processor of the package

  bool operator==(const CpuPlace& other) const {
    return cache == other.cache && numa == other.numa && package == other.package;
  }
};
static_assert(sizeof(CpuPlace) == 12 && std::is_trivially_copyable_v<CpuPlace>);

// Where the kernel knows no nodes, or no packages, the machine is one node, or one package: 0.
// `root`: what the path of /sys begins with; tests have folders of their own.
CpuPlace place_of(const Cores& cores, const std::string& root = "");

// Of the machine; 1 where the kernel knows none. Nodes of memory alone do not count.
int numa_nodes_with_cpus(const std::string& root = "");

}  // namespace hsgd

#endif  // HSGD_CORE_TOPOLOGY_CPU_TOPOLOGY_HPP_
