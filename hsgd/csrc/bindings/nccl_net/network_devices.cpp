// Lists interfaces and chooses among them.
#include "bindings/nccl_net/network_devices.hpp"

#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <memory>
#include <sstream>

#include "core/base/error.hpp"
#include "core/os/kernel_file.hpp"
#include "hsgd_core.h"
#include "network/tcp_common/address.hpp"

namespace hsgd::nccl_net {
namespace {

// Of adapters that do not know it, as in most virtual machines. NCCL assumes the same.
constexpr int kUnknownSpeedMbps = 10'000;
constexpr uint64_t kMostSpeedMbps = 10'000'000;
// Without a choice of the user, as in NCCL's own sockets: networks that end on this machine.
constexpr const char* kLocalNetworks = "^docker,lo";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> words;
  std::istringstream from(list);
  for (std::string word; std::getline(from, word, ',');) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

// Returns the names of all interfaces in the kernel's order.
std::vector<std::string> all_interfaces() {
  const std::unique_ptr<struct if_nameindex, decltype(&::if_freenameindex)> list(
      ::if_nameindex(), ::if_freenameindex);
  if (list == nullptr) fail_system("if_nameindex");
  std::vector<std::string> names;
  for (const auto* each = list.get(); each->if_name != nullptr; ++each) {
    names.emplace_back(each->if_name);
  }
  return names;
}

bool has_address(const std::string& name) {
  try {
    return find_addresses(name)[0].version != 0;
  } catch (const Error& error) {
    if (error.code() != HSGD_ERR_ARGUMENT) throw;
    return false;  // it is down, or has no address that others can use
  }
}

std::vector<std::string> with_addresses(std::vector<std::string> names) {
  names.erase(std::remove_if(names.begin(), names.end(),
                             [](const std::string& name) { return !has_address(name); }),
              names.end());
  return names;
}

std::vector<std::string> chosen_interfaces() {
  const std::vector<std::string> all = all_interfaces();
  const std::string of_nccl = variable("NCCL_SOCKET_IFNAME");
  if (!of_nccl.empty()) {
    std::vector<std::string> names = with_addresses(allowed_interfaces(all, of_nccl));
    if (names.empty()) {
      throw_invalid("NCCL_SOCKET_IFNAME=%s: no such interface is up with an address; there are: %s",
                    of_nccl.c_str(), listed(all).c_str());
    }
    return names;
  }
  const std::string of_hsgd = variable("HSGD_INTERFACES");
  if (!of_hsgd.empty() && of_hsgd != "all") {
    find_addresses(of_hsgd);  // throws for an unknown name
    return split(of_hsgd);
  }
  std::vector<std::string> names = with_addresses(allowed_interfaces(all, kLocalNetworks));
  if (names.empty()) names = with_addresses(all);
  if (names.empty()) {
    throw_error(HSGD_ERR_SYSTEM, -1, "no network interface is up with an address");
  }
  return names;
}

NetworkDevice device_of(const std::string& name) {
  const std::string folder = "/sys/class/net/" + name;
  const uint64_t speed = number_in(folder + "/speed", 0);
  const bool known = speed > 0 && speed <= kMostSpeedMbps;
  const std::unique_ptr<char, decltype(&std::free)> path(
      ::realpath((folder + "/device").c_str(), nullptr), std::free);
  return {name, path == nullptr ? "" : path.get(),
          known ? static_cast<int>(speed) : kUnknownSpeedMbps};
}

double timeout_from_environment() {
  hsgd_options options{};
  hsgd_error error{};
  if (hsgd_options_from_env(&options, &error) != HSGD_OK) throw_invalid("%s", error.message);
  return options.timeout_s;
}

}  // namespace

std::vector<std::string> allowed_interfaces(const std::vector<std::string>& all,
                                            const std::string& wanted) {
  size_t begin = 0;
  const auto takes = [&](char letter) {
    const bool there = begin < wanted.size() && wanted[begin] == letter;
    begin += there ? 1 : 0;
    return there;
  };
  const bool leaves_out = takes('^');
  const bool whole = takes('=');
  std::vector<std::string> words = split(wanted.substr(begin));
  for (std::string& word : words) word = word.substr(0, word.find(':'));
  std::vector<std::string> found;
  for (const std::string& name : all) {
    const bool is_named = std::any_of(words.begin(), words.end(), [&](const std::string& word) {
      return whole ? name == word : name.compare(0, word.size(), word) == 0;
    });
    if (is_named != leaves_out) found.push_back(name);
  }
  return found;
}

std::string PluginSettings::interfaces(size_t first) const {
  std::string names = devices[first].name;
  for (size_t i = 0; i < devices.size(); ++i) {
    if (i != first) names += "," + devices[i].name;
  }
  return names;
}

PluginSettings read_settings() {
  PluginSettings settings{{}, variable("HSGD_PORTS"), timeout_from_environment()};
  if (settings.ports == "any") settings.ports.clear();
  for (const std::string& name : chosen_interfaces()) settings.devices.push_back(device_of(name));
  return settings;
}

}  // namespace hsgd::nccl_net
