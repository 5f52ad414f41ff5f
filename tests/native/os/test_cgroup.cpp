// Limits of cgroups, in trees of files that look like those of other machines.
#include <array>
#include <climits>

#include "core/os/cgroup.hpp"
#include "core/os/cpu_budget.hpp"
#include "core/os/shared_memory.hpp"
#include "support/check.hpp"
#include "support/fake_root.hpp"

namespace {

constexpr uint64_t kMega = 1 << 20;
constexpr const char* kNone = "9223372036854771712";  // how version 1 says that there is no limit

class Machine {
 public:
  Machine& write(const std::string& path, const std::string& text) {
    root_.write(path, text + "\n");
    return *this;
  }
  // `mounts`: the part of a line of mountinfo that counts: top, place, type, options.
  Machine& live(const std::string& memberships,
                const std::vector<std::array<const char*, 4>>& mounts) {
    write("/proc/self/cgroup", memberships);
    std::string lines = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw\n";
    for (const auto& [top, place, type, options] : mounts) {
      lines += std::string("35 31 0:32 ") + top + " " + place + " rw,nosuid shared:9 master:3 - " +
               type + " cgroup " + options + "\n";
    }
    return write("/proc/self/mountinfo", lines);
  }
  Machine& old_memory(const std::string& folder, const std::string& limit, uint64_t used,
                      uint64_t cache = 0) {
    const std::string place = "/sys/fs/cgroup/memory" + folder;
    write(place + "/memory.limit_in_bytes", limit);
    write(place + "/memory.usage_in_bytes", std::to_string(used));
    return write(place + "/memory.stat",
                 "cache 1\ninactive_file 7\ntotal_inactive_file " + std::to_string(cache));
  }
  Machine& new_memory(const std::string& folder, const std::string& limit, uint64_t used) {
    write("/sys/fs/cgroup" + folder + "/memory.max", limit);
    return write("/sys/fs/cgroup" + folder + "/memory.current", std::to_string(used));
  }
  hsgd::Cgroups cgroups() const { return hsgd::Cgroups(root()); }
  const std::string& root() const { return root_.path(); }

 private:
  FakeRoot root_;
};

std::string mega(uint64_t count) { return std::to_string(count * kMega); }

constexpr std::array<const char*, 4> kOldMemory = {"/", "/sys/fs/cgroup/memory", "cgroup",
                                                   "rw,memory"};
constexpr std::array<const char*, 4> kOldCpu = {"/", "/sys/fs/cgroup/cpu,cpuacct", "cgroup",
                                                "rw,cpu,cpuacct"};
constexpr std::array<const char*, 4> kNew = {"/", "/sys/fs/cgroup", "cgroup2", "rw,nsdelegate"};

}  // namespace

TEST("a machine without cgroups, or without /proc, has no limits") {
  Machine machine;
  CHECK_EQ(machine.cgroups().memory_left_bytes(), UINT64_MAX);
  CHECK_EQ(machine.cgroups().cores(), INT_MAX);
  machine.live("0::/", {kNew});
  CHECK_EQ(machine.cgroups().memory_left_bytes(), UINT64_MAX);
  CHECK_EQ(machine.cgroups().cores(), INT_MAX);
}

TEST("the limit of the job's own cgroup of version 1 counts, and page cache does not") {
  Machine machine;
  machine.live("5:memory:/slurm/uid_7/job_3\n0::/", {kOldMemory});
  machine.old_memory("", kNone, 900 * kMega).old_memory("/slurm", kNone, 800 * kMega);
  machine.old_memory("/slurm/uid_7", kNone, 700 * kMega);
  machine.old_memory("/slurm/uid_7/job_3", mega(100), 60 * kMega, 10 * kMega);
  CHECK_EQ(machine.cgroups().memory_left_bytes(), 50 * kMega);
  CHECK_EQ(machine.cgroups().memory_limit_bytes(), 100 * kMega);
  machine.write("/proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 40960 kB");
  CHECK_EQ(hsgd::available_memory_bytes(machine.root()), 40 * kMega);
}

