// Slices of waits, and their errors.
#include "node/rendezvous/meeting_wait.hpp"

#include "core/base/error.hpp"

namespace hsgd {

void look_around(const Deadline& deadline) {
  if (deadline.interrupted()) throw_error(HSGD_ERR_INTERRUPTED, -1, "set-up: interrupted");
  deadline.check_watch();
}

void look_for_the_cause(const Deadline& deadline) {
  for (int look = 0; look < 10 && deadline.has_watch(); ++look) {
    deadline.check_watch();
    pause_ms(2);
  }
}

bool wait_readable(std::vector<pollfd>& sockets, const Deadline& deadline) {
  look_around(deadline);
  constexpr int64_t kLongestMs = 50;
  const int64_t left_ms = std::clamp<int64_t>(deadline.remaining_ns() / 1'000'000, 0, kLongestMs);
  const int ready = ::poll(sockets.data(), sockets.size(), static_cast<int>(left_ms));
  if (ready < 0 && errno != EINTR) fail_system("poll");
  return ready > 0;
}

bool wait_readable_until(std::vector<pollfd>& sockets, const Deadline& deadline) {
  for (;;) {
    if (wait_readable(sockets, deadline)) return true;
    if (deadline.passed()) return false;
  }
}

void fail_full(const std::string& name, int error, const Deadline& deadline) {
  throw_error(HSGD_ERR_TIMEOUT, -1, "set-up at %s: for %g s %s", name.c_str(), deadline.timeout_s(),
              error == ETOOMANYREFS
                  ? "this user's processes had more file descriptors in transit to one another "
                    "than ulimit -n allows; start fewer jobs at a time, or raise ulimit -n"
                  : "another rank did not read what it was sent; it is stopped, or busy "
                    "elsewhere");
}

}  // namespace hsgd
