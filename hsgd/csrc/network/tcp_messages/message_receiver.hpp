// MessageReceiver: receives messages from another leader on one connection; ReceiveQueue: the
// posted receives.
//
// Data goes directly to the buffer of its receive; a message without a receive waits in the kernel.
// Lengths are trusted only if they fit. Never blocks, and owns no socket.
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
  // Returns the receive of the message with this number; nullptr: it is not posted yet.
  Receive* find(uint64_t serial);
  // Returns true if such a receive can still come: numbers of received messages are not used again.
  bool is_possible(uint64_t serial) const { return serial >= first_; }
  void drop_done();
  void clear() { receives_.clear(); }

 private:
  std::deque<Receive> receives_;  // deque: addresses are stable
  uint64_t first_;                // number of the first receive's message
};

// State of one connection.
class MessageReceiver {
 public:
  enum class State {
    kMore,     // a turn's share was taken
    kDrained,  // no more data for now
    kWaits,    // the piece's receive is not posted
    kEnded,    // errno is the reason, or 0
    kGarbage   // a leader of this version would not send this
  };
  // Receives data. Adds the tickets of finished receives to `done`.
  State receive(int fd, ReceiveQueue& queue, std::vector<Transport::Ticket>* done);

 private:
  bool fits(const ReceiveQueue& queue) const;
  bool begin(ReceiveQueue& queue);
  ssize_t take(int fd);
  void end(ReceiveQueue& queue, std::vector<Transport::Ticket>* done);

  MessageFrame frame_{};
  size_t frame_got_ = 0;
  ReceiveQueue::Receive* into_ = nullptr;  // receive of the piece; nullptr: not found yet
  size_t got_ = 0;                         // bytes of the piece
  MessageFrame next_{};                    // received with the end of a piece
  size_t next_got_ = 0;
  uint64_t last_serial_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_MESSAGES_MESSAGE_RECEIVER_HPP_
