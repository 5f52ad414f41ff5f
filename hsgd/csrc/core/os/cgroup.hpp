// Cgroups: reads the limits of this process's cgroups on memory and processor time.
//
// Finds version 1, version 2 and both together, mounted anywhere, in a container or not. Any cgroup
// from the process's own up to the top of the mount may have a limit; the lowest limit holds.
// Source: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of Linux.
#ifndef HSGD_CORE_OS_CGROUP_HPP_
#define HSGD_CORE_OS_CGROUP_HPP_

#include <cstdint>
#include <string>
#include <vector>

namespace hsgd {

class Cgroups {
 public:
  // `root`: prefix of the paths of /proc and of mounts; tests use folders of their own.
  explicit Cgroups(const std::string& root = "");
  uint64_t memory_left_bytes() const;   // UINT64_MAX: no limit
  uint64_t memory_limit_bytes() const;  // UINT64_MAX: no limit
  int cores() const;                    // cores of the quota, at least 1; INT_MAX: no limit

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
