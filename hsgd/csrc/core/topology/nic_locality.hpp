// Near which NUMA nodes the network adapters of this node lie.
//
// Owns the reading of what the kernel says of physical adapters that are up. Never opens one, and
// never decides which of them carries data.
// Source: Documentation/ABI/testing/sysfs-class-net and stable/sysfs-class-infiniband of Linux.
#ifndef HSGD_CORE_TOPOLOGY_NIC_LOCALITY_HPP_
#define HSGD_CORE_TOPOLOGY_NIC_LOCALITY_HPP_

#include <string>
#include <vector>

namespace hsgd {

struct Nic {
  std::string name;  // "mlx5_0", "eth0"
  int numa;          // -1: not known, as in most virtual machines
  bool rdma;         // an adapter for RDMA; else an interface of the kernel's network
};

// Sorted by name, those for RDMA first: InfiniBand, RoCE, Omni-Path and EFA with an active port,
// Slingshot. An adapter that is both is listed twice. `root`: what the path of /sys begins with.
std::vector<Nic> active_nics(const std::string& root = "");

// The known nodes, each once, in the order of the adapters: of those for RDMA where there are any,
// as data then goes by them.
std::vector<int> nic_numa_nodes(const std::vector<Nic>& nics);

// From 1: which of nic_numa_nodes() holds all processors that this process may use; 0: none.
int nic_of_process(const std::string& root = "");

}  // namespace hsgd

#endif  // HSGD_CORE_TOPOLOGY_NIC_LOCALITY_HPP_
