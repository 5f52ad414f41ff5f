// CpuPlace: the last-level cache, NUMA node and package to which a process is bound.
//
// Reads the kernel's description of the first processor that the process may use: with many ranks
// starting together, each opens about a dozen files, not those of all processors. Never binds
// anything, and never fails: a value that is missing is not known. Source:
// Documentation/ABI/testing/sysfs-devices-system-cpu and stable/sysfs-devices-node of Linux.
#ifndef HSGD_CORE_TOPOLOGY_CPU_TOPOLOGY_HPP_
#define HSGD_CORE_TOPOLOGY_CPU_TOPOLOGY_HPP_

#include <cstdint>
#include <string>
#include <type_traits>

#include "core/os/cpu_budget.hpp"

namespace hsgd {

// The domains that hold all processors that a process may use; -1 if the process may leave the
// domain, or it is not known. Two processes in one domain have the same number. Lies in shared
// memory.
struct CpuPlace {
  int32_t cache = -1;    // lowest processor that shares the last-level cache
  int32_t numa = -1;     // number of the node
  int32_t package = -1;  // lowest processor of the package

  bool operator==(const CpuPlace& other) const {
    return cache == other.cache && numa == other.numa && package == other.package;
  }
};
static_assert(sizeof(CpuPlace) == 12 && std::is_trivially_copyable_v<CpuPlace>);

// Returns the place of a process. If the kernel reports no nodes, or no packages, the machine
// counts as node 0, or package 0. `root`: prefix of the path of /sys; tests use folders of their
// own.
CpuPlace place_of(const Cores& cores, const std::string& root = "");

// Returns the NUMA nodes of the machine that have processors; 1 if the kernel reports none.
int numa_nodes_with_cpus(const std::string& root = "");

}  // namespace hsgd

#endif  // HSGD_CORE_TOPOLOGY_CPU_TOPOLOGY_HPP_
