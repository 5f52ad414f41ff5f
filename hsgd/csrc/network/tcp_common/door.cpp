// Accepts connections, and ends silent ones.
#include "network/tcp_common/door.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "core/base/error.hpp"

namespace hsgd {
namespace {

// How long a connection may be silent while others wait to be accepted: more than a round trip,
// also between continents, and short enough for a real rank behind a thousand strangers.
constexpr int64_t kPressedNs = 250'000'000;
// Interval of new attempts if no connection can be accepted.
constexpr int kPauseMs = 100;

}  // namespace

SocketDoor::SocketDoor(std::vector<Fd> listeners, int poll, int64_t hello_ns, size_t ranks)
    : listeners_(std::move(listeners)),
      poll_(poll),
      hello_ns_(hello_ns),
      most_silent_(kMostStrangers + ranks) {
  silent_.reserve(most_silent_);
  for (const Fd& listener : listeners_) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = listener.get();
    if (::epoll_ctl(poll_, EPOLL_CTL_ADD, listener.get(), &event) != 0) fail_system("epoll_ctl");
  }
}

bool SocketDoor::is_listener(int fd) const {
  return std::any_of(listeners_.begin(), listeners_.end(),
                     [&](const Fd& listener) { return listener.get() == fd; });
}

Fd SocketDoor::accept(int64_t now_ns) {
  bool wait_outside = is_full();
  for (size_t i = 0; i < listeners_.size() && !is_full();) {
    Fd fd(::accept4(listeners_[i].get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.valid()) {
      silent_.push_back({fd.get(), now_ns});
      return fd;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    // Otherwise accept() failed, for instance because this process has too many open files.
    if (errno != EAGAIN && errno != EWOULDBLOCK) wait_outside = true;
    ++i;
  }
  press(wait_outside);
  return Fd();
}

// While connections cannot be accepted, the listeners would be ready all the time.
void SocketDoor::press(bool pressed) {
  if (pressed == pressed_) return;
  pressed_ = pressed;
  for (const Fd& listener : listeners_) {
    epoll_event event{};
    event.events = pressed ? 0 : uint32_t{EPOLLIN};
    event.data.fd = listener.get();
    // Fails only if out of memory: then there is one attempt too many.
    ::epoll_ctl(poll_, EPOLL_CTL_MOD, listener.get(), &event);
  }
}

void SocketDoor::forget(int fd) {
  silent_.erase(std::remove_if(silent_.begin(), silent_.end(),
                               [&](const Silent& silent) { return silent.fd == fd; }),
                silent_.end());
}

int64_t SocketDoor::patience_ns() const {
  return pressed_ ? std::min(hello_ns_, kPressedNs) : hello_ns_;
}

std::vector<int> SocketDoor::overdue(int64_t now_ns) const {
  std::vector<int> late;
  for (const Silent& silent : silent_) {
    if (now_ns - silent.since_ns >= patience_ns()) late.push_back(silent.fd);
  }
  return late;
}

int SocketDoor::wait_ms(int64_t now_ns) const {
  if (pressed_) return kPauseMs;
  if (silent_.empty()) return -1;
  constexpr int64_t kMs = 1'000'000;
  const int64_t left = silent_.front().since_ns + patience_ns() - now_ns;
  return static_cast<int>(std::max<int64_t>(left, 0) / kMs + 1);
}

}  // namespace hsgd
