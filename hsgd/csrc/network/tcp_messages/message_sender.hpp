// MessageSender: sends messages to another leader on one connection; MessageQueue: the posted
// messages.
//
// Keeps the order of a channel's messages. Data is sent without a copy. Never blocks, and owns no
// socket.
#ifndef HSGD_NETWORK_TCP_MESSAGES_MESSAGE_SENDER_HPP_
#define HSGD_NETWORK_TCP_MESSAGES_MESSAGE_SENDER_HPP_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "network/tcp_messages/message_frames.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

// Messages that wait to go to one node on one channel, over all of its connections.
class MessageQueue {
 public:
  struct Message {
    Transport::Ticket ticket;
    const std::byte* data;
    size_t bytes;
    uint64_t serial;
    size_t taken = 0;        // bytes of pieces that were begun
    size_t sent = 0;         // bytes that the kernel has taken
    bool announced = false;  // a piece was begun; an empty message has one piece, too
    bool done = false;       // the kernel has taken all pieces
  };

  MessageQueue();
  void add(Transport::Ticket ticket, const void* data, size_t bytes);
  // Returns the message with the next piece to send; nullptr: there is none.
  Message* next();
  // Drops the first messages that are done. Messages may finish in another order.
  void drop_sent();
  bool empty() const { return messages_.empty(); }

 private:
  std::deque<Message> messages_;  // deque: addresses are stable
  size_t begun_ = 0;              // number of first messages without a further piece
  uint64_t next_serial_;
};

// State of one connection.
class MessageSender {
 public:
  enum class State { kSent, kNoRoom, kLost };  // kLost: see errno

  // Sends as much of the queue as the kernel takes, up to a turn's share (kSent, and busy() or
  // not). Adds the tickets of sent messages to `done`.
  State send(int fd, MessageQueue& queue, std::vector<Transport::Ticket>* done);
  bool busy() const { return message_ != nullptr; }

 private:
  void begin(MessageQueue::Message& message);
  void end(MessageQueue& queue, std::vector<Transport::Ticket>* done);

  MessageQueue::Message* message_ = nullptr;  // message whose piece is in progress
  MessageFrame frame_{};
  size_t sent_ = 0;  // bytes of frame and data
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_MESSAGES_MESSAGE_SENDER_HPP_
