// Frames of a connection between two ranks: structs that are sent as they are.
#ifndef HSGD_NETWORK_TCP_COMMON_FRAMES_HPP_
#define HSGD_NETWORK_TCP_COMMON_FRAMES_HPP_

#include <array>
#include <cstdint>

namespace hsgd {

using SocketToken = std::array<uint8_t, 16>;

// The first message on a connection. Nothing follows before the target has answered with a zero, in
// the form of a number of versions.
struct SocketHello {
  SocketToken token;  // the target's: a process that does not know it is not a rank
  int64_t rank;       // the writer
};
static_assert(sizeof(SocketHello) == 24, "is sent as bytes");

// Header of each slice of a write. A version has no bytes after it. The target sometimes sends back
// how many versions have been stored, as uint64_t.
struct SocketHeader {
  uint64_t offset;
  uint64_t bytes;
  uint64_t version;  // 0: data
  uint64_t further;  // bytes of the same write after this slice
};
static_assert(sizeof(SocketHeader) == 32, "is sent as bytes");

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_COMMON_FRAMES_HPP_
