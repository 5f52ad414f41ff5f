// Handle: where a receiver listens, and the secrets of its connections; and what travels on these:
// structs that are sent as they are (all nodes have one byte order).
//
// The sender connects and says hello with the first secret, the receiver answers with the second
// one, and the sender ends the set-up on all connections at once with kGo: until then it may go
// back. Afterwards grants go to the sender on the first connection, and pieces of messages to the
// receiver on all.
#ifndef HSGD_BINDINGS_NCCL_NET_FRAMES_HPP_
#define HSGD_BINDINGS_NCCL_NET_FRAMES_HPP_

#include <array>
#include <cstddef>
#include <cstdint>

#include "bindings/nccl_net/nccl_tables.hpp"
#include "network/tcp_common/address.hpp"
#include "network/tcp_common/frames.hpp"

namespace hsgd::nccl_net {

constexpr uint32_t kMagic = 0x316e6368;  // "hcn1"; another format needs another number
constexpr uint32_t kGo = 0x6f676368;     // "hcgo"
constexpr uint32_t kStripes = 2;         // connections of a pair, as between nodes

// Written by listen(), which NCCL takes to the sender.
struct Handle {
  uint32_t magic;
  uint32_t pid;
  uint32_t port;  // network order, at all addresses
  uint32_t stripes;
  SocketToken sender_token;    // a process that does not know it is no sender
  SocketToken receiver_token;  // a process that does not know it is not the receiver
  char host[20];
  std::array<uint8_t, 60> addresses;  // see pack_addresses()
};
static_assert(sizeof(Handle) == kHandleBytes, "is exchanged as bytes");

// Writes the first addresses that fit, the preferred one first: for each its version, then its
// bytes. A zero ends them. Returns how many fit.
inline size_t pack_addresses(const IpAddresses& from, Handle& handle) {
  handle.addresses = {};
  size_t at = 0;
  size_t count = 0;
  for (const IpAddress& address : from) {
    const size_t bytes = address.version == 6 ? 16 : 4;
    if (address.version == 0 || at + 1 + bytes > handle.addresses.size()) break;
    handle.addresses[at++] = address.version;
    for (size_t i = 0; i < bytes; ++i) handle.addresses[at++] = address.host[i];
    ++count;
  }
  return count;
}

// Returns the addresses of a handle that another process wrote; those before the first wrong byte.
inline IpAddresses unpack_addresses(const Handle& handle) {
  IpAddresses found{};
  size_t at = 0;
  for (size_t count = 0; count < found.size() && at < handle.addresses.size(); ++count) {
    const uint8_t version = handle.addresses[at++];
    const size_t bytes = version == 6 ? 16 : 4;
    if ((version != 4 && version != 6) || at + bytes > handle.addresses.size()) break;
    found[count].version = version;
    for (size_t i = 0; i < bytes; ++i) found[count].host[i] = handle.addresses[at++];
  }
  return found;
}

// The first message on a connection, from the sender.
struct Hello {
  SocketToken token;
  uint32_t magic;
  uint32_t pid;
  uint64_t connection;  // chosen at random; the same on all stripes
  uint32_t stripe;
  uint32_t stripes;
  char host[24];
};
static_assert(sizeof(Hello) == 64, "is sent as bytes");

// The receiver's answer to a hello.
struct Answer {
  SocketToken token;
  uint32_t magic;
  uint32_t reserved;
};
static_assert(sizeof(Answer) == 24, "is sent as bytes");

// A receive that was posted: the sender may send one message with this tag for it.
struct Grant {
  uint32_t magic;
  int32_t tag;
  uint64_t receive;  // receives are numbered from 0
  uint64_t capacity;
};
static_assert(sizeof(Grant) == 24, "is sent as bytes");

// Header of each piece of a message, whose bytes follow. An empty message has one piece; so has one
// that is longer than its receive, and which both ends report.
struct Piece {
  uint32_t magic;
  uint32_t bytes;
  uint64_t receive;
  uint64_t total;   // bytes of the message
  uint64_t offset;  // offset of this piece in the message
};
static_assert(sizeof(Piece) == 32, "is sent as bytes");

// Maximum length of a piece: the other stripes take the next ones meanwhile.
constexpr size_t kMostPieceBytes = 256 << 10;
// Receives in a group, the maximum that other plugins have, too.
constexpr size_t kMostGrouped = 8;
// Receives that may be open on one connection, and sends.
constexpr size_t kMostOpen = kMostRequests * kMostGrouped;

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_FRAMES_HPP_
