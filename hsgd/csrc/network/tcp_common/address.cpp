// Lists interfaces and compares addresses bit by bit.
#include "network/tcp_common/address.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <sstream>

#include "core/base/error.hpp"

namespace hsgd {
namespace {

using Interfaces = std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)>;

size_t bytes_of(const IpAddress& address) { return address.version == 4 ? 4 : 16; }

// Returns the host part of a socket address; nullptr for other families.
const uint8_t* host_in(const sockaddr* address) {
  if (address == nullptr) return nullptr;
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return reinterpret_cast<const uint8_t*>(&v4->sin_addr);
  }
  if (address->sa_family != AF_INET6) return nullptr;
  return reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr.s6_addr;
}

// Returns the address of an interface; version 0: not usable.
IpAddress address_of(const ifaddrs& interface) {
  IpAddress found{};
  const uint8_t* host = host_in(interface.ifa_addr);
  const uint8_t* mask = host_in(interface.ifa_netmask);
  if (host == nullptr || mask == nullptr || (interface.ifa_flags & IFF_UP) == 0) return found;
  found.version = interface.ifa_addr->sa_family == AF_INET ? 4 : 6;
  std::copy_n(host, bytes_of(found), found.host.begin());
  for (size_t i = 0; i < bytes_of(found); ++i) {
    found.network_bits += static_cast<uint8_t>(__builtin_popcount(mask[i]));
  }
  const bool one_link = found.version == 6 && host[0] == 0xfe && (host[1] & 0xc0) == 0x80;
  const bool unset = std::all_of(host, host + bytes_of(found), [](uint8_t b) { return b == 0; });
  return one_link || unset ? IpAddress{} : found;
}

class AddressList {
 public:
  void add(const IpAddress& address) {
    const auto end = found_.begin() + static_cast<std::ptrdiff_t>(count_);
    const bool twice = std::any_of(
        found_.begin(), end, [&](const IpAddress& one) { return is_same_host(one, address); });
    if (address.version != 0 && !twice && count_ < found_.size()) found_[count_++] = address;
  }
  bool empty() const { return count_ == 0; }
  const IpAddresses& all() const { return found_; }

 private:
  IpAddresses found_{};
  size_t count_ = 0;
};

// Visits IPv4 addresses first: the kernel lists them first.
template <class Take>
void for_each(const Interfaces& interfaces, Take&& take) {
  for (const ifaddrs* each = interfaces.get(); each != nullptr; each = each->ifa_next) {
    const IpAddress address = address_of(*each);
    if (address.version != 0) take(*each, address);
  }
}

[[noreturn]] void fail_unknown(const Interfaces& interfaces, const std::string& name) {
  std::vector<std::string> names;
  for_each(interfaces, [&](const ifaddrs& each, const IpAddress&) {
    if (std::find(names.begin(), names.end(), each.ifa_name) == names.end())
      names.emplace_back(each.ifa_name);
  });
  std::string there;
  for (const std::string& one : names) there += (there.empty() ? "" : ", ") + one;
  throw_invalid(
      "HSGD_INTERFACES: no interface \"%s\" is up with an address on this host; it has: %s",
      name.c_str(), there.c_str());
}

bool shares_network(const IpAddress& own, const IpAddress& other) {
  if (own.version != other.version || own.version == 0) return false;
  for (size_t bit = 0; bit < own.network_bits; ++bit) {
    const auto mask = static_cast<uint8_t>(0x80 >> bit % 8);
    if (((own.host[bit / 8] ^ other.host[bit / 8]) & mask) != 0) return false;
  }
  return true;
}

}  // namespace

bool is_same_host(const IpAddress& one, const IpAddress& other) {
  return one.version == other.version && one.host == other.host;
}

int family_of(const IpAddress& address) { return address.version == 6 ? AF_INET6 : AF_INET; }

std::string words_of(const IpAddress& address) {
  char words[INET6_ADDRSTRLEN] = "?";
  ::inet_ntop(family_of(address), address.host.data(), words, sizeof words);
  return words;
}

std::string listed(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& one : words) line += (line.empty() || one.empty() ? "" : ", ") + one;
  return line;
}

IpAddresses find_addresses(const std::string& interfaces) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) fail_system("getifaddrs");
  const Interfaces owner(all, ::freeifaddrs);
  AddressList found;
  std::istringstream names(interfaces);
  for (std::string name; std::getline(names, name, ',');) {
    bool known = false;
    for_each(owner, [&](const ifaddrs& each, const IpAddress& address) {
      if (name != each.ifa_name) return;
      known = true;
      found.add(address);
    });
    if (!known) fail_unknown(owner, name);
  }
  if (!interfaces.empty()) return found.all();
  for (const bool loopback : {false, true}) {
    if (loopback && !found.empty()) break;
    for_each(owner, [&](const ifaddrs& each, const IpAddress& address) {
      if (((each.ifa_flags & IFF_LOOPBACK) != 0) == loopback) found.add(address);
    });
  }
  return found.all();
}

std::vector<IpAddress> routes(const IpAddresses& from, const IpAddresses& to) {
  std::vector<IpAddress> near;
  std::vector<IpAddress> far;
  std::vector<IpAddress> of_both;
  for (const IpAddress& other : to) {
    const auto any_of_ours = [&](auto&& holds) {
      return std::any_of(from.begin(), from.end(), holds);
    };
    const auto shares = [&](const IpAddress& own) { return shares_network(own, other); };
    const auto has_protocol = [&](const IpAddress& own) { return own.version == other.version; };
    if (other.version == 0 || !any_of_ours(has_protocol)) continue;
    const bool is_ours =
        any_of_ours([&](const IpAddress& own) { return is_same_host(own, other); });
    (is_ours ? of_both : any_of_ours(shares) ? near : far).push_back(other);
  }
  near.insert(near.end(), far.begin(), far.end());
  near.insert(near.end(), of_both.begin(), of_both.end());
  if (near.empty()) near.push_back(to.front());
  return near;
}

SocketAddress socket_address(const IpAddress& address, uint32_t port) {
  SocketAddress made{};
  if (address.version == 6) {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = static_cast<in_port_t>(port);
    std::memcpy(&v6.sin6_addr, address.host.data(), sizeof v6.sin6_addr);
    std::memcpy(&made.storage, &v6, sizeof v6);
    made.bytes = sizeof v6;
  } else {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = static_cast<in_port_t>(port);
    std::memcpy(&v4.sin_addr, address.host.data(), sizeof v4.sin_addr);
    std::memcpy(&made.storage, &v4, sizeof v4);
    made.bytes = sizeof v4;
  }
  return made;
}

}  // namespace hsgd
