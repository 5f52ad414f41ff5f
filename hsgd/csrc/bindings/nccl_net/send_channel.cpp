#include "bindings/nccl_net/send_channel.hpp"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "network/tcp_common/socket.hpp"

namespace hsgd::nccl_net {
namespace {

// Bytes per turn of a connection: the other stripes wait meanwhile.
constexpr size_t kTurnBytes = 1 << 20;

}  // namespace

SendChannel::SendChannel(std::vector<Fd> connections, std::string peer, double timeout_s)
    : Channel(std::move(peer), timeout_s) {
  control_ = std::move(connections[0]);
  watch_host(control_.get(), timeout_s, TcpEnd::kReads);
  for (size_t i = 1; i < connections.size(); ++i) {
    watch_host(connections[i].get(), timeout_s, TcpEnd::kWrites);
    stripes_.push_back({std::move(connections[i])});
  }
}

Request* SendChannel::send(const void* data, size_t bytes, int tag) {
  if (waiting_.size() + going_.size() >= kMostOpen) return nullptr;
  read_grants();
  if (ended_) fail_closed(0);  // the kernel would take a short message all the same
  Request* request = new_request(1);
  const uint64_t serial = numbers_[tag].next++;
  const Message message{request, static_cast<const std::byte*>(data), bytes, tag, serial};
  const auto grant = std::find_if(grants_.begin(), grants_.end(), [&](const Grant& each) {
    return each.tag == tag && each.serial == serial;
  });
  const bool is_granted = grant != grants_.end();
  if (is_granted) {
    check_capacity(message, grant->capacity);
    grants_.erase(grant);
  }
  (is_granted || may_go(message) ? going_ : waiting_).push_back(message);
  progress();
  return request;
}

bool SendChannel::may_go(const Message& message) const {
  return message.bytes <= kMostEagerBytes &&
         message.serial < numbers_.at(message.tag).receives + kMostAhead;
}

void SendChannel::progress() {
  read_grants();
  for (Stripe& stripe : stripes_) write(stripe);
  if (ended_ && !is_idle()) fail_closed(0);
  check_time();
}

void SendChannel::read_grants() {
  while (!ended_) {
    auto* into = reinterpret_cast<std::byte*>(&grant_) + grant_got_;
    const ssize_t got = ::recv(control_.get(), into, sizeof grant_ - grant_got_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got < 0 && !is_idle()) fail_closed(errno);
    if (got <= 0) {
      ended_ = true;
      return;
    }
    grant_got_ += static_cast<size_t>(got);
    if (grant_got_ < sizeof grant_) continue;
    grant_got_ = 0;
    take_grant(grant_);
  }
}

void SendChannel::take_grant(const Grant& grant) {
  if (grant.magic != kMagic || grants_.size() >= kMostOpen) fail_garbage();
  note_moved();
  Numbers& numbers = numbers_[grant.tag];
  numbers.receives = std::max(numbers.receives, grant.serial + 1);
  if (grant.serial >= numbers.next) grants_.push_back(grant);
  for (auto each = waiting_.begin(); each != waiting_.end();) {
    const bool is_granted = each->tag == grant.tag && each->serial == grant.serial;
    if (is_granted) check_capacity(*each, grant.capacity);
    if (is_granted || may_go(*each)) {
      going_.push_back(*each);
      each = waiting_.erase(each);
    } else {
      ++each;
    }
  }
}

void SendChannel::check_capacity(const Message& message, uint64_t capacity) {
  if (message.bytes <= capacity) return;
  // The receiver shall report it, too. Without room for the header it sees that this end closes.
  const Piece piece{kMagic, 0, message.tag, 0, message.serial, message.bytes, 0};
  if (stripes_[0].message == nullptr) {
    ::send(stripes_[0].fd.get(), &piece, sizeof piece, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  fail_too_long(message, capacity);
}

SendChannel::Message* SendChannel::next_message() {
  for (; begun_ < going_.size(); ++begun_) {
    Message& message = going_[begun_];
    if (!message.announced || message.taken < message.bytes) return &message;
  }
  return nullptr;
}

void SendChannel::begin_piece(Stripe& stripe, Message& message) {
  const size_t bytes = std::min(message.bytes - message.taken, kMostPieceBytes);
  stripe.piece = {
      kMagic,       static_cast<uint32_t>(bytes), message.tag, 0, message.serial, message.bytes,
      message.taken};
  stripe.message = &message;
  stripe.sent = 0;
  message.announced = true;
  message.taken += bytes;
}

void SendChannel::end_piece(Stripe& stripe) {
  Message& message = *std::exchange(stripe.message, nullptr);
  message.sent += stripe.piece.bytes;
  message.done = message.sent == message.bytes;
  if (message.done) finish_message(*message.request, 0, message.bytes);
  next_message();  // updates the count of begun messages
  while (begun_ > 0 && going_.front().done) {
    going_.pop_front();
    --begun_;
  }
}

void SendChannel::write(Stripe& stripe) {
  for (size_t turn = 0; turn < kTurnBytes;) {
    if (stripe.message == nullptr) {
      Message* next = next_message();
      if (next == nullptr) return;
      begin_piece(stripe, *next);
    }
    iovec parts[2];
    size_t count = 0;
    if (stripe.sent < sizeof stripe.piece) {
      parts[count++] = {reinterpret_cast<std::byte*>(&stripe.piece) + stripe.sent,
                        sizeof stripe.piece - stripe.sent};
    }
    const size_t skipped = stripe.sent - std::min(stripe.sent, sizeof stripe.piece);
    if (stripe.piece.bytes > skipped) {
      const std::byte* from = stripe.message->data + stripe.piece.offset + skipped;
      parts[count++] = {const_cast<std::byte*>(from), stripe.piece.bytes - skipped};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(stripe.fd.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) fail_closed(errno);
    note_moved();
    stripe.sent += static_cast<size_t>(sent);
    turn += static_cast<size_t>(sent);
    if (stripe.sent == sizeof stripe.piece + stripe.piece.bytes) end_piece(stripe);
  }
}

void SendChannel::fail_too_long(const Message& message, uint64_t capacity) const {
  throw_error(HSGD_ERR_SIGNATURE, -1,
              "a message of %zu bytes (tag %d) for %s is longer than its receive of %llu bytes: "
              "the processes disagree on sizes, or on variables such as NCCL_ALGO and NCCL_PROTO",
              message.bytes, message.tag, peer().c_str(),
              static_cast<unsigned long long>(capacity));
}

}  // namespace hsgd::nccl_net
