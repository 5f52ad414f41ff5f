// BoxDoor: claims a key, asks for a box, and answers.
#include "onesided/box/key_registry.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "core/base/error.hpp"
#include "core/os/signal_mask.hpp"
#include "node/rendezvous/meeting_wait.hpp"
#include "node/rendezvous/unix_socket.hpp"
#include "onesided/box/layout.hpp"

namespace hsgd {
namespace {

struct Handover {
  uint32_t magic = kBoxMagic;
  uint32_t version = kBoxVersion;
  uint64_t bytes = 0;
};

constexpr size_t kHandedOver = 2;  // descriptors

std::string name_of(const std::string& key) {
  constexpr size_t kMostKey = 64;
  if (key.empty() || key.size() > kMostKey || key.find('\0') != std::string::npos) {
    throw_invalid("ParameterBox: a key has 1 to %zu characters, this one %zu", kMostKey,
                  key.size());
  }
  return text("@hsgd-box-%u-%s", ::geteuid(), key.c_str());
}

// Receives the box. Returns false if the holder that accepted the request died or is stopped.
bool receive_box(const Fd& socket, const Deadline& deadline, BoxHandover* box) {
  std::vector<pollfd> watched{{socket.get(), POLLIN, 0}};
  if (!wait_readable_until(watched, deadline)) return false;
  Handover message;
  std::vector<Fd> taken;
  const ssize_t received = receive_message(socket.get(), &message, sizeof message, &taken);
  if (received <= 0) return false;
  if (received != sizeof message || message.magic != kBoxMagic || message.version != kBoxVersion ||
      taken.size() != kHandedOver) {
    throw_invalid(
        "ParameterBox: the holder of this key runs another version of hsgd; install the "
        "same one");
  }
  box->segment = std::move(taken[0]);
  box->door = std::move(taken[1]);
  box->bytes = message.bytes;
  return true;
}

// Refuses a holder of another user: a key can be guessed, and the first process to bind its name
// has it.
void refuse_stranger(const std::string& key, const Peer& holder) {
  if (holder.is_trusted()) return;
  throw_invalid(
      "ParameterBox: a process of another user (uid %u, pid %d) holds the name of the "
      "key \"%s\" on this node; give a key that others cannot guess",
      holder.user, holder.pid, key.c_str());
}

}  // namespace

Fd claim_box_key(const std::string& key) {
  const Address address = address_of(name_of(key));
  Fd door = new_socket();
  if (::bind(door.get(), reinterpret_cast<const sockaddr*>(&address.name), address.bytes) != 0) {
    if (errno != EADDRINUSE) fail_system("ParameterBox: taking the key");
    const Fd asking = new_socket();
    if (try_connect(asking, address, 0)) refuse_stranger(key, peer_of(asking));
    throw_invalid(
        "ParameterBox: there is a box with the key \"%s\" on this node; attach to it, "
        "or give another key",
        key.c_str());
  }
  // All holders accept on this socket, and each connection reaches only one of them.
  if (::fcntl(door.get(), F_SETFL, O_NONBLOCK) != 0) fail_system("fcntl");
  if (::listen(door.get(), SOMAXCONN) != 0) fail_system("listen");
  return door;
}

BoxHandover ask_for_box(const std::string& key, const Deadline& deadline) {
  constexpr double kAnswerS = 1.0;  // after that another holder may be asked
  constexpr double kLeastS = 0.001;
  constexpr int64_t kTurnMs = 50;  // one wait if too many processes are asking
  const Address address = address_of(name_of(key));
  bool found = false;
  for (int64_t pause = 1;; pause = std::min<int64_t>(20, pause * 2)) {
    Fd socket = new_socket();
    if (try_connect(socket, address, kTurnMs)) {
      refuse_stranger(key, peer_of(socket));
      found = true;
      BoxHandover box;
      const double left_s = static_cast<double>(deadline.remaining_ns()) / 1e9;
      const double limit_s = std::clamp(left_s, kLeastS, kAnswerS);
      if (receive_box(socket, deadline.renewed(limit_s), &box)) return box;
    } else if (errno != ECONNREFUSED && errno != ENOENT && errno != EAGAIN && errno != EINTR) {
      fail_system("ParameterBox: asking for a box");
    }
    if (deadline.interrupted()) throw_error(HSGD_ERR_INTERRUPTED, -1, "ParameterBox: interrupted");
    if (deadline.passed()) {
      const char* what = found ? "its holders do not answer: they are stopped, or are forked "
                                 "children of holders that ended"
                               : "nobody on this node has made it; check the key";
      throw_error(HSGD_ERR_TIMEOUT, -1, "ParameterBox: no box with the key \"%s\" after %g s: %s",
                  key.c_str(), deadline.timeout_s(), what);
    }
    pause_ms(pause);
  }
}

BoxDoor::BoxDoor(BoxHandover given) : given_(std::move(given)), stop_(::eventfd(0, EFD_CLOEXEC)) {
  if (!stop_.valid()) fail_system("eventfd");
  const SignalsBlocked blocked;  // the thread inherits the signal mask
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    throw_error(HSGD_ERR_SYSTEM, -1, "ParameterBox: starting a thread failed: %s", error.what());
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
    if (asking.valid() && peer_of(asking).is_trusted()) answer(asking);
    // Without a free descriptor the request stays in the queue: pause instead of spinning.
    if (!asking.valid() && (errno == EMFILE || errno == ENFILE)) pause_ms(100);
  }
}

// Answers one request. A failure here affects only the asking process, which asks again.
void BoxDoor::answer(const Fd& asking) noexcept {
  Handover message;
  message.bytes = given_.bytes;
  try {
    send_message(asking.get(), &message, sizeof message, {given_.segment.get(), given_.door.get()});
  } catch (const Error&) {
    return;
  }
}

}  // namespace hsgd
