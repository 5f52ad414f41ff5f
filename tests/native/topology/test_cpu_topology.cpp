// Which cache, NUMA node and package a process is bound to, in trees of files that look like those
// of other machines.
#include <vector>

#include "core/os/cpu_budget.hpp"
#include "core/topology/cpu_topology.hpp"
#include "support/check.hpp"
#include "support/fake_root.hpp"

using hsgd::CpuPlace;

namespace hsgd {
std::ostream& operator<<(std::ostream& out, const CpuPlace& place) {
  return out << "{" << place.cache << ", " << place.numa << ", " << place.package << "}";
}
}  // namespace hsgd

namespace {

std::string span(int first, int count) {
  return std::to_string(first) + "-" + std::to_string(first + count - 1);
}

// Numbers of processors, package by package, in each node by node, in each cache by cache.
struct Shape {
  int packages;
  int nodes;   // per package
  int caches;  // last-level ones, per node; 0: one per package, which its nodes share
  int cpus;    // per package
};

class Machine {
 public:
  Machine() = default;
  explicit Machine(const Shape& shape) {
    for (int cpu = 0; cpu < shape.packages * shape.cpus; ++cpu) add_cpu(shape, cpu);
    const int per_node = shape.cpus / shape.nodes;
    for (int node = 0; node < shape.packages * shape.nodes; ++node) {
      write("/node/node" + std::to_string(node) + "/cpulist", span(node * per_node, per_node));
    }
    write("/cpu/online", span(0, shape.packages * shape.cpus));
  }

  Machine& write(const std::string& path, const std::string& text) {
    root_.write("/sys/devices/system" + path, text + "\n");
    return *this;
  }
  Machine& write_cache(int cpu, int index, const std::vector<std::string>& level_type_list) {
    const char* const files[] = {"level", "type", "shared_cpu_list"};
    for (size_t i = 0; i < level_type_list.size(); ++i) {
      write(cpu_folder(cpu) + "/cache/index" + std::to_string(index) + "/" + files[i],
            level_type_list[i]);
    }
    return *this;
  }
  Machine& remove(const std::string& path) {
    root_.remove("/sys/devices/system" + path);
    return *this;
  }
  CpuPlace place(int first, int count = 1) const {
    std::vector<int> cpus;
    for (int cpu = first; cpu < first + count; ++cpu) cpus.push_back(cpu);
    return place(cpus);
  }
  CpuPlace place(const std::vector<int>& cpus) const {
    hsgd::Cores cores{};
    for (const int cpu : cpus) cores.affinity[cpu / 64] |= uint64_t{1} << cpu % 64;
    return hsgd::place_of(cores, root_.path());
  }
  int nodes() const { return hsgd::numa_nodes_with_cpus(root_.path()); }

 private:
  static std::string cpu_folder(int cpu) { return "/cpu/cpu" + std::to_string(cpu); }

  void add_cpu(const Shape& shape, int cpu) {
    const std::string own = std::to_string(cpu);
    const int sharing = shape.caches == 0 ? shape.cpus : shape.cpus / (shape.nodes * shape.caches);
    write_cache(cpu, 0, {"1", "Data", own}).write_cache(cpu, 1, {"1", "Instruction", own});
    write_cache(cpu, 2, {"2", "Unified", own});
    write_cache(cpu, 3, {"3", "Unified", span(cpu / sharing * sharing, sharing)});
    write(cpu_folder(cpu) + "/topology/package_cpus_list",
          span(cpu / shape.cpus * shape.cpus, shape.cpus));
  }

  FakeRoot root_;
};

CpuPlace at(int cache, int numa, int package) { return {cache, numa, package}; }

}  // namespace

TEST("with two sockets a core lies in a cache, a node and a package, and all cores in none") {
  const Machine machine({2, 1, 1, 20});
  CHECK_EQ(machine.place(0), at(0, 0, 0));
  CHECK_EQ(machine.place(39), at(20, 1, 20));
  CHECK_EQ(machine.place(20, 20), at(20, 1, 20));
  CHECK_EQ(machine.place(0, 40), at(-1, -1, -1));
  CHECK_EQ(machine.place(19, 2), at(-1, -1, -1));
}

TEST("threads of a core whose numbers lie apart belong to the same domains") {
  Machine machine;
  for (int cpu = 0; cpu < 8; ++cpu) {  // 2 packages of 2 cores, 2 threads each
    const std::string list = cpu % 4 < 2 ? "0-1,4-5" : "2-3,6-7";
    machine.write_cache(cpu, 0, {"3", "Unified", list});
    machine.write("/cpu/cpu" + std::to_string(cpu) + "/topology/core_siblings_list", list);
  }
  machine.write("/node/node0/cpulist", "0-1,4-5").write("/node/node1/cpulist", "2-3,6-7");
  CHECK_EQ(machine.place({3, 7}), at(2, 1, 2));
  CHECK_EQ(machine.place({1, 4, 5}), at(0, 0, 0));
  CHECK_EQ(machine.place({0, 4, 6}), at(-1, -1, -1));
}

TEST("sub-NUMA clusters share a cache, and a process bound to a socket spans them") {
  const Machine machine({2, 4, 0, 32});
  CHECK_EQ(machine.place(8), at(0, 1, 0));
  CHECK_EQ(machine.place(63), at(32, 7, 32));
  CHECK_EQ(machine.place(32, 32), at(32, -1, 32));
}

