// Chooses the host and the guests, and checks that there are enough descriptors.
#include "node/rendezvous/bootstrap.hpp"

#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "node/rendezvous/meeting_guest.hpp"
#include "node/rendezvous/meeting_host.hpp"

namespace hsgd {
namespace {

struct Descriptors {
  std::vector<int> held;
  ~Descriptors() {
    for (const int fd : held) ::close(fd);
  }
};

// Doubles this process's soft limit, up to the hard one: the soft one is 1024 on many systems.
// Returns false if it cannot be raised.
bool raise_soft_limit() {
  rlimit limit{};
  if (errno != EMFILE || ::getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
  if (limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = std::min(2 * limit.rlim_cur, limit.rlim_max);
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

constexpr size_t kForOthers = 32;

// Returns how many descriptors are free, at most `wanted`. Raises the soft limit for them.
size_t free_descriptors(size_t wanted) {
  Descriptors free;
  while (free.held.size() < wanted) {
    const int fd = ::eventfd(0, EFD_CLOEXEC);
    if (fd >= 0) {
      free.held.push_back(fd);
    } else if (!raise_soft_limit()) {
      break;
    }
  }
  return free.held.size();
}

}  // namespace

void check_descriptors(size_t wanted) {
  wanted += kForOthers;
  const size_t left = free_descriptors(wanted);
  if (left < wanted) {
    throw_error(HSGD_ERR_SYSTEM, -1,
                "set-up: %zu file descriptors are needed and %zu are left; free unused "
                "communicators, or raise the limit (ulimit -n)",
                wanted, left);
  }
}

std::vector<Member> meet(const std::string& path, Listener* listener, int rank,
                         const std::vector<int>& names, Member self, const MeetingFile& file,
                         const Deadline& deadline) {
  self.name = names[static_cast<size_t>(rank)];
  free_descriptors(kDescriptorsPerRank * names.size() + kForOthers);
  if (rank != 0) return join_meeting(path, rank, names, std::move(self), file, deadline);
  const Fd made = self.make(file);
  if (names.size() == 1) {
    if (self.failed != HSGD_OK) throw Error(self.failed, self.name, self.failure);
    std::vector<Member> alone;
    alone.push_back(std::move(self));
    return alone;
  }
  if (listener != nullptr)
    return host_meeting(path, *listener, names, std::move(self), made, deadline);
  Listener own(path);
  HSGD_FAULT_POINT("set-up: door open");
  return host_meeting(path, own, names, std::move(self), made, deadline);
}

}  // namespace hsgd
