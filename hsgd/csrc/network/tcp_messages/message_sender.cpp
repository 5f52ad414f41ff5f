// Sends pieces of messages, each behind its frame.
#include "network/tcp_messages/message_sender.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "core/base/first_count.hpp"

namespace hsgd {
namespace {

// Bytes per turn of a connection: the other connections wait meanwhile.
constexpr size_t kTurnBytes = 1 << 20;

}  // namespace

MessageQueue::MessageQueue() : next_serial_(first_count()) {}

void MessageQueue::add(Transport::Ticket ticket, const void* data, size_t bytes) {
  messages_.push_back({ticket, static_cast<const std::byte*>(data), bytes, next_serial_});
  ++next_serial_;
}

MessageQueue::Message* MessageQueue::next() {
  while (begun_ < messages_.size()) {
    Message& message = messages_[begun_];
    if (!message.announced || message.taken < message.bytes) return &message;
    ++begun_;
  }
  return nullptr;
}

void MessageQueue::drop_sent() {
  while (begun_ > 0 && messages_.front().done) {
    messages_.pop_front();
    --begun_;
  }
}

void MessageSender::begin(MessageQueue::Message& message) {
  message_ = &message;
  const size_t bytes = std::min(message.bytes - message.taken, kMostFrameBytes);
  frame_ = {message.serial, message.bytes, message.taken, static_cast<uint32_t>(bytes),
            kLeaderMagic};
  message.announced = true;
  message.taken += bytes;
  sent_ = 0;
}

void MessageSender::end(MessageQueue& queue, std::vector<Transport::Ticket>* done) {
  message_->sent += frame_.bytes;
  message_->done = message_->sent == message_->bytes;
  if (message_->done) done->push_back(message_->ticket);
  message_ = nullptr;
  queue.next();  // updates the count of begun messages
  queue.drop_sent();
}

MessageSender::State MessageSender::send(int fd, MessageQueue& queue,
                                         std::vector<Transport::Ticket>* done) {
  for (size_t turn = 0; turn < kTurnBytes;) {
    if (message_ == nullptr) {
      MessageQueue::Message* next = queue.next();
      if (next == nullptr) return State::kSent;
      begin(*next);
    }
    iovec parts[2];
    size_t count = 0;
    if (sent_ < sizeof frame_) {
      parts[count++] = {reinterpret_cast<std::byte*>(&frame_) + sent_, sizeof frame_ - sent_};
    }
    const size_t skipped = sent_ > sizeof frame_ ? sent_ - sizeof frame_ : 0;
    if (frame_.bytes > skipped) {
      const std::byte* from = message_->data + frame_.offset + skipped;
      parts[count++] = {const_cast<std::byte*>(from), frame_.bytes - skipped};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK ? State::kNoRoom : State::kLost;
    }
    sent_ += static_cast<size_t>(sent);
    turn += static_cast<size_t>(sent);
    if (sent_ == sizeof frame_ + frame_.bytes) end(queue, done);
  }
  return State::kSent;
}

}  // namespace hsgd
