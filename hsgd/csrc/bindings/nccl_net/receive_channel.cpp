#include "bindings/nccl_net/receive_channel.hpp"

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

ReceiveChannel::ReceiveChannel(std::vector<Fd> connections, std::string peer, double timeout_s)
    : Channel(std::move(peer), timeout_s) {
  for (Fd& fd : connections) {
    watch_host(fd.get(), timeout_s, TcpEnd::kReads);
    stripes_.push_back({std::move(fd)});
  }
}

Request* ReceiveChannel::receive(const ReceiveGroup& group) {
  if (receives_.size() + group.count > kMostOpen) return nullptr;
  Request* request = new_request(group.count);
  for (size_t i = 0; i < group.count; ++i) {
    const Grant grant{kMagic, group.tags[i], first_ + receives_.size(), group.capacity[i]};
    const auto* bytes = reinterpret_cast<const std::byte*>(&grant);
    grants_.insert(grants_.end(), bytes, bytes + sizeof grant);
    receives_.push_back(
        {request, i, static_cast<std::byte*>(group.data[i]), group.capacity[i], group.tags[i]});
  }
  write_grants();
  return request;
}

void ReceiveChannel::progress() {
  write_grants();
  for (Stripe& stripe : stripes_) read(stripe);
  if (!is_idle() && all_ended()) fail_closed(0);
  check_time();
}

bool ReceiveChannel::all_ended() const {
  return std::all_of(stripes_.begin(), stripes_.end(),
                     [](const Stripe& stripe) { return stripe.ended; });
}

// A sender that is gone is noticed in read(), behind what it has sent.
void ReceiveChannel::write_grants() {
  while (grants_sent_ < grants_.size()) {
    const ssize_t sent = ::send(stripes_[0].fd.get(), grants_.data() + grants_sent_,
                                grants_.size() - grants_sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return;
    grants_sent_ += static_cast<size_t>(sent);
  }
  grants_.clear();
  grants_sent_ = 0;
}

void ReceiveChannel::read(Stripe& stripe) {
  for (size_t turn = 0; turn < kTurnBytes && !stripe.ended;) {
    if (stripe.into == nullptr && stripe.piece_got == sizeof stripe.piece) begin_piece(stripe);
    if (stripe.into != nullptr && stripe.got == stripe.piece.bytes) {
      end_piece(stripe);
      continue;
    }
    const ssize_t taken = take(stripe);
    if (taken < 0 && errno == EINTR) continue;
    if (taken < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (taken <= 0) {
      const bool is_inside = stripe.into != nullptr || stripe.piece_got > 0;
      if (!is_idle() && (taken < 0 || is_inside)) fail_closed(taken < 0 ? errno : 0);
      stripe.ended = true;
      return;
    }
    note_moved();
    turn += static_cast<size_t>(taken);
  }
}

// Reads the rest of the piece, and as much of the next header as has arrived.
ssize_t ReceiveChannel::take(Stripe& stripe) {
  iovec parts[2];
  size_t count = 0;
  const size_t rest = stripe.into != nullptr ? stripe.piece.bytes - stripe.got : 0;
  Piece next;
  if (rest > 0) {
    parts[count++] = {stripe.into->data + stripe.piece.offset + stripe.got, rest};
    parts[count++] = {&next, sizeof next};
  } else {
    parts[count++] = {reinterpret_cast<std::byte*>(&stripe.piece) + stripe.piece_got,
                      sizeof stripe.piece - stripe.piece_got};
  }
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = count;
  const ssize_t taken = ::recvmsg(stripe.fd.get(), &message, MSG_DONTWAIT);
  if (taken <= 0) return taken;
  const auto bytes = static_cast<size_t>(taken);
  if (rest == 0) {
    stripe.piece_got += bytes;
  } else if (bytes < rest) {
    stripe.got += bytes;
  } else {
    stripe.got += rest;
    end_piece(stripe);
    stripe.piece = next;
    stripe.piece_got = bytes - rest;
  }
  return taken;
}

void ReceiveChannel::begin_piece(Stripe& stripe) {
  const Piece& piece = stripe.piece;
  const bool is_open = piece.receive >= first_ && piece.receive - first_ < receives_.size();
  if (piece.magic != kMagic || !is_open) fail_garbage();
  Receive& receive = receives_[piece.receive - first_];
  if (receive.done) fail_garbage();
  if (piece.total > receive.capacity) fail_too_long(receive, piece.total);
  const bool is_same = !receive.begun || receive.total == piece.total;
  const bool fits = piece.bytes <= kMostPieceBytes && piece.offset <= piece.total &&
                    piece.bytes <= piece.total - piece.offset &&
                    piece.bytes <= piece.total - receive.claimed;
  if (!is_same || !fits || (piece.bytes == 0 && piece.total != 0)) fail_garbage();
  receive.begun = true;
  receive.total = piece.total;
  receive.claimed += piece.bytes;
  stripe.into = &receive;
  stripe.got = 0;
}

void ReceiveChannel::end_piece(Stripe& stripe) {
  Receive& receive = *std::exchange(stripe.into, nullptr);
  stripe.piece_got = 0;
  receive.got += stripe.piece.bytes;
  if (receive.got < receive.total) return;
  receive.done = true;
  finish_message(*receive.request, receive.index, receive.total);
  for (; !receives_.empty() && receives_.front().done; ++first_) receives_.pop_front();
}

void ReceiveChannel::fail_too_long(const Receive& receive, uint64_t total) const {
  throw_error(HSGD_ERR_SIGNATURE, -1,
              "a message of %llu bytes (tag %d) of %s is longer than its receive of %zu bytes: "
              "the processes disagree on sizes, or on variables such as NCCL_ALGO and NCCL_PROTO",
              static_cast<unsigned long long>(total), receive.tag, peer().c_str(),
              receive.capacity);
}

}  // namespace hsgd::nccl_net
