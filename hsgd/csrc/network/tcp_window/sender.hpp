// One connection to another rank: what waits to go there, and what the rank has confirmed.
//
// Owns the socket and the order of writes: of those that wait, the one with the least `order` goes
// first, equal ones as they came. A write goes in slices; one that is needed sooner goes between
// two of them if it is shorter than what is left. Before the other rank has answered the hello no
// write begins, so that until then another socket can take the place of this one. Never blocks, and
// has neither lock nor thread.
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
    Ticket ticket;       // of the operation that it is a part of
    uint64_t taken = 0;  // by the kernel
  };
  enum class State { kSent, kNoRoom, kLost };  // kLost: errno says why

  // `fd`: a socket that is being connected. `slice_bytes`: for so long what is needed first may
  // have to wait for what is not; but each slice is a call into the kernel of the sender's, and of
  // the receiver's.
  SocketSender(Fd fd, const SocketHello& hello, uint64_t slice_bytes)
      : fd_(std::move(fd)), hello_(hello), slice_bytes_(slice_bytes) {}

  int fd() const { return fd_.get(); }
  // The other rank has answered: it has let us in.
  bool is_welcome() const { return welcome_; }
  // Begins anew over a socket that is being connected; only before that. The old one is closed.
  void renew(Fd fd);
  void add(uint32_t order, const Write& write);
  // As much as the kernel takes.
  State send();
  // Reads what the rank has confirmed: its versions' tickets go to `done`. False: the connection
  // ended.
  bool hear(std::vector<Ticket>* done);
  // Grows whenever the kernel takes bytes, or the rank answers or confirms versions.
  uint64_t progress() const { return sent_ + confirmed_ + (welcome_ ? 1 : 0); }
  // The tickets of all that is not done, one after another.
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
  std::map<uint32_t, std::deque<Write>> waiting_;  // by order; no empty ones
  // Orders whose first write has begun. Each has overtaken those before it.
  std::vector<uint32_t> begun_;
  uint32_t order_ = 0;  // of the slice, the first write of that order
  SocketHeader slice_{};
  bool in_slice_ = false;
  size_t slice_sent_ = 0;           // of header and data
  uint64_t sent_ = 0;               // of all
  std::deque<Ticket> unconfirmed_;  // versions
  uint64_t confirmed_ = 0;          // how many were
  uint64_t news_ = 0;               // what comes back, and how much of it is here
  size_t news_got_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_WINDOW_SENDER_HPP_
