// Claiming a key, asking for a box, and answering.
#include "box_door.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "box_layout.hpp"
#include "error.hpp"
#include "signals.hpp"
#include "unix_socket.hpp"

namespace hsgd {
namespace {

struct Handover {
  uint32_t magic = kBoxMagic;
  uint32_t version = kBoxVersion;
  uint64_t bytes = 0;
};

constexpr int kHandedOver = 2;

std::string name_of(const std::string& key) {
  constexpr size_t kMostKey = 64;
  if (key.empty() || key.size() > kMostKey || key.find('\0') != std::string::npos) {
    throw Error(
        HSGD_ERR_ARGUMENT, -1,
        text("ParameterBox: a key has 1 to %zu characters, this one %zu", kMostKey, key.size()));
  }
  return text("@hsgd-box-%u-%s", ::geteuid(), key.c_str());
}

// Another user has no business here, in either direction.
bool is_same_user(const Fd& socket) {
  ucred who{};
  socklen_t bytes = sizeof who;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &bytes) != 0) return false;
  return who.uid == ::geteuid() || who.uid == 0;
}

bool wait_readable(const Fd& socket, int64_t limit_ms) {
  pollfd watched{socket.get(), POLLIN, 0};
  return ::poll(&watched, 1, static_cast<int>(limit_ms)) > 0;
}

// False: the holder that took the question died, or is stopped.
bool receive_box(const Fd& socket, int64_t limit_ms, BoxHandover* box) {
  if (!wait_readable(socket, limit_ms)) return false;
  Handover message;
  Fd* const taken[kHandedOver] = {&box->segment, &box->door};
  const ssize_t received =
      receive_message(socket.get(), &message, sizeof message, taken, kHandedOver);
  if (received <= 0) return false;
  if (received != sizeof message || message.magic != kBoxMagic || message.version != kBoxVersion ||
      !box->door.valid()) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                "ParameterBox: the holder of this key runs another version of hsgd; install the "
                "same one");
  }
  box->bytes = message.bytes;
  return true;
}

}  // namespace

Fd claim_box_key(const std::string& key) {
  const Address address = address_of(name_of(key));
  Fd door = new_socket();
  if (::bind(door.get(), reinterpret_cast<const sockaddr*>(&address.name), address.bytes) != 0) {
    if (errno != EADDRINUSE) fail_system("ParameterBox: taking the key");
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("ParameterBox: there is a box with the key \"%s\" on this node; attach to it, "
                     "or give another key",
                     key.c_str()));
  }
  // All holders accept from it, and only one of them gets who comes.
  if (::fcntl(door.get(), F_SETFL, O_NONBLOCK) != 0) fail_system("fcntl");
  if (::listen(door.get(), SOMAXCONN) != 0) fail_system("listen");
  return door;
}

BoxHandover ask_for_box(const std::string& key, const Deadline& deadline) {
  constexpr int64_t kAnswerMs = 1000;  // then another holder may be asked
  const Address address = address_of(name_of(key));
  bool found = false;
  for (int64_t pause = 1;; pause = std::min<int64_t>(20, pause * 2)) {
    Fd socket = new_socket();
    const timeval limit{1, 0};  // of connect(), which waits where too many are asking
    ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (try_connect(socket, address)) {
      found = true;
      BoxHandover box;
      const int64_t left_ms = std::max<int64_t>(1, deadline.remaining_ns() / 1'000'000);
      const int64_t limit_ms = std::min(kAnswerMs, left_ms);
      if (is_same_user(socket) && receive_box(socket, limit_ms, &box)) return box;
    } else if (errno != ECONNREFUSED && errno != ENOENT && errno != EAGAIN && errno != EINTR) {
      fail_system("ParameterBox: asking for a box");
    }
    if (deadline.interrupted()) {
      throw Error(HSGD_ERR_INTERRUPTED, -1, "ParameterBox: interrupted");
    }
    if (deadline.passed()) {
      const char* what = found ? "its holders do not answer: they are stopped, or are forked "
                                 "children of holders that ended"
                               : "nobody on this node has made it; is the key right?";
      throw Error(HSGD_ERR_TIMEOUT, -1,
                  text("ParameterBox: no box with the key \"%s\" after %g s: %s", key.c_str(),
                       deadline.timeout_s(), what));
    }
    pause_ms(pause);
  }
}

BoxDoor::BoxDoor(BoxHandover given) : given_(std::move(given)), stop_(::eventfd(0, EFD_CLOEXEC)) {
  if (!stop_.valid()) fail_system("eventfd");
  const SignalsBlocked blocked;  // the thread inherits it
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    throw Error(HSGD_ERR_SYSTEM, -1, text("ParameterBox: starting a thread: %s", error.what()));
  }
  ::pthread_setname_np(thread_.native_handle(), "hsgd-box");
}

BoxDoor::~BoxDoor() {
  const uint64_t one = 1;
  HSGD_CHECK(::write(stop_.get(), &one, sizeof one) == sizeof one);
  thread_.join();
}

void BoxDoor::serve() {
  pollfd watched[2] = {{given_.door.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}};
  for (;;) {
    if (::poll(watched, 2, -1) < 0 && errno != EINTR) return;
    if (watched[1].revents != 0) return;
    const Fd asking(::accept4(given_.door.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (asking.valid() && is_same_user(asking)) answer(asking);
    // Without a free descriptor, who asks stays in the queue: no reason to turn in circles.
    if (!asking.valid() && (errno == EMFILE || errno == ENFILE)) pause_ms(100);
  }
}

// What fails here fails for the one who asks, who asks again.
void BoxDoor::answer(const Fd& asking) noexcept {
  Handover message;
  message.bytes = given_.bytes;
  const Fd* const sent[kHandedOver] = {&given_.segment, &given_.door};
  try {
    send_message(asking.get(), &message, sizeof message, sent, kHandedOver);
  } catch (const Error&) {
    return;
  }
}

}  // namespace hsgd
