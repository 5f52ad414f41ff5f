// Hello, then headers and bytes.
#include "socket_receiver.hpp"

#include <sys/socket.h>

#include <atomic>
#include <cerrno>

namespace hsgd {

bool SocketReceiver::receive() {
  const uint64_t before = stored_;
  const bool alive = receive_all();
  if (stored_ == before) return alive;
  // Eight bytes always fit: a sender has few operations open, and hears.
  const ssize_t told = ::send(fd_.get(), &stored_, sizeof stored_, MSG_NOSIGNAL | MSG_DONTWAIT);
  return alive && told == sizeof stored_;
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
  if (header_.version == 0) return;
  // Partner: look() of the exchange. Forbids that the version is seen before the data, which this
  // thread has written; sequentially consistent for the sake of ring(), as in put_notify().
  reinterpret_cast<std::atomic<uint64_t>*>(target_.base + header_.offset)
      ->store(header_.version, std::memory_order_seq_cst);
  ++stored_;
}

}  // namespace hsgd
