// Chooses the host and the guests, and checks that there are enough descriptors.
#include "node/rendezvous/bootstrap.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

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

}  // namespace

void check_descriptors(size_t wanted) {
  constexpr size_t kForOthers = 32;
  wanted += kForOthers;
  Descriptors free;
  while (free.held.size() < wanted) {
    const int fd = ::eventfd(0, EFD_CLOEXEC);
    if (fd < 0) {
      throw_error(HSGD_ERR_SYSTEM, -1,
                  "set-up: %zu file descriptors are needed and %zu are left; free unused "
                  "communicators, or raise the limit (ulimit -n)",
                  wanted, free.held.size());
    }
    free.held.push_back(fd);
  }
}

std::vector<Member> meet(const std::string& path, Listener* listener, int rank,
                         const std::vector<int>& names, Member self, const MeetingFile& file,
                         const Deadline& deadline) {
  self.name = names[static_cast<size_t>(rank)];
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
