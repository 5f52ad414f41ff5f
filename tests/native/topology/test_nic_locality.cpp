// NUMA nodes of network adapters, in trees of files that look like those of other machines.
#include "support/check.hpp"
#include "support/fake_root.hpp"
#include "topology/nic_locality.hpp"

namespace {

class Machine {
 public:
  Machine& interface(const std::string& name, const std::string& state) {
    return write("net/" + name + "/operstate", state);
  }
  Machine& port(const std::string& name, const std::string& state) {
    return write("infiniband/" + name + "/ports/1/state", state);
  }
  Machine& on_node(const std::string& device, const std::string& node) {
    return write(device + "/device/numa_node", node);
  }
  std::string names() const {
    std::string names;
    for (const hsgd::Nic& nic : hsgd::active_nics(root_.path())) {
      names += nic.name + "@" + std::to_string(nic.numa) + " ";
    }
    return names;
  }
  std::vector<int> nodes() const { return hsgd::nic_numa_nodes(hsgd::active_nics(root_.path())); }

 private:
  Machine& write(const std::string& path, const std::string& text) {
    root_.write("/sys/class/" + path, text + "\n");
    return *this;
  }

  FakeRoot root_;
};

}  // namespace

TEST("a machine without /sys has no adapters") {
  CHECK_EQ(Machine().names(), "");
  CHECK(Machine().nodes().empty());
}

TEST("of interfaces the physical ones that are up count") {
  Machine machine;
  machine.interface("lo", "unknown").interface("bond0", "up");
  machine.interface("eth0", "up").on_node("net/eth0", "1");
  machine.interface("eth1", "down").on_node("net/eth1", "0");
  machine.interface("eth2", "unknown").on_node("net/eth2", "0");
  CHECK_EQ(machine.names(), "eth0@1 eth2@0 ");
  CHECK((machine.nodes() == std::vector<int>{1, 0}));
}

TEST("where there are adapters for RDMA their nodes count, each once") {
  Machine machine;
  machine.interface("eth0", "up").on_node("net/eth0", "0");
  machine.port("mlx5_0", "4: ACTIVE").on_node("infiniband/mlx5_0", "3");
  machine.port("mlx5_1", "1: DOWN").on_node("infiniband/mlx5_1", "2");
  machine.port("mlx5_2", "4: ACTIVE").on_node("infiniband/mlx5_2", "3");
  machine.on_node("cxi/cxi0", "5");
  CHECK_EQ(machine.names(), "mlx5_0@3 mlx5_2@3 cxi0@5 eth0@0 ");
  CHECK((machine.nodes() == std::vector<int>{3, 5}));
}

TEST("an adapter whose node is not known gives none") {
  Machine machine;
  machine.interface("eth0", "up").on_node("net/eth0", "-1");
  machine.interface("eth1", "up").on_node("net/eth1", "near");
  CHECK_EQ(machine.names(), "eth0@-1 eth1@-1 ");
  CHECK(machine.nodes().empty());
}

TEST("this machine's own adapters can be read") {
  for (const hsgd::Nic& nic : hsgd::active_nics()) CHECK(!nic.name.empty() && nic.numa >= -1);
}
