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
// After so long without data, all receives are granted.
constexpr int64_t kSilentNs = 5'000'000;

}  // namespace

ReceiveChannel::ReceiveChannel(std::vector<Fd> connections, std::string peer, double timeout_s)
    : Channel(std::move(peer), timeout_s) {
  control_ = std::move(connections[0]);
  watch_host(control_.get(), timeout_s, TcpEnd::kWrites);
  for (size_t i = 1; i < connections.size(); ++i) {
    watch_host(connections[i].get(), timeout_s, TcpEnd::kReads);
    stripes_.push_back({std::move(connections[i])});
  }
}

Request* ReceiveChannel::receive(const ReceiveGroup& group) {
  if (receives_.size() + group.count > kMostOpen) return nullptr;
  Request* request = new_request(group.count);
  for (size_t i = 0; i < group.count; ++i) {
    const uint64_t serial = posted_[group.tags[i]]++;
    receives_.push_back({request, i, static_cast<std::byte*>(group.data[i]), group.capacity[i],
                         group.tags[i], serial, false});
    Receive& receive = receives_.back();
    if (receive.capacity > kMostEagerBytes || serial % kGrantEvery == kGrantEvery - 1) {
      grant(receive);
    }
    take_early(receive);
  }
  write_grants();
  return request;
}

void ReceiveChannel::grant(Receive& receive) {
  const Grant grant{kMagic, receive.tag, receive.serial, receive.capacity};
  const auto* bytes = reinterpret_cast<const std::byte*>(&grant);
  grants_.insert(grants_.end(), bytes, bytes + sizeof grant);
  receive.granted = true;
}

// Grants short receives, too: the sender may have a message that is too long for one of them, and
// would wait.
void ReceiveChannel::grant_all() {
  for (Receive& receive : receives_) {
    if (!receive.granted && !receive.done) grant(receive);
  }
}

void ReceiveChannel::take_early(Receive& receive) {
  const auto found = std::find_if(early_.begin(), early_.end(), [&](const Early& each) {
    return each.tag == receive.tag && each.serial == receive.serial;
  });
  if (found == early_.end()) return;
  if (found->data.size() > receive.capacity) fail_too_long(receive, found->data.size());
  receive.is_kept = true;
  if (found->complete) {
    deliver(*found, receive);
  } else {
    found->receive = &receive;
  }
}

void ReceiveChannel::deliver(Early& early, Receive& receive) {
  std::copy(early.data.begin(), early.data.end(), receive.data);
  receive.total = early.data.size();
  early_.remove_if([&](const Early& each) { return &each == &early; });
  finish(receive);
}

void ReceiveChannel::finish(Receive& receive) {
  receive.done = true;
  finish_message(*receive.request, receive.index, receive.total);
  while (!receives_.empty() && receives_.front().done) receives_.pop_front();
}

void ReceiveChannel::progress() {
  write_grants();
  for (Stripe& stripe : stripes_) read(stripe);
  if (is_idle()) return;
  if (all_ended()) fail_closed(0);
  if (silent_ns() > kSilentNs) grant_all();
  check_time();
}

bool ReceiveChannel::all_ended() const {
  return std::all_of(stripes_.begin(), stripes_.end(),
                     [](const Stripe& stripe) { return stripe.ended; });
}

// A sender that is gone is noticed in read(), behind what it has sent.
void ReceiveChannel::write_grants() {
  while (grants_sent_ < grants_.size()) {
    const ssize_t sent = ::send(control_.get(), grants_.data() + grants_sent_,
                                grants_.size() - grants_sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) break;  // the sender has closed
    grants_sent_ += static_cast<size_t>(sent);
  }
  grants_.clear();
  grants_sent_ = 0;
}

void ReceiveChannel::read(Stripe& stripe) {
  for (size_t turn = 0; turn < kTurnBytes && !stripe.ended;) {
    if (!stripe.is_inside() && stripe.piece_got == sizeof stripe.piece) begin_piece(stripe);
    if (stripe.is_inside() && stripe.got == stripe.piece.bytes) {
      end_piece(stripe);
      continue;
    }
    const ssize_t taken = take(stripe);
    if (taken < 0 && errno == EINTR) continue;
    if (taken < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (taken <= 0) {
      const bool is_cut = stripe.is_inside() || stripe.piece_got > 0;
      if (!is_idle() && (taken < 0 || is_cut)) fail_closed(taken < 0 ? errno : 0);
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
  const size_t rest = stripe.is_inside() ? stripe.piece.bytes - stripe.got : 0;
  Piece next;
  if (rest > 0) {
    parts[count++] = {stripe.data + stripe.piece.offset + stripe.got, rest};
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
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const Receive& each) {
    return each.serial == piece.serial && each.tag == piece.tag && !each.done;
  });
  if (piece.magic != kMagic) fail_garbage();
  if (found == receives_.end()) return begin_early(stripe);
  Receive& receive = *found;
  if (piece.total > receive.capacity) fail_too_long(receive, piece.total);
  const bool is_same = !receive.begun || receive.total == piece.total;
  const bool fits = piece.bytes <= kMostPieceBytes && piece.offset <= piece.total &&
                    piece.bytes <= piece.total - piece.offset &&
                    piece.bytes <= piece.total - receive.claimed;
  const bool is_empty = piece.bytes == 0 && piece.total != 0;
  if (receive.is_kept || !is_same || !fits || is_empty) fail_garbage();
  receive.begun = true;
  receive.total = piece.total;
  receive.claimed += piece.bytes;
  stripe.into = &receive;
  stripe.data = receive.data;
  stripe.got = 0;
}

// Begins a short message whose receive is not posted.
void ReceiveChannel::begin_early(Stripe& stripe) {
  const Piece& piece = stripe.piece;
  const auto known = posted_.find(piece.tag);
  const uint64_t next = known == posted_.end() ? 0 : known->second;
  const bool is_ahead = piece.serial >= next && piece.serial - next < kMostAhead;
  const bool is_twice = std::any_of(early_.begin(), early_.end(), [&](const Early& each) {
    return each.tag == piece.tag && each.serial == piece.serial;
  });
  const bool is_whole = piece.offset == 0 && piece.bytes == piece.total;
  const bool fits = piece.total <= kMostEagerBytes && early_.size() < kMostEarly;
  if (!is_ahead || is_twice || !is_whole || !fits) fail_garbage();
  early_.push_back({piece.tag, piece.serial, std::vector<std::byte>(piece.total)});
  stripe.early = &early_.back();
  stripe.data = stripe.early->data.data();
  stripe.got = 0;
}

void ReceiveChannel::end_piece(Stripe& stripe) {
  stripe.piece_got = 0;
  if (Early* early = std::exchange(stripe.early, nullptr); early != nullptr) {
    early->complete = true;
    if (early->receive != nullptr) deliver(*early, *early->receive);
    return;
  }
  Receive& receive = *std::exchange(stripe.into, nullptr);
  receive.got += stripe.piece.bytes;
  if (receive.got == receive.total) finish(receive);
}

void ReceiveChannel::fail_too_long(const Receive& receive, uint64_t total) const {
  throw_error(HSGD_ERR_SIGNATURE, -1,
              "a message of %llu bytes (tag %d) of %s is longer than its receive of %zu bytes: "
              "the processes disagree on sizes, or on variables such as NCCL_ALGO and NCCL_PROTO",
              static_cast<unsigned long long>(total), receive.tag, peer().c_str(),
              receive.capacity);
}

}  // namespace hsgd::nccl_net
