// SocketDoor: accepts TCP connections, and holds those that have not said yet whose they are.
//
// Owns the listening sockets and limits silent connections: any process that reaches the port can
// open them, and each costs a descriptor. In addition to one per rank only a few are accepted at a
// time. They have seconds to send a hello, less if others wait to be accepted. Never reads, and
// never closes a connection that it has handed over.
#ifndef HSGD_NETWORK_TCP_COMMON_DOOR_HPP_
#define HSGD_NETWORK_TCP_COMMON_DOOR_HPP_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/os/shared_memory.hpp"

namespace hsgd {

class SocketDoor {
 public:
  // Maximum number of silent strangers at a time.
  static constexpr size_t kMostStrangers = 64;

  // Adds the listeners to the poll. `ranks`: number of ranks that may connect at the same moment,
  // before one of them can send a hello. Throws HSGD_ERR_SYSTEM.
  SocketDoor(std::vector<Fd> listeners, int poll, int64_t hello_ns, size_t ranks);

  bool is_listener(int fd) const;
  // Returns the next connection, counted as silent; invalid if none waits, or none can be accepted
  // now.
  Fd accept(int64_t now_ns);
  // Returns true if a connection was waiting that could not be accepted at the last attempt.
  bool is_pressed() const { return pressed_; }
  // Stops counting a connection that has sent a hello, or was closed.
  void forget(int fd);
  // Returns the connections that have been silent for too long.
  std::vector<int> overdue(int64_t now_ns) const;
  // Returns the time until overdue() or accept() may change although no socket is ready; -1: never.
  int wait_ms(int64_t now_ns) const;

 private:
  struct Silent {
    int fd;
    int64_t since_ns;
  };

  bool is_full() const { return silent_.size() >= most_silent_; }
  int64_t patience_ns() const;
  void press(bool pressed);

  std::vector<Fd> listeners_;
  int poll_;
  int64_t hello_ns_;
  size_t most_silent_;
  std::vector<Silent> silent_;  // in order of arrival
  bool pressed_ = false;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_COMMON_DOOR_HPP_
