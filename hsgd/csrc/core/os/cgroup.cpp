// Finds the folders of this process's cgroups, and reads limits from them.
#include "core/os/cgroup.hpp"

#include <algorithm>
#include <climits>
#include <sstream>

#include "core/os/kernel_file.hpp"

namespace hsgd {
namespace {

// A controller in /proc/self/cgroup; "" is version 2, which has one tree for all controllers.
struct Membership {
  bool found = false;
  std::string path;
};

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  std::istringstream file = contents_of(path);
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

bool has_word(const std::string& list, const std::string& word) {
  return ("," + list + ",").find("," + word + ",") != std::string::npos;
}

// Parses "4:cpu,cpuacct:/job/7", or for version 2 "0::/job/7".
Membership membership_in(const std::vector<std::string>& lines, const std::string& controller) {
  for (const std::string& line : lines) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_it = controller.empty() ? controllers.empty() : has_word(controllers, controller);
    if (is_it) return {true, line.substr(second + 1)};
  }
  return {};
}

// The kernel writes blanks and backslashes of paths as octal numbers.
std::string unescaped(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool escaped = text[i] == '\\' && i + 3 < text.size();
    const auto digit = [&](size_t which) { return text[i + which] - '0'; };
    plain += escaped ? static_cast<char>(digit(1) * 64 + digit(2) * 8 + digit(3)) : text[i];
    if (escaped) i += 3;
  }
  return plain;
}

// One line of /proc/self/mountinfo.
struct Mount {
  std::string top;    // the mounted cgroup
  std::string place;  // mount point
  std::string type;
  std::string options;  // of the file system: its controllers, for version 1
};

Mount mount_of(const std::string& line) {
  Mount mount;
  std::istringstream words(line);
  std::string skipped;
  words >> skipped >> skipped >> skipped >> mount.top >> mount.place;
  while (words >> skipped && skipped != "-") {
  }
  words >> mount.type >> skipped >> mount.options;
  mount.top = unescaped(mount.top);
  mount.place = unescaped(mount.place);
  return mount;
}

// Returns the folders from the process's own cgroup up to the mounted one. If a namespace hides the
// path, or something else is mounted, returns the mounted cgroup only.
std::vector<std::string> chain_of(const std::string& root, const Mount& mount,
                                  const Membership& membership) {
  const std::string top = mount.top == "/" ? "" : mount.top;
  const std::string& path = membership.path;
  const bool below = path.compare(0, top.size(), top) == 0 && path.find("/..") == std::string::npos;
  std::string rest = below ? path.substr(top.size()) : "";
  if (!rest.empty() && rest[0] != '/') rest.clear();  // another cgroup with the same prefix
  std::vector<std::string> chain;
  while (rest.size() > 1) {
    chain.push_back(root + mount.place + rest);
    rest.resize(rest.find_last_of('/'));
  }
  chain.push_back(root + mount.place);
  return chain;
}

uint64_t number_of(const std::string& path, const std::string& key) {
  std::istringstream file = contents_of(path);
  std::string name;
  for (uint64_t value = 0; file >> name >> value;) {
    if (name == key) return value;
  }
  return 0;
}

// Names of files, and of the page cache that the kernel can reclaim.
struct MemoryFiles {
  const char* limit;
  const char* used;
  const char* reclaimable;
};
constexpr MemoryFiles kOld = {"/memory.limit_in_bytes", "/memory.usage_in_bytes",
                              "total_inactive_file"};
constexpr MemoryFiles kNew = {"/memory.max", "/memory.current", "inactive_file"};

uint64_t limit_of(const std::string& folder, const MemoryFiles& files) {
  const uint64_t limit = number_in(folder + files.limit, UINT64_MAX);
  return limit >= uint64_t{1} << 62 ? UINT64_MAX : limit;  // version 1: this means no limit
}

uint64_t left_in(const std::string& folder, const MemoryFiles& files) {
  const uint64_t limit = limit_of(folder, files);
  if (limit == UINT64_MAX) return UINT64_MAX;
  uint64_t used = number_in(folder + files.used, 0);
  used -= std::min(used, number_of(folder + "/memory.stat", files.reclaimable));
  return limit - std::min(limit, used);
}

template <class Read>
uint64_t least(const std::vector<std::string>& chain, const MemoryFiles& files, const Read& read) {
  uint64_t least = UINT64_MAX;
  for (const std::string& folder : chain) least = std::min(least, read(folder, files));
  return least;
}

// Returns the whole cores of a quota in microseconds.
int cores_worth(int64_t quota, int64_t period) {
  if (quota <= 0 || period <= 0) return INT_MAX;
  return static_cast<int>(std::clamp<int64_t>(quota / period, 1, INT_MAX));
}

int old_cores_in(const std::string& folder) {
  std::istringstream quota_file = contents_of(folder + "/cpu.cfs_quota_us");
  std::istringstream period_file = contents_of(folder + "/cpu.cfs_period_us");
  int64_t quota = -1;
  int64_t period = 0;
  return quota_file >> quota && period_file >> period ? cores_worth(quota, period) : INT_MAX;
}

int new_cores_in(const std::string& folder) {
  std::istringstream file =
      contents_of(folder + "/cpu.max");  // "max 100000", or a quota in place of "max"
  int64_t quota = -1;
  int64_t period = 0;
  return file >> quota >> period ? cores_worth(quota, period) : INT_MAX;
}

// Cuts the chain: without use_hierarchy (optional before Linux 5.11) a limit does not apply below
// its cgroup.
void end_where_limits_end(std::vector<std::string>* chain) {
  for (size_t i = 1; i < chain->size(); ++i) {
    if (number_in((*chain)[i] + "/memory.use_hierarchy", 1) == 0) return chain->resize(i);
  }
}

}  // namespace

Cgroups::Cgroups(const std::string& root) {
  const std::vector<std::string> memberships = lines_of(root + "/proc/self/cgroup");
  for (const std::string& line : lines_of(root + "/proc/self/mountinfo")) {
    add_mount(root, line, memberships);
  }
  end_where_limits_end(&memory_v1_);
}

// A hierarchy may be mounted in several places: keeps the mount that shows most of the path up from
// this process's own cgroup.
void Cgroups::add_mount(const std::string& root, const std::string& line,
                        const std::vector<std::string>& memberships) {
  if (line.find("cgroup") == std::string::npos) return;
  const Mount mount = mount_of(line);
  const auto take = [&](const std::string& controller, Chain* chain) {
    const Membership membership = membership_in(memberships, controller);
    if (!membership.found) return;
    Chain found = chain_of(root, mount, membership);
    if (found.size() > chain->size()) *chain = std::move(found);
  };
  if (mount.type == "cgroup2") {
    take("", &memory_v2_);
    take("", &cpu_v2_);
  } else if (mount.type == "cgroup") {
    if (has_word(mount.options, "memory")) take("memory", &memory_v1_);
    if (has_word(mount.options, "cpu")) take("cpu", &cpu_v1_);
  }
}

uint64_t Cgroups::memory_left_bytes() const {
  return std::min(least(memory_v1_, kOld, left_in), least(memory_v2_, kNew, left_in));
}

uint64_t Cgroups::memory_limit_bytes() const {
  return std::min(least(memory_v1_, kOld, limit_of), least(memory_v2_, kNew, limit_of));
}

int Cgroups::cores() const {
  int cores = INT_MAX;
  for (const std::string& folder : cpu_v1_) cores = std::min(cores, old_cores_in(folder));
  for (const std::string& folder : cpu_v2_) cores = std::min(cores, new_cores_in(folder));
  return cores;
}

}  // namespace hsgd
