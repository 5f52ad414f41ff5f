// Reads the hello, then headers and bytes.
#include "network/tcp_window/receiver.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "node/rendezvous/secret.hpp"

namespace hsgd {
namespace {

// Most bytes for which the thread waits: a write that is overtaken by a short one is delayed by at
// most so many, a millisecond at 1 Gbit.
constexpr uint64_t kMostTogether = 128 << 10;
// Bytes per turn: other connections and confirmations wait meanwhile.
constexpr uint64_t kTurnBytes = 1 << 20;
// While more data is on its way, versions are confirmed after so many versions, or after so many
// further bytes: so a sender that never pauses gets room for new ones, too.
constexpr uint64_t kMostUnconfirmed = 4;
constexpr uint64_t kMostBehind = 512 << 10;

}  // namespace

bool SocketReceiver::receive() {
  if (!receive_some()) return false;
  expect(due());
  const bool enough = stored_ - confirmed_ >= kMostUnconfirmed || behind_ >= kMostBehind;
  return enough || due() == 0 ? confirm() : true;
}

bool SocketReceiver::receive_late() {
  const uint64_t before = received_;
  if (!receive_some()) return false;
  expect(received_ == before ? 1 : due());
  return confirm();
}

// Returns the bytes that are sure to come: the rest of the write to which the last slice belongs.
uint64_t SocketReceiver::due() const {
  if (header_got_ < sizeof header_) return further_;
  return header_.bytes - data_got_ + header_.further;
}

// Makes one turn of this thread serve several packets, if they are sure to come.
void SocketReceiver::expect(uint64_t least) {
  const int bytes = static_cast<int>(std::clamp<uint64_t>(least, 1, kMostTogether));
  if (bytes == expected_) return;
  // Only saves turns. The kernel's buffer may be smaller (before Linux 5.7), and a slow link takes
  // long: see receive_late().
  if (::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes) == 0) {
    expected_ = bytes;
  }
}

bool SocketReceiver::confirm() { return stored_ == confirmed_ || tell(); }

bool SocketReceiver::tell() {
  // Eight bytes always fit: a sender has few operations open, and reads confirmations.
  const ssize_t sent = ::send(fd_.get(), &stored_, sizeof stored_, MSG_NOSIGNAL | MSG_DONTWAIT);
  confirmed_ = stored_;
  behind_ = 0;
  return sent == sizeof stored_;
}

int SocketReceiver::rank() const {
  return hello_got_ == sizeof hello_ ? static_cast<int>(hello_.rank) : -1;
}

// Returns false if the connection ended, or is not from one of our ranks.
bool SocketReceiver::receive_some() {
  for (const uint64_t before = received_; received_ - before < kTurnBytes;) {
    ssize_t got = 0;
    if (hello_got_ < sizeof hello_) {
      got = take(&hello_, &hello_got_, sizeof hello_);
      if (hello_got_ == sizeof hello_) {
        if (!knows_us()) {
          hello_got_ = 0;  // the rank is not known yet
          return false;
        }
        if (!tell()) return false;
      }
    } else if (header_got_ < sizeof header_) {
      got = take(&header_, &header_got_, sizeof header_);
      if (got > 0 && header_got_ == sizeof header_) {
        data_got_ = 0;
        if (!fits()) return false;
        end_slice();
      }
    } else {
      got = ::recv(fd_.get(), target_.base + header_.offset + data_got_,
                   std::min(header_.bytes - data_got_, kTurnBytes), MSG_DONTWAIT);
      if (got > 0) data_got_ += static_cast<uint64_t>(got);
      end_slice();
    }
    if (got > 0) {
      received_ += static_cast<uint64_t>(got);
      if (stored_ != confirmed_) behind_ += static_cast<uint64_t>(got);
    } else if (got == 0 || errno != EINTR) {
      return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    }
  }
  return true;
}

ssize_t SocketReceiver::take(void* into, size_t* got, size_t size) const {
  const ssize_t more =
      ::recv(fd_.get(), static_cast<std::byte*>(into) + *got, size - *got, MSG_DONTWAIT);
  if (more > 0) *got += static_cast<size_t>(more);
  return more;
}

bool SocketReceiver::knows_us() const {
  const auto& token = target_.token;
  return is_same_secret(hello_.token.data(), token.data(), token.size()) && hello_.rank >= 0 &&
         hello_.rank < target_.ranks;
}

bool SocketReceiver::fits() const {
  if (header_.version != 0) {
    return header_.bytes == 0 && header_.offset % sizeof(uint64_t) == 0 &&
           target_.bytes >= sizeof(uint64_t) && header_.offset <= target_.bytes - sizeof(uint64_t);
  }
  return header_.offset <= target_.bytes && header_.bytes <= target_.bytes - header_.offset;
}

void SocketReceiver::end_slice() {
  if (header_got_ < sizeof header_ || data_got_ < header_.bytes) return;
  header_got_ = 0;
  further_ = header_.further;
  if (header_.version == 0) return;
  // Partner: look() of the window. A reader that sees the version sees the data, which this thread
  // has written. Sequentially consistent because ring() needs it, as in put_notify().
  reinterpret_cast<std::atomic<uint64_t>*>(target_.base + header_.offset)
      ->store(header_.version, std::memory_order_seq_cst);
  ++stored_;
}

}  // namespace hsgd
