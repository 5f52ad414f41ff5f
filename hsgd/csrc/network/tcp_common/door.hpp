// Who comes in over TCP: connections that were accepted and did not say yet whose they are.
//
// Owns the listening sockets, and the account of connections that say nothing: anybody who reaches
// the port can open them, and each costs a descriptor. Beside as many as there are ranks they are
// few at a time, and have seconds to say hello; where others wait outside, less. Never reads, and
// never closes what it has given away.
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
  // So many strangers that say nothing may be in at a time.
  static constexpr size_t kMostStrangers = 64;

  // Follows the listeners in the poll. `ranks`: so many may come at the same moment, before one of
  // them can say hello. Throws HSGD_ERR_SYSTEM.
  SocketDoor(std::vector<Fd> listeners, int poll, int64_t hello_ns, size_t ranks);

  bool is_listener(int fd) const;
  // The next connection, counted as silent; invalid when none waits, or none can be let in now.
  Fd accept(int64_t now_ns);
  // Somebody waits outside who could not be let in when that was last tried.
  bool is_pressed() const { return pressed_; }
  // It has said hello, or is closed.
  void forget(int fd);
  // Those that have been silent for too long.
  std::vector<int> overdue(int64_t now_ns) const;
  // Until overdue() or accept() may say something new though nothing is ready; -1: never.
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
  std::vector<Silent> silent_;  // as they came
  bool pressed_ = false;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_COMMON_DOOR_HPP_
