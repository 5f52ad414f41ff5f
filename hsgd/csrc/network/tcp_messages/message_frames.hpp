// What goes over the connections between two leaders: the format, for both of their ends.
//
// Owns the structs, which are sent as they are (all nodes have one byte order), and which
// connection carries what. Never sends.
#ifndef HSGD_NETWORK_TCP_MESSAGES_MESSAGE_FRAMES_HPP_
#define HSGD_NETWORK_TCP_MESSAGES_MESSAGE_FRAMES_HPP_

#include <cstddef>
#include <cstdint>

#include "network/tcp_common/frames.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

constexpr uint32_t kLeaderMagic = 0x31646c68;  // "hld1"; another number for another format

// The first thing on a connection, of who connects. Nothing follows before kLeaderMagic has come
// back.
struct LeaderHello {
  SocketToken token;  // the other leader's: who does not know it is no rank
  uint32_t magic;
  int32_t node;        // who connects
  int32_t connection;  // which of the pair's
  int32_t connections;
};
static_assert(sizeof(LeaderHello) == 32, "is sent as bytes");

// Comes before each piece of a message. The messages of a channel are numbered from 0 on; on one
// connection their numbers rise.
struct MessageFrame {
  uint64_t serial;
  uint64_t total;   // bytes of the message
  uint64_t offset;  // of this piece in it
  uint32_t bytes;   // of this piece, which follow
  uint32_t magic;
};
static_assert(sizeof(MessageFrame) == 32, "is sent as bytes");

// A piece is no longer: the other connections of the channel take the next ones meanwhile.
constexpr size_t kMostFrameBytes = 256 << 10;

// The connections of each pair of nodes. The first carries a Parting each way, and nothing else: it
// is never behind data. Each channel has its own, so that a message whose receive is not posted yet
// keeps no other channel waiting, and needs no memory but the kernel's.
class ConnectionPlan {
 public:
  static constexpr int kControl = 0;
  static constexpr int kChannels = 5;
  // Few nodes have several for each channel of bulk data: one connection does not fill a fast link.
  static constexpr int kFewNodes = 16;
  static constexpr int kStripes = 2;

  explicit ConnectionPlan(int nodes) : stripes_(nodes <= kFewNodes ? kStripes : 1) {}
  // Of one pair.
  int count() const { return 2 + (kChannels - 1) * stripes_; }
  // Index of the channel of a connection other than the first: 0 is the headers', which has one.
  int channel(int connection) const {
    return connection == 1 ? 0 : 1 + (connection - 2) / stripes_;
  }
  static int index_of(Channel channel) { return static_cast<int>(channel) - 1; }

 private:
  int stripes_;
};
static_assert(static_cast<int>(Channel::kHeader) == 1 &&
                  static_cast<int>(Channel::kExchange) == ConnectionPlan::kChannels,
              "channels are counted from 1");

}  // namespace hsgd

#endif  // HSGD_NETWORK_TCP_MESSAGES_MESSAGE_FRAMES_HPP_
