// Finds the NUMA nodes near the network adapters of this node.
//
// Reads what the kernel reports of physical adapters that are up. Never opens an adapter.
// Source: Documentation/ABI/testing/sysfs-class-net and stable/sysfs-class-infiniband of Linux.
#ifndef HSGD_CORE_TOPOLOGY_NIC_LOCALITY_HPP_
#define HSGD_CORE_TOPOLOGY_NIC_LOCALITY_HPP_

#include <string>
#include <vector>

namespace hsgd {

struct Nic {
  std::string name;  // "mlx5_0", "eth0"
  int numa;          // -1: not known, as in most virtual machines
  bool rdma;         // an RDMA adapter; otherwise a network interface of the kernel
};

// Returns the adapters sorted by name, RDMA adapters first: InfiniBand, RoCE, Omni-Path and EFA
// with an active port, Slingshot. An adapter of both kinds is listed twice. `root`: prefix of the
// path of /sys.
std::vector<Nic> active_nics(const std::string& root = "");

// Returns the known nodes, each once, in the order of the adapters; only nodes of RDMA adapters if
// there are any, because data then uses those.
std::vector<int> nic_numa_nodes(const std::vector<Nic>& nics);

// Returns which of nic_numa_nodes(), counted from 1, holds all processors that this process may
// use; 0: none.
int nic_of_process(const std::string& root = "");

}  // namespace hsgd

#endif  // HSGD_CORE_TOPOLOGY_NIC_LOCALITY_HPP_
