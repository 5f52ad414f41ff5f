// Waits of ranks that meet: none has no deadline, and each ends when the deadline's watch says so.
//
// Owns the slices in which they wait, and what is said when nothing can be sent. Never reads
// a message.
#ifndef HSGD_NODE_RENDEZVOUS_MEETING_WAIT_HPP_
#define HSGD_NODE_RENDEZVOUS_MEETING_WAIT_HPP_

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include "core/os/wait.hpp"
#include "node/rendezvous/unix_socket.hpp"

namespace hsgd {

inline constexpr int64_t kLongestPauseMs = 20;

// Throws when the wait was interrupted, or what the watch throws.
void look_around(const Deadline& deadline);

// Before it is said that a rank left: it may have left because of another one, whose sockets were
// closed a moment before the watch can see that it died.
void look_for_the_cause(const Deadline& deadline);

// One slice of waiting, so that the caller can look at other things.
bool wait_readable(std::vector<pollfd>& sockets, const Deadline& deadline);
bool wait_readable_until(std::vector<pollfd>& sockets, const Deadline& deadline);

// What keeps a message from being sent, by `error` of send_message(): room in the other side's
// queue, or descriptors that this user's processes have under way, of whatever job.
[[noreturn]] void fail_full(const std::string& name, int error, const Deadline& deadline);

// Until the message is sent. False: the other side is gone.
template <class Send>
bool send_until(const std::string& name, const Deadline& deadline, Send&& send) {
  for (int64_t pause = 1;; pause = std::min<int64_t>(kLongestPauseMs, pause * 2)) {
    const Sent sent = send();
    if (sent != Sent::kLater) return sent == Sent::kDone;
    const int error = errno;
    look_around(deadline);
    if (deadline.passed()) fail_full(name, error, deadline);
    pause_ms(pause);
  }
}

}  // namespace hsgd

#endif  // HSGD_NODE_RENDEZVOUS_MEETING_WAIT_HPP_
