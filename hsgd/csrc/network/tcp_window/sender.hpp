// SocketSender: one connection to another rank, with the writes that wait and the confirmations.
//
// Owns the socket and the order of writes: the one with the least `order` goes first; equal ones go
// in order of arrival. A write is sent in slices; a more urgent write can go between two slices if
// it is shorter than the rest. No write begins before the other rank has answered the hello, so
// until then another socket can replace this one. Never blocks; has neither lock nor thread.
#ifndef HSGD_NETWORK_TCP_WINDOW_SENDER_HPP_
#define HSGD_NETWORK_TCP_WINDOW_SENDER_HPP_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "core/os/shared_memory.hpp"
#include "network/tcp_common/frames.hpp"

namespace hsgd {

class SocketSender {
 public:
  using Ticket = uint64_t;
  struct Write {
    SocketHeader header;
    const std::byte* data;
    Ticket ticket;       // of the operation to which it belongs
    uint64_t taken = 0;  // bytes that the kernel has taken
  };
  enum class State { kSent, kNoRoom, kLost };  // kLost: see errno

  // `fd`: a socket that is being connected. `slice_bytes`: an urgent write waits for at most one
  // slice; but each slice is a system call on the sender and on the receiver.
  SocketSender(Fd fd, const SocketHello& hello, uint64_t slice_bytes)
      : fd_(std::move(fd)), hello_(hello), slice_bytes_(slice_bytes) {}

  int fd() const { return fd_.get(); }
  // Returns true if the other rank has answered: it has accepted the connection.
  bool is_welcome() const { return welcome_; }
  // Starts again with a socket that is being connected, only before the answer. Closes the old
  // socket.
  void renew(Fd fd);
  void add(uint32_t order, const Write& write);
  // Sends as much as the kernel takes.
  State send();
  // Reads the confirmations of the rank; adds the tickets of confirmed versions to `done`. Returns
  // false if the connection ended.
  bool hear(std::vector<Ticket>* done);
  // Returns a number that grows when the kernel takes bytes, or the rank answers or confirms
  // versions.
  uint64_t progress() const { return sent_ + confirmed_ + (welcome_ ? 1 : 0); }
  // Calls `take` with the ticket of each operation that is not done.
  template <class Take>
  void for_each_open(Take&& take) const {
    for (const Ticket ticket : unconfirmed_) take(ticket);
    for (const auto& [order, writes] : waiting_) {
      for (const Write& write : writes) take(write.ticket);
    }
  }

 private:
  ssize_t send_slice();
  bool goes_on(uint32_t order) const;
  void choose();
  void next_slice();
  void end_slice();

  Fd fd_;
  SocketHello hello_;
  uint64_t slice_bytes_;
  size_t hello_sent_ = 0;
  bool welcome_ = false;
  std::map<uint32_t, std::deque<Write>> waiting_;  // by order; no empty queues
  // Orders whose first write has begun. Each has overtaken those before it.
  std::vector<uint32_t> begun_;
  uint32_t order_ = 0;  // of the slice, which is in the first write of that order
  SocketHeader slice_{};
  bool in_slice_ = false;
  size_t slice_sent_ = 0;           // bytes of header and data
  uint64_t sent_ = 0;               // bytes in all
  std::deque<Ticket> unconfirmed_;  // versions
  uint64_t confirmed_ = 0;          // number of confirmed versions
  uint64_t news_ = 0;               // incoming number of versions
  size_t news_got_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_WINDOW_SENDER_HPP_
