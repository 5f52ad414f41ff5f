// Hello, then headers and bytes.
#include "socket_receiver.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

namespace hsgd {
namespace {

// What is overtaken by something short keeps it waiting for so many bytes at most: a millisecond at
// 1 Gbit.
constexpr uint64_t kMostTogether = 128 << 10;

}  // namespace

bool SocketReceiver::receive() {
  if (!receive_all()) return false;
  expect();
  return confirm();
}

// What is sure to come, at least: the rest of the write whose slice was the last.
uint64_t SocketReceiver::due() const {
  if (header_got_ < sizeof header_) return further_;
  return header_.bytes - data_got_ + header_.further;
}

// One turn of this thread for several packets, where they are sure to come.
void SocketReceiver::expect() {
  const int bytes = static_cast<int>(std::clamp<uint64_t>(due(), 1, kMostTogether));
  if (bytes == expected_) return;
  // Does nothing but spare turns, and the kernel wakes this thread when it can hold no more.
  if (::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes) == 0) {
    expected_ = bytes;
  }
}

bool SocketReceiver::confirm() {
  if (stored_ == confirmed_ || due() > 0) return true;
  // Eight bytes always fit: a sender has few operations open, and hears.
  const ssize_t told = ::send(fd_.get(), &stored_, sizeof stored_, MSG_NOSIGNAL | MSG_DONTWAIT);
  confirmed_ = stored_;
  return told == sizeof stored_;
}

int SocketReceiver::rank() const {
  return hello_got_ == sizeof hello_ ? static_cast<int>(hello_.rank) : -1;
}

// False when the connection ended, or was not one of ours.
bool SocketReceiver::receive_all() {
  for (;;) {
    ssize_t got = 0;
    if (hello_got_ < sizeof hello_) {
      got = take(&hello_, &hello_got_, sizeof hello_);
      if (hello_got_ == sizeof hello_ && !knows_us()) {
        hello_got_ = 0;  // it is nobody
        return false;
      }
    } else if (header_got_ < sizeof header_) {
      got = take(&header_, &header_got_, sizeof header_);
      if (got > 0 && header_got_ == sizeof header_) {
        data_got_ = 0;
        if (!fits()) return false;
        end_slice();
      }
    } else {
      got = ::recv(fd_.get(), target_.base + header_.offset + data_got_, header_.bytes - data_got_,
                   MSG_DONTWAIT);
      if (got > 0) data_got_ += static_cast<uint64_t>(got);
      end_slice();
    }
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }
}

ssize_t SocketReceiver::take(void* into, size_t* got, size_t size) const {
  const ssize_t more =
      ::recv(fd_.get(), static_cast<std::byte*>(into) + *got, size - *got, MSG_DONTWAIT);
  if (more > 0) *got += static_cast<size_t>(more);
  return more;
}

bool SocketReceiver::knows_us() const {
  return hello_.token == target_.token && hello_.rank >= 0 && hello_.rank < target_.ranks;
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
  // Partner: look() of the exchange. Forbids that the version is seen before the data, which this
  // thread has written; sequentially consistent for the sake of ring(), as in put_notify().
  reinterpret_cast<std::atomic<uint64_t>*>(target_.base + header_.offset)
      ->store(header_.version, std::memory_order_seq_cst);
  ++stored_;
}

}  // namespace hsgd