TEST("the tightest limit on the way up counts, in version 1 and version 2") {
  Machine machine;
  machine.live("5:memory:/a/b\n0::/c/d", {kOldMemory, kNew});
  machine.old_memory("/a", mega(90), 80 * kMega).old_memory("/a/b", mega(50), 0);
  CHECK_EQ(machine.cgroups().memory_left_bytes(), 10 * kMega);
  machine.new_memory("/c/d", "max", 0).new_memory("/c", mega(64), 60 * kMega);
  CHECK_EQ(machine.cgroups().memory_left_bytes(), 4 * kMega);
  machine.new_memory("/c/d", mega(3), 4 * kMega);  // it was lowered below what is used
  CHECK_EQ(machine.cgroups().memory_left_bytes(), 0U);
}

TEST("a cgroup of version 1 without use_hierarchy leaves those below alone") {
  Machine machine;
  machine.live("5:memory:/a/b", {kOldMemory});
  machine.old_memory("/a", mega(90), 90 * kMega).old_memory("/a/b", mega(50), 0);
  machine.write("/sys/fs/cgroup/memory/a/memory.use_hierarchy", "0");
  CHECK_EQ(machine.cgroups().memory_left_bytes(), 50 * kMega);
}

TEST("in a container that sees the path of the host, the mounted cgroup is its own") {
  Machine machine;
  machine.live("5:memory:/docker/f00/job",
               {{"/docker/f00", "/sys/fs/cgroup/memory", "cgroup", "memory"}});
  machine.old_memory("", mega(70), 0).old_memory("/job", mega(80), 0);
  CHECK_EQ(machine.cgroups().memory_left_bytes(), 70 * kMega);
  machine.old_memory("/job", mega(60), 0);
  CHECK_EQ(machine.cgroups().memory_left_bytes(), 60 * kMega);
}

TEST("where a namespace hides the path, the mounted cgroup counts") {
  Machine machine;
  machine.live("0::/../../elsewhere", {kNew}).new_memory("", mega(30), 0);
  CHECK_EQ(machine.cgroups().memory_left_bytes(), 30 * kMega);
  machine.live("0::/docker/f00", {{"/docker/f0", "/sys/fs/cgroup", "cgroup2", "rw"}});
  CHECK_EQ(machine.cgroups().memory_left_bytes(), 30 * kMega);
}

TEST("cgroups that are mounted elsewhere, with blanks in the name, and twice are found") {
  Machine machine;
  machine.live("0::/job",
               {{"/other", "/mnt/other", "cgroup2", "rw"}, {"/", "/mnt/c\\040g", "cgroup2", "rw"}});
  machine.write("/mnt/other/memory.max", "1").write("/mnt/c g/job/memory.max", mega(20));
  CHECK_EQ(machine.cgroups().memory_left_bytes(), 20 * kMega);
}

TEST("the quota of processor time is the tightest on the way up, at least one core") {
  Machine machine;
  machine.live("3:cpu,cpuacct:/job/step\n0::/", {kOldCpu});
  const std::string cpu = "/sys/fs/cgroup/cpu,cpuacct";
  machine.write(cpu + "/job/step/cpu.cfs_quota_us", "-1");
  machine.write(cpu + "/job/step/cpu.cfs_period_us", "100000");
  CHECK_EQ(machine.cgroups().cores(), INT_MAX);
  machine.write(cpu + "/job/cpu.cfs_quota_us", "350000");
  machine.write(cpu + "/job/cpu.cfs_period_us", "100000");
  CHECK_EQ(machine.cgroups().cores(), 3);
  machine.live("0::/pod/box", {kNew}).write("/sys/fs/cgroup/pod/cpu.max", "250000 100000");
  machine.write("/sys/fs/cgroup/pod/box/cpu.max", "max 100000");
  CHECK_EQ(machine.cgroups().cores(), 2);
  machine.write("/sys/fs/cgroup/pod/box/cpu.max", "5000 100000");
  CHECK_EQ(machine.cgroups().cores(), 1);
}

TEST("this machine's own limits can be read") {
  CHECK(hsgd::available_memory_bytes() > kMega);
  CHECK(hsgd::Cgroups().cores() >= 1);
  CHECK(hsgd::count_cores(hsgd::own_cores()) >= 1);
}