TEST("EPYC with 4 nodes per socket has caches of 8 cores within nodes") {
  const Machine machine({2, 4, 2, 64});
  CHECK_EQ(machine.place(71), at(64, 4, 64));
  CHECK_EQ(machine.place(72, 8), at(72, 4, 64));
  CHECK_EQ(machine.place(64, 16), at(-1, 4, 64));
  CHECK_EQ(machine.place(64, 64), at(-1, -1, 64));
}

TEST("cpusets that cross a border are bound to what holds them whole") {
  const Machine machine({2, 2, 2, 32});
  CHECK_EQ(machine.place({0, 3, 7}), at(0, 0, 0));
  CHECK_EQ(machine.place({7, 8}), at(-1, 0, 0));
  CHECK_EQ(machine.place({15, 16, 17}), at(-1, -1, 0));
}

TEST("without the folder of caches the node and the package are known") {
  Machine machine({2, 1, 1, 4});
  for (int cpu = 0; cpu < 8; ++cpu) machine.remove("/cpu/cpu" + std::to_string(cpu) + "/cache");
  CHECK_EQ(machine.place(5), at(-1, 1, 4));
  CHECK_EQ(machine.place(4, 4), at(-1, 1, 4));
}

TEST("a kernel without NUMA has one node, and a machine without /sys is one node and package") {
  Machine machine({2, 1, 1, 4});
  machine.remove("/node");
  CHECK_EQ(machine.place(5), at(4, 0, 4));
  CHECK_EQ(machine.place(0, 8), at(-1, 0, -1));
  CHECK_EQ(Machine().place(5), at(-1, 0, 0));
  CHECK_EQ(Machine().place(0, 128), at(-1, 0, 0));
}

TEST("nodes of memory alone hold nobody") {
  Machine machine({1, 2, 1, 8});
  machine.write("/node/node2/cpulist", "").write("/node/node10/cpulist", "");
  CHECK_EQ(machine.place(4), at(4, 1, 0));
  CHECK_EQ(machine.place(0, 8), at(-1, -1, 0));
}

TEST("processors that are offline do not count") {
  Machine machine({2, 1, 1, 4});
  machine.write("/cpu/online", "1-3,5").remove("/cpu/cpu0/cache").remove("/cpu/cpu0/topology");
  machine.write("/node/node0/cpulist", "1-3").write("/node/node1/cpulist", "5");
  for (int cpu = 1; cpu < 4; ++cpu) machine.write_cache(cpu, 3, {"3", "Unified", "1-3"});
  CHECK_EQ(machine.place({0, 2, 3, 4}), at(1, 0, 0));
  CHECK_EQ(machine.place({4, 5, 6}), at(4, 1, 4));
}

TEST("a processor that no file describes is bound to no cache") {
  const Machine machine({1, 1, 1, 4});
  CHECK_EQ(machine.place(700), at(-1, -1, 0));
  CHECK_EQ(machine.place(std::vector<int>{}), at(-1, -1, -1));
}

TEST("a cache of instructions is not the last level") {
  Machine machine;
  machine.write_cache(0, 0, {"1", "Data", "0-1"}).write_cache(0, 1, {"2", "Instruction", "0"});
  CHECK_EQ(machine.place(0, 2).cache, 0);
}

TEST("a cache whose files are no numbers is passed over for the next level") {
  for (const char* list : {"", "all", "0-", "0,", "3-1", "-2", "0;1", "1", "0x3", "0 1",
                           "99999999999999999999", "0-99999999999999999999"}) {
    Machine machine({1, 1, 1, 2});
    machine.write_cache(0, 3, {"3", "Unified", list});
    CHECK_EQ(machine.place(0), at(0, 0, 0));
    CHECK_EQ(machine.place(0, 2).cache, -1);  // the next level belongs to processor 0 alone
  }
  Machine machine({1, 1, 1, 2});
  machine.write_cache(0, 3, {"high"});
  CHECK_EQ(machine.place(0, 2).cache, -1);
}

TEST("nodes and packages whose files are no lists are not there") {
  Machine machine({2, 1, 1, 2});
  machine.write("/node/node0/cpulist", "\xff\x01").write("/node/nodes/cpulist", "0-3");
  machine.write("/node/node99999999999/cpulist", "0-3").write("/node/node/cpulist", "0-3");
  machine.write("/cpu/cpu0/topology/package_cpus_list", "none").write("/cpu/online", "?");
  CHECK_EQ(machine.place(0), at(0, -1, 0));
  CHECK_EQ(machine.place(2), at(2, 1, 2));
}

TEST("processors beyond those that Cores holds are left out") {
  Machine machine;
  machine.write_cache(1023, 0, {"3", "Unified", "1016-1031,4000000000"});
  machine.write("/cpu/cpu1023/topology/package_cpus_list", "512-2047");
  machine.write("/node/node0/cpulist", "0-511").write("/node/node1/cpulist", "512-1535");
  machine.write("/node/node2/cpulist", "1536-2047");
  CHECK_EQ(machine.place(1023), at(1016, 1, 512));
}

TEST("this process has a place on this machine") {
  const CpuPlace place = hsgd::place_of(hsgd::own_cores());
  CHECK(place.cache >= -1 && place.numa >= -1 && place.package >= -1);
}

TEST("nodes with processors are counted; where none is known the machine is one") {
  Machine machine;
  CHECK_EQ(machine.nodes(), 1);
  CHECK_EQ(machine.write("/node/has_cpu", "0").nodes(), 1);
  CHECK_EQ(machine.write("/node/has_cpu", "0-3,8").nodes(), 5);
  CHECK_EQ(machine.write("/node/has_cpu", "").nodes(), 1);
  CHECK_EQ(machine.write("/node/has_cpu", "all of them").nodes(), 1);
}
