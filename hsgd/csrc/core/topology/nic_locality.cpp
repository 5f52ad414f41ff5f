// Reads the adapters in the folders of their classes.
#include "core/topology/nic_locality.hpp"

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "core/os/cpu_budget.hpp"
#include "core/os/kernel_file.hpp"
#include "core/topology/cpu_topology.hpp"

namespace hsgd {
namespace {

std::string word_in(const std::string& path) {
  std::istringstream file = contents_of(path);
  std::string word;
  file >> word;
  return word;
}

int numa_of_device(const std::string& folder) {
  std::istringstream file = contents_of(folder + "/device/numa_node");
  int numa = -1;
  return file >> numa && numa >= 0 ? numa : -1;
}

// Returns true if a port's state is "4: ACTIVE".
bool has_active_port(const std::string& folder) {
  for (const std::string& port : names_in(folder + "/ports")) {
    const std::string state = contents_of(folder + "/ports/" + port + "/state").str();
    if (state.find("ACTIVE") != std::string::npos) return true;
  }
  return false;
}

// Returns false for bridges, bonds and the like, which have no device. Some drivers do not report a
// carrier.
bool is_physical_and_up(const std::string& folder) {
  std::error_code error;
  const std::string state = word_in(folder + "/operstate");
  return std::filesystem::exists(folder + "/device", error) &&
         (state == "up" || state == "unknown");
}

template <class IsActive>
void add_class(const std::string& folder, bool rdma, const IsActive& is_active,
               std::vector<Nic>* nics) {
  for (const std::string& name : names_in(folder)) {
    const std::string adapter = folder + "/" + name;
    if (is_active(adapter)) nics->push_back({name, numa_of_device(adapter), rdma});
  }
}

}  // namespace

std::vector<Nic> active_nics(const std::string& root) {
  const std::string classes = root + "/sys/class";
  std::vector<Nic> nics;
  add_class(classes + "/infiniband", true, has_active_port, &nics);
  add_class(classes + "/cxi", true, [](const std::string&) { return true; }, &nics);
  add_class(classes + "/net", false, is_physical_and_up, &nics);
  return nics;
}

std::vector<int> nic_numa_nodes(const std::vector<Nic>& nics) {
  const bool rdma = std::any_of(nics.begin(), nics.end(), [](const Nic& nic) { return nic.rdma; });
  std::vector<int> nodes;
  for (const Nic& nic : nics) {
    const bool seen = std::find(nodes.begin(), nodes.end(), nic.numa) != nodes.end();
    if (nic.rdma == rdma && nic.numa >= 0 && !seen) nodes.push_back(nic.numa);
  }
  return nodes;
}

int nic_of_process(const std::string& root) {
  const std::vector<int> nodes = nic_numa_nodes(active_nics(root));
  if (nodes.empty()) return 0;
  const auto found = std::find(nodes.begin(), nodes.end(), place_of(own_cores(), root).numa);
  return found == nodes.end() ? 0 : static_cast<int>(found - nodes.begin()) + 1;
}

}  // namespace hsgd
