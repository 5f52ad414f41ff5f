// One connection from another rank: its writes go where they belong as they come.
//
// Owns the socket and the state of the stream. Writes within one segment only, and believes nothing
// before the token. Never blocks, and has neither lock nor thread.
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
  // What others may write into, and what they have to know.
  struct Target {
    std::byte* base;
    size_t bytes;
    SocketToken token;
    int64_t ranks;
  };

  SocketReceiver(Fd fd, const Target& target) : fd_(std::move(fd)), target_(target) {}

  // Takes what is there, but not more than a turn's share, and tells the other side of new
  // versions: of few only when no rest of a write is on its way. False: the connection ended, or
  // was not one of ours.
  bool receive();
  // For a connection that waits() and was not ready for some time: the same, and tells at once.
  bool receive_late();
  // Whether it is ready only when several bytes are there.
  bool waits() const { return expected_ > 1; }
  uint64_t stored() const { return stored_; }  // versions
  int rank() const;                            // whose connection it is; -1: not said yet

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
  uint64_t further_ = 0;  // as the last slice said
  uint64_t stored_ = 0;
  uint64_t confirmed_ = 0;
  uint64_t received_ = 0;  // bytes
  uint64_t behind_ = 0;    // bytes that came after a version that is not confirmed
  int expected_ = 1;       // bytes: fewer do not wake the thread
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_WINDOW_RECEIVER_HPP_
