// NetworkDevice: a network interface as NCCL sees it; PluginSettings: which ones, and how long
// waits may take.
//
// Reads the variables of NCCL and hsgd that concern the plugin: no Python runs here that would
// pass them on. NCCL_SOCKET_IFNAME has precedence over HSGD_INTERFACES.
#ifndef HSGD_BINDINGS_NCCL_NET_NETWORK_DEVICES_HPP_
#define HSGD_BINDINGS_NCCL_NET_NETWORK_DEVICES_HPP_

#include <string>
#include <vector>

namespace hsgd::nccl_net {

struct NetworkDevice {
  std::string name;
  std::string pci_path;  // ""; none, or not known
  int speed_mbps;
};

struct PluginSettings {
  std::vector<NetworkDevice> devices;  // at least one
  std::string ports;                   // "21000-21999"; "": any
  double timeout_s;

  // Returns the interfaces of all devices in the form of find_addresses(), `first` first.
  std::string interfaces(size_t first = 0) const;
};

// Throws HSGD_ERR_ARGUMENT for a variable with a wrong value, HSGD_ERR_SYSTEM without a network.
PluginSettings read_settings();

// Returns the names in `all` that NCCL_SOCKET_IFNAME=`wanted` allows, in their order: prefixes with
// commas; after "=", whole names; after "^", those to leave out. Ports behind names are ignored.
std::vector<std::string> allowed_interfaces(const std::vector<std::string>& all,
                                            const std::string& wanted);

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_NETWORK_DEVICES_HPP_
