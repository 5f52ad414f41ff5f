// Messages on their way from another leader.
//
// Owns which receive takes which message, and the piece that is under way on a connection. Data
// goes where the receive says, at once; what nobody has posted a receive for waits in the kernel.
// Lengths are believed only as far as they fit. Never blocks, and owns no socket.
#ifndef HSGD_NETWORK_TCP_MESSAGES_MESSAGE_RECEIVER_HPP_
#define HSGD_NETWORK_TCP_MESSAGES_MESSAGE_RECEIVER_HPP_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "network/tcp_messages/message_frames.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

// The receives of one channel from one node, over all of its connections.
class ReceiveQueue {
 public:
  struct Receive {
    Transport::Ticket ticket;
    std::byte* data;
    size_t capacity;
    size_t got = 0;
    size_t total = 0;
    bool begun = false;  // `total` is known
    bool done() const { return begun && got == total; }
  };

  ReceiveQueue();
  void add(Transport::Ticket ticket, void* data, size_t capacity);
  // That of the message with this number; nullptr: it is not posted yet.
  Receive* find(uint64_t serial);
  // Whether there will be one: numbers of messages that have come do not come again.
  bool is_possible(uint64_t serial) const { return serial >= first_; }
  void drop_done();
  void clear() { receives_.clear(); }

 private:
  std::deque<Receive> receives_;  // whose places in memory stay
  uint64_t first_;                // number of the first one's message
};

// One connection's part.
class MessageReceiver {
 public:
  enum class State {
    kMore,     // a turn's share was taken
    kDrained,  // there is no more for now
    kWaits,    // for its receive
    kEnded,    // errno says why, or is 0
    kGarbage   // not what a leader of this version would send
  };
  // Tickets of receives that are done go to `done`.
  State receive(int fd, ReceiveQueue& queue, std::vector<Transport::Ticket>* done);

 private:
  bool fits(const ReceiveQueue& queue) const;
  bool begin(ReceiveQueue& queue);
  ssize_t take(int fd);
  void end(ReceiveQueue& queue, std::vector<Transport::Ticket>* done);

  MessageFrame frame_{};
  size_t frame_got_ = 0;
  ReceiveQueue::Receive* into_ = nullptr;  // of the piece; nullptr: not found yet
  size_t got_ = 0;                         // of the piece
  MessageFrame next_{};                    // what came with the end of a piece
  size_t next_got_ = 0;
  uint64_t last_serial_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_MESSAGES_MESSAGE_RECEIVER_HPP_
