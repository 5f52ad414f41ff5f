// The limits that the cgroups of this process set on memory and on processor time.
//
// Owns where these are found: version 1, version 2 and both beside one another, mounted anywhere,
// in a container or not. Any cgroup from the process's own up to the top of what is mounted may
// carry a limit; the tightest one holds. Never changes anything.
// Source: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of Linux.
#ifndef HSGD_CORE_OS_CGROUP_HPP_
#define HSGD_CORE_OS_CGROUP_HPP_

#include <cstdint>
#include <string>
#include <vector>

namespace hsgd {

class Cgroups {
 public:
  // `root`: what the paths of /proc and of mounts begin with; tests have folders of their own.
  explicit Cgroups(const std::string& root = "");
  uint64_t memory_left_bytes() const;   // UINT64_MAX: without limit
  uint64_t memory_limit_bytes() const;  // the same
  int cores() const;                    // that the quota is worth, at least 1; INT_MAX: no limit

 private:
  // The folders of one controller, from the process's own cgroup upwards.
  using Chain = std::vector<std::string>;
  void add_mount(const std::string& root, const std::string& line,
                 const std::vector<std::string>& memberships);

  Chain memory_v1_;
  Chain memory_v2_;
  Chain cpu_v1_;
  Chain cpu_v2_;
};

}  // namespace hsgd

#endif  // HSGD_CORE_OS_CGROUP_HPP_
