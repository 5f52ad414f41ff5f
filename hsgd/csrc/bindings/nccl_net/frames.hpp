// Handle: where a receiver listens, and the secrets of its connections; and what travels on these:
// structs that are sent as they are (all nodes have one byte order).
//
// The sender connects and says hello with the first secret, the receiver answers with the second
// one, and the sender ends the set-up on all connections at once with kGo: until then it may go
// back. Afterwards grants go to the sender on the first connection, and pieces of messages to
// the receiver on the others.
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
// Connections of a pair: the first one for grants, and two for data, as between nodes. No
// connection for data carries anything back: the kernel delivers what it has after the sender has
// closed it, unless the other end sends.
constexpr uint32_t kConnections = 3;

// Written by listen(), which NCCL takes to the sender.
struct Handle {
  uint32_t magic;
  uint32_t pid;
  uint32_t port;  // network order, at all addresses
  uint32_t connections;
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
  uint64_t channel;  // chosen at random; the same on all connections
  uint32_t connection;
  uint32_t connections;
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

// A receive that was posted: the message with its number may come, whatever its length. Receives
// and messages of each tag are numbered from 0: those with the same number belong together.
struct Grant {
  uint32_t magic;
  int32_t tag;
  uint64_t serial;
  uint64_t capacity;
};
static_assert(sizeof(Grant) == 24, "is sent as bytes");

// Header of each piece of a message, whose bytes follow. An empty message has one piece; so has one
// that is longer than its receive, and which both ends report.
struct Piece {
  uint32_t magic;
  uint32_t bytes;
  int32_t tag;
  uint32_t reserved;
  uint64_t serial;
  uint64_t total;   // bytes of the message
  uint64_t offset;  // offset of this piece in the message
};
static_assert(sizeof(Piece) == 40, "is sent as bytes");

// A message of at most this length need not wait for its grant: the receiver keeps a copy if its
// receive is not posted yet.
constexpr size_t kMostEagerBytes = 16 << 10;
// Such a message may be this far ahead of the receives of its tag that the sender knows of: this
// limits the copies.
constexpr uint64_t kMostAhead = 16;
// Every so many receives of a tag are granted even if they are short, so that the sender knows.
constexpr uint64_t kGrantEvery = 8;
// Maximum length of a piece: the other connections take the next ones meanwhile.
constexpr size_t kMostPieceBytes = 1 << 20;
// Receives in a group, the maximum that other plugins have, too.
constexpr size_t kMostGrouped = 8;
// Receives that may be open on one connection, and sends.
constexpr size_t kMostOpen = kMostRequests * kMostGrouped;
// Short messages that a receiver keeps, of all tags: a sender has at most kMostAhead of each.
constexpr size_t kMostEarly = 4096;

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_FRAMES_HPP_
