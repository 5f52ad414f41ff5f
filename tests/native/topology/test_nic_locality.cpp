// Near which NUMA nodes adapters lie, in trees of files that look like those of other machines.
#include <vector>

#include "core/os/cpu_budget.hpp"
#include "core/topology/cpu_topology.hpp"
#include "core/topology/nic_locality.hpp"
#include "support/check.hpp"
#include "support/fake_root.hpp"

namespace {

// Of /sys/class: an interface of the kernel's network with a device, and an adapter for RDMA.
void add_interface(FakeRoot* root, const std::string& name, const std::string& numa,
                   const std::string& state) {
  const std::string folder = "/sys/class/net/" + name;
  root->write(folder + "/operstate", state + "\n");
  root->write(folder + "/device/numa_node", numa + "\n");
}

void add_rdma(FakeRoot* root, const std::string& name, const std::string& numa,
              const std::vector<std::string>& ports) {
  const std::string folder = "/sys/class/infiniband/" + name;
  root->write(folder + "/device/numa_node", numa + "\n");
  for (size_t port = 0; port < ports.size(); ++port) {
    root->write(folder + "/ports/" + std::to_string(port + 1) + "/state", ports[port] + "\n");
  }
}

std::vector<int> numa_nodes(const FakeRoot& root) {
  return hsgd::nic_numa_nodes(hsgd::active_nics(root.path()));
}

// All processors of this machine are in the NUMA node `numa` of the other one.
void put_this_process_on(FakeRoot* root, int numa) {
  root->write("/sys/devices/system/node/node" + std::to_string(numa) + "/cpulist", "0-1023\n");
}

}  // namespace

TEST("a machine without adapters has none near any node") {
  const FakeRoot root;
  CHECK(hsgd::active_nics(root.path()).empty());
  CHECK(hsgd::nic_of_process(root.path()) == 0);
}

TEST("interfaces that are up and have a device count, each NUMA node once") {
  FakeRoot root;
  add_interface(&root, "eth0", "1", "up");
  add_interface(&root, "eth1", "0", "down");
  add_interface(&root, "eth2", "3", "unknown");
  add_interface(&root, "eth3", "1", "up");
  root.write("/sys/class/net/lo/operstate", "unknown\n");   // no device
  root.write("/sys/class/net/bond0/operstate", "up\n");     // neither
  root.write("/sys/class/net/bonding_masters", "bond0\n");  // no folder
  CHECK((numa_nodes(root) == std::vector<int>{1, 3}));
}

TEST("adapters for RDMA with an active port come before all interfaces") {
  FakeRoot root;
  add_interface(&root, "eth0", "0", "up");
  add_rdma(&root, "mlx5_0", "2", {"1: DOWN", "4: ACTIVE"});
  add_rdma(&root, "mlx5_1", "1", {"1: DOWN"});
  add_rdma(&root, "mlx5_2", "3", {"4: ACTIVE"});
  CHECK((numa_nodes(root) == std::vector<int>{2, 3}));
  root.remove("/sys/class/infiniband");
  CHECK((numa_nodes(root) == std::vector<int>{0}));
}

TEST("an adapter whose node the kernel does not know is near nobody") {
  FakeRoot root;
  add_interface(&root, "eth0", "-1", "up");
  add_interface(&root, "eth1", "nonsense", "up");
  put_this_process_on(&root, 0);
  CHECK(numa_nodes(root).empty());
  CHECK(hsgd::nic_of_process(root.path()) == 0);
}

TEST("a process is near the adapter of the NUMA node that holds it") {
  FakeRoot root;
  add_interface(&root, "eth0", "1", "up");
  add_interface(&root, "eth1", "2", "up");
  put_this_process_on(&root, 2);
  CHECK(hsgd::nic_of_process(root.path()) == 2);
  root.remove("/sys/devices/system/node");
  put_this_process_on(&root, 1);
  CHECK(hsgd::nic_of_process(root.path()) == 1);
  root.remove("/sys/devices/system/node");
  put_this_process_on(&root, 0);
  CHECK(hsgd::nic_of_process(root.path()) == 0);
}
