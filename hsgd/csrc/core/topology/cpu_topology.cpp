// Parses lists of processors and finds those that hold all processors of a process.
#include "core/topology/cpu_topology.hpp"

#include <algorithm>
#include <bitset>
#include <cstdlib>
#include <sstream>
#include <vector>

#include "core/os/kernel_file.hpp"

namespace hsgd {
namespace {

constexpr int kMostCpus = 64 * Cores::kWords;
using CpuSet = std::bitset<kMostCpus>;

CpuSet set_of(const Cores& cores) {
  CpuSet cpus;
  for (int cpu = 0; cpu < kMostCpus; ++cpu) {
    cpus[static_cast<size_t>(cpu)] = (cores.affinity[cpu / 64] >> cpu % 64 & 1) != 0;
  }
  return cpus;
}

// Returns the lowest processor of the set; -1 if the set is empty.
int32_t lowest(const CpuSet& cpus) {
  for (int cpu = 0; cpu < kMostCpus; ++cpu) {
    if (cpus[static_cast<size_t>(cpu)]) return cpu;
  }
  return -1;
}

bool lies_in(const CpuSet& inner, const CpuSet& outer) { return (inner & ~outer).none(); }

// Parses "0-3,8", without processors that have no bit in Cores. Returns an empty set if the file is
// no such list.
CpuSet cpus_in(const std::string& path) {
  std::istringstream file = contents_of(path);
  CpuSet cpus;
  int after = ',';
  while (after == ',') {
    int64_t first = 0;
    if (!(file >> first)) return {};
    int64_t last = first;
    if (file.peek() == '-' && !(file.ignore() >> last)) return {};
    if (first < 0 || last < first) return {};
    last = std::min<int64_t>(last, kMostCpus - 1);
    for (int64_t cpu = first; cpu <= last; ++cpu) cpus.set(static_cast<size_t>(cpu));
    after = file.get();
  }
  const bool ended = after == '\n' || after == std::istringstream::traits_type::eof();
  return ended ? cpus : CpuSet{};
}

// Returns the processors that share the highest cache level in the processor's files. The kernel
// lists this level last, so the search begins there and reads little else.
CpuSet sharing_cache(const std::string& cpu_folder, int cpu) {
  CpuSet shared;
  uint64_t highest = 0;
  std::vector<std::string> names = names_in(cpu_folder + "/cache");
  std::reverse(names.begin(), names.end());
  for (const std::string& name : names) {
    const std::string folder = cpu_folder + "/cache/" + name;
    const uint64_t level = number_in(folder + "/level", 0);
    if (level <= highest || contents_of(folder + "/type").str() == "Instruction\n") continue;
    const CpuSet cpus = cpus_in(folder + "/shared_cpu_list");
    if (!cpus[static_cast<size_t>(cpu)]) continue;  // a list without its own processor is not valid
    shared = cpus;
    highest = level;
  }
  return shared;
}

CpuSet sharing_package(const std::string& cpu_folder) {
  const CpuSet cpus = cpus_in(cpu_folder + "/topology/package_cpus_list");
  return cpus.any() ? cpus
                    : cpus_in(cpu_folder + "/topology/core_siblings_list");  // its older name
}

// Returns the number in "node3", or -1.
int32_t node_number(const std::string& name) {
  constexpr size_t kPrefix = 4;
  const bool is_node = name.size() > kPrefix && name.size() < kPrefix + 6 &&
                       name.compare(0, kPrefix, "node") == 0 &&
                       name.find_first_not_of("0123456789", kPrefix) == std::string::npos;
  return is_node ? std::atoi(name.c_str() + kPrefix) : -1;
}

// Skips nodes that have memory only: they have no processors.
int32_t numa_of(const CpuSet& own, const std::string& nodes) {
  bool known = false;
  for (const std::string& name : names_in(nodes)) {
    const int32_t number = node_number(name);
    if (number < 0) continue;
    const CpuSet cpus = cpus_in(nodes + "/" + name + "/cpulist");
    if (cpus.any() && lies_in(own, cpus)) return number;
    known |= cpus.any();
  }
  return known ? -1 : 0;
}

}  // namespace

CpuPlace place_of(const Cores& cores, const std::string& root) {
  const std::string system = root + "/sys/devices/system";
  CpuSet own = set_of(cores);
  // An affinity may name offline processors: those have no files and run no processes.
  const CpuSet online = cpus_in(system + "/cpu/online");
  if ((own & online).any()) own &= online;
  const int32_t first = lowest(own);
  if (first < 0) return {};
  const std::string folder = system + "/cpu/cpu" + std::to_string(first);
  const CpuSet cache = sharing_cache(folder, first);
  const CpuSet package = sharing_package(folder);
  CpuPlace place;
  place.cache = lies_in(own, cache) ? lowest(cache) : -1;
  place.numa = numa_of(own, system + "/node");
  place.package = package.none() ? 0 : lies_in(own, package) ? lowest(package) : -1;
  return place;
}

// Weak: tests replace it.
__attribute__((weak)) int numa_nodes_with_cpus(const std::string& root) {
  const CpuSet nodes =
      cpus_in(root + "/sys/devices/system/node/has_cpu");  // a list of the same form
  return std::max(1, static_cast<int>(nodes.count()));
}

}  // namespace hsgd
