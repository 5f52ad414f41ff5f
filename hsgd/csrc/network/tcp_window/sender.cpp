// Sends slices and receives confirmations.
#include "network/tcp_window/sender.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "core/base/error.hpp"

namespace hsgd {
namespace {

bool no_room() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

void SocketSender::add(uint32_t order, const Write& write) {
  const auto [queue, is_new] = waiting_.try_emplace(order);
  try {
    queue->second.push_back(write);
  } catch (...) {  // out of memory
    if (is_new) waiting_.erase(queue);
    throw;
  }
}

void SocketSender::renew(Fd fd) {
  HSGD_CHECK(!welcome_);
  fd_ = std::move(fd);
  hello_sent_ = 0;
  news_got_ = 0;
}

SocketSender::State SocketSender::send() {
  while (hello_sent_ < sizeof hello_ || (welcome_ && !waiting_.empty())) {
    const ssize_t sent = send_slice();
    if (sent < 0) {
      if (errno == EINTR) continue;
      return no_room() ? State::kNoRoom : State::kLost;
    }
    sent_ += static_cast<uint64_t>(sent);
    end_slice();
  }
  return State::kSent;
}

ssize_t SocketSender::send_slice() {
  constexpr int kFlags = MSG_NOSIGNAL | MSG_DONTWAIT;
  if (hello_sent_ < sizeof hello_) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&hello_) + hello_sent_;
    const ssize_t sent = ::send(fd_.get(), bytes, sizeof hello_ - hello_sent_, kFlags);
    if (sent > 0) hello_sent_ += static_cast<size_t>(sent);
    return sent;
  }
  if (!in_slice_) next_slice();
  const Write& write = waiting_.at(order_).front();
  iovec parts[2];
  size_t count = 0;
  if (slice_sent_ < sizeof slice_) {
    parts[count++] = {reinterpret_cast<std::byte*>(&slice_) + slice_sent_,
                      sizeof slice_ - slice_sent_};
  }
  const size_t skipped = slice_sent_ > sizeof slice_ ? slice_sent_ - sizeof slice_ : 0;
  if (slice_.bytes > skipped) {
    parts[count++] = {const_cast<std::byte*>(write.data) + write.taken + skipped,
                      slice_.bytes - skipped};
  }
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  // More follows after data, at least its version, so its end needs no packet of its own.
  const int more = slice_.version == 0 ? MSG_MORE : 0;
  const ssize_t sent = ::sendmsg(fd_.get(), &message, kFlags | more);
  if (sent > 0) slice_sent_ += static_cast<size_t>(sent);
  return sent;
}

// Returns true if the first write of an order, or its version, is in progress.
bool SocketSender::goes_on(uint32_t order) const {
  const auto found = waiting_.find(order);
  if (found == waiting_.end()) return false;
  const Write& write = found->second.front();
  return write.taken > 0 || write.header.version != 0;
}

// Chooses the next slice. A write that has begun is overtaken only by one shorter than its rest. A
// backward pass makes first what is needed last: if every more urgent write could overtake, hardly
// any write would be complete before its end, and later steps, such as sending weights back, would
// begin only then. No other data is sent between a write and its version.
void SocketSender::choose() {
  while (!begun_.empty() && !goes_on(begun_.back())) begun_.pop_back();
  const auto first = waiting_.begin();
  if (!begun_.empty()) {
    order_ = begun_.back();
    const Write& write = waiting_.at(order_).front();
    if (first->second.front().header.bytes >= write.header.bytes - write.taken) return;
  }
  order_ = first->first;
  begun_.push_back(order_);
}

void SocketSender::next_slice() {
  choose();
  const Write& write = waiting_.at(order_).front();
  const uint64_t left = write.header.bytes - write.taken;
  const uint64_t bytes = std::min(left, slice_bytes_);
  slice_ = {write.header.offset + write.taken, bytes, write.header.version, left - bytes};
  slice_sent_ = 0;
  in_slice_ = true;
}

void SocketSender::end_slice() {
  if (!in_slice_ || slice_sent_ < sizeof slice_ + slice_.bytes) return;
  in_slice_ = false;
  const auto queue = waiting_.find(order_);
  Write& write = queue->second.front();
  write.taken += slice_.bytes;
  if (write.taken < write.header.bytes) return;
  if (write.header.version != 0) unconfirmed_.push_back(write.ticket);
  queue->second.pop_front();
  if (queue->second.empty()) waiting_.erase(queue);
}

bool SocketSender::hear(std::vector<Ticket>* done) {
  for (;;) {
    auto* into = reinterpret_cast<std::byte*>(&news_) + news_got_;
    const ssize_t got = ::recv(fd_.get(), into, sizeof news_ - news_got_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 && no_room();
    news_got_ += static_cast<size_t>(got);
    if (news_got_ < sizeof news_) continue;
    news_got_ = 0;
    welcome_ = true;
    for (; confirmed_ < news_ && !unconfirmed_.empty(); ++confirmed_) {
      done->push_back(unconfirmed_.front());
      unconfirmed_.pop_front();
    }
  }
}

}  // namespace hsgd
