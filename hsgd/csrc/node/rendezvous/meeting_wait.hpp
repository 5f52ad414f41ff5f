// Waits of ranks that meet: each has a deadline, and ends early if the deadline's watch throws.
//
// They wait in short slices. They read no messages.
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

// Throws if the wait was interrupted, or what the watch throws.
void look_around(const Deadline& deadline);

// Call it before reporting that a rank left. The cause may be the death of another rank: its
// sockets close a moment before the watch can see that it died.
void look_for_the_cause(const Deadline& deadline);

// Wait for one slice, so that the caller can check other things in between.
bool wait_readable(std::vector<pollfd>& sockets, const Deadline& deadline);
bool wait_readable_until(std::vector<pollfd>& sockets, const Deadline& deadline);

// Throws the reason why a message cannot be sent, from `error` of send_message(): the other side's
// queue is full, or this user's processes, of any job, have too many descriptors in flight.
[[noreturn]] void fail_full(const std::string& name, int error, const Deadline& deadline);

// Repeats `send` until the message is sent. Returns false if the other side is gone.
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
