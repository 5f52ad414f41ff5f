// Messages on their way to another leader.
//
// Owns the order of a channel's messages, and the piece that a connection has begun. Data goes from
// where it lies. Never blocks, and owns no socket.
#ifndef HSGD_NETWORK_TCP_MESSAGES_MESSAGE_SENDER_HPP_
#define HSGD_NETWORK_TCP_MESSAGES_MESSAGE_SENDER_HPP_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "network/tcp_messages/message_frames.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

// What waits to go to one node on one channel, over all of its connections.
class MessageQueue {
 public:
  struct Message {
    Transport::Ticket ticket;
    const std::byte* data;
    size_t bytes;
    uint64_t serial;
    size_t taken = 0;        // bytes of pieces that were begun
    size_t sent = 0;         // bytes that the kernel has
    bool announced = false;  // a piece was begun: one without bytes has one, too
  };

  MessageQueue();
  void add(Transport::Ticket ticket, const void* data, size_t bytes);
  // The message with the next piece to send; nullptr: there is none.
  Message* next();
  // Of what next() gave: the kernel has all of its bytes. Messages may end in another order.
  void drop_sent();
  bool empty() const { return messages_.empty(); }

 private:
  std::deque<Message> messages_;  // whose places in memory stay
  size_t begun_ = 0;              // so many first ones have no further piece
  uint64_t next_serial_;
};

// One connection's part.
class MessageSender {
 public:
  enum class State { kSent, kNoRoom, kLost };  // kLost: errno says why

  // As much of the queue as the kernel takes, up to a turn's share (kSent, and busy() or not).
  // Tickets of messages that have left go to `done`.
  State send(int fd, MessageQueue& queue, std::vector<Transport::Ticket>* done);
  bool busy() const { return message_ != nullptr; }

 private:
  void begin(MessageQueue::Message& message);
  void end(MessageQueue& queue, std::vector<Transport::Ticket>* done);

  MessageQueue::Message* message_ = nullptr;  // whose piece is under way
  MessageFrame frame_{};
  size_t sent_ = 0;  // of frame and data
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_MESSAGES_MESSAGE_SENDER_HPP_
