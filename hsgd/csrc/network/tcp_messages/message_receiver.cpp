// Reads frames and the pieces behind them.
#include "network/tcp_messages/message_receiver.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>

#include "core/base/first_count.hpp"

namespace hsgd {
namespace {

// Bytes per turn of a connection: the other connections wait meanwhile, and under load a connection
// never runs dry.
constexpr size_t kTurnBytes = 1 << 20;

}  // namespace

ReceiveQueue::ReceiveQueue() : first_(first_count()) {}

void ReceiveQueue::add(Transport::Ticket ticket, void* data, size_t capacity) {
  receives_.push_back({ticket, static_cast<std::byte*>(data), capacity});
}

ReceiveQueue::Receive* ReceiveQueue::find(uint64_t serial) {
  if (serial < first_ || serial - first_ >= receives_.size()) return nullptr;
  return &receives_[serial - first_];
}

void ReceiveQueue::drop_done() {
  for (; !receives_.empty() && receives_.front().done(); ++first_) receives_.pop_front();
}

// Checks a frame: a peer with the token may still have another version, or be broken.
bool MessageReceiver::fits(const ReceiveQueue& queue) const {
  return frame_.magic == kLeaderMagic && frame_.bytes <= kMostFrameBytes &&
         frame_.offset <= frame_.total && frame_.bytes <= frame_.total - frame_.offset &&
         frame_.serial >= last_serial_ && queue.is_possible(frame_.serial);
}

// Begins a piece whose receive is posted; returns false if it does not fit.
bool MessageReceiver::begin(ReceiveQueue& queue) {
  ReceiveQueue::Receive& receive = *queue.find(frame_.serial);
  const bool same = !receive.begun || receive.total == frame_.total;
  if (!same || frame_.total > receive.capacity || frame_.bytes > frame_.total - receive.got ||
      (receive.done() && frame_.bytes == 0)) {
    return false;
  }
  receive.begun = true;
  receive.total = frame_.total;
  into_ = &receive;
  got_ = 0;
  return true;
}

// Reads the rest of the piece, and as much of the next frame's header as has arrived.
ssize_t MessageReceiver::take(int fd) {
  iovec parts[2];
  size_t count = 0;
  const size_t rest = into_ != nullptr ? frame_.bytes - got_ : 0;
  MessageFrame next;
  if (rest > 0) {
    parts[count++] = {into_->data + frame_.offset + got_, rest};
    parts[count++] = {&next, sizeof next};
  } else {
    parts[count++] = {reinterpret_cast<std::byte*>(&frame_) + frame_got_,
                      sizeof frame_ - frame_got_};
  }
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const ssize_t taken = ::recvmsg(fd, &message, MSG_DONTWAIT);
  if (taken <= 0) return taken;
  const auto bytes = static_cast<size_t>(taken);
  if (rest == 0) {
    frame_got_ += bytes;
  } else if (bytes <= rest) {
    got_ += bytes;
  } else {
    got_ += rest;
    next_ = next;
    next_got_ = bytes - rest;
  }
  return taken;
}

void MessageReceiver::end(ReceiveQueue& queue, std::vector<Transport::Ticket>* done) {
  into_->got += frame_.bytes;
  if (into_->done()) done->push_back(into_->ticket);
  into_ = nullptr;
  last_serial_ = frame_.serial;
  frame_ = next_;
  frame_got_ = next_got_;
  next_got_ = 0;
  queue.drop_done();
}

MessageReceiver::State MessageReceiver::receive(int fd, ReceiveQueue& queue,
                                                std::vector<Transport::Ticket>* done) {
  for (size_t turn = 0; turn < kTurnBytes;) {
    if (into_ == nullptr && frame_got_ == sizeof frame_) {
      if (!fits(queue)) return State::kGarbage;
      if (queue.find(frame_.serial) == nullptr) return State::kWaits;
      if (!begin(queue)) return State::kGarbage;
    }
    if (into_ != nullptr && got_ == frame_.bytes) {
      end(queue, done);
      continue;
    }
    const ssize_t taken = take(fd);
    if (taken < 0 && errno == EINTR) continue;
    if (taken < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return State::kDrained;
    if (taken == 0) errno = 0;
    if (taken <= 0) return State::kEnded;
    turn += static_cast<size_t>(taken);
  }
  return State::kMore;
}

}  // namespace hsgd
