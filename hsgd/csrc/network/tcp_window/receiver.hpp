// SocketReceiver: one connection from another rank; stores its writes in the segment as they
// arrive.
//
// Owns the socket. Writes within one segment only, and trusts nothing before the token. Never
// blocks; has neither lock nor thread.
#ifndef HSGD_NETWORK_TCP_WINDOW_RECEIVER_HPP_
#define HSGD_NETWORK_TCP_WINDOW_RECEIVER_HPP_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/os/shared_memory.hpp"
#include "network/tcp_common/frames.hpp"

namespace hsgd {

class SocketReceiver {
 public:
  // The segment into which others write, and what they must know.
  struct Target {
    std::byte* base;
    size_t bytes;
    SocketToken token;
    int64_t ranks;
  };

  SocketReceiver(Fd fd, const Target& target) : fd_(std::move(fd)), target_(target) {}

  // Takes the available data, but at most a turn's share, and confirms new versions; a few versions
  // only if no rest of a write is on its way. Returns false if the connection ended, or is not from
  // one of our ranks.
  bool receive();
  // Does the same and confirms at once; for a connection that waits() and was not ready for some
  // time.
  bool receive_late();
  // Returns true if it becomes ready only when several bytes are there.
  bool waits() const { return expected_ > 1; }
  uint64_t stored() const { return stored_; }  // versions
  int rank() const;                            // the connected rank; -1: not known yet

 private:
  bool receive_some();
  uint64_t due() const;
  void expect(uint64_t least);
  bool confirm();
  bool tell();
  ssize_t take(void* into, size_t* got, size_t size) const;
  bool knows_us() const;
  bool fits() const;
  void end_slice();

  Fd fd_;
  const Target& target_;
  SocketHello hello_{};
  size_t hello_got_ = 0;
  SocketHeader header_{};
  size_t header_got_ = 0;
  uint64_t data_got_ = 0;
  uint64_t further_ = 0;  // from the last slice
  uint64_t stored_ = 0;
  uint64_t confirmed_ = 0;
  uint64_t received_ = 0;  // bytes
  uint64_t behind_ = 0;    // bytes that came after an unconfirmed version
  int expected_ = 1;       // fewer bytes do not wake the thread
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_WINDOW_RECEIVER_HPP_
