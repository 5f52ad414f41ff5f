// What goes over a connection between two ranks: the format, for both of its ends.
//
// Owns the structs, which are sent as they are. Never sends.
#ifndef HSGD_NETWORK_TCP_COMMON_FRAMES_HPP_
#define HSGD_NETWORK_TCP_COMMON_FRAMES_HPP_

#include <array>
#include <cstdint>

namespace hsgd {

using SocketToken = std::array<uint8_t, 16>;

// The first thing on a connection. Nothing follows before the target has answered it with a zero,
// as with a number of versions.
struct SocketHello {
  SocketToken token;  // the target's: who does not know it is no rank
  int64_t rank;       // who writes
};
static_assert(sizeof(SocketHello) == 24, "is sent as bytes");

// What comes before each slice of a write. A version has no bytes after it. Back comes, now and
// then, how many versions have been stored, as uint64_t.
struct SocketHeader {
  uint64_t offset;
  uint64_t bytes;
  uint64_t version;  // 0: data
  uint64_t further;  // bytes of the same write that come after this slice
};
static_assert(sizeof(SocketHeader) == 32, "is sent as bytes");

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_COMMON_FRAMES_HPP_
