// Frames of the connections between two leaders: structs that are sent as they are (all nodes have
// one byte order), and which connection carries which messages.
#ifndef HSGD_NETWORK_TCP_MESSAGES_MESSAGE_FRAMES_HPP_
#define HSGD_NETWORK_TCP_MESSAGES_MESSAGE_FRAMES_HPP_

#include <cstddef>
#include <cstdint>

#include "network/tcp_common/frames.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

constexpr uint32_t kLeaderMagic = 0x31646c68;  // "hld1"; another format needs another number

// The first message on a connection, from the leader that connects. Nothing follows before
// kLeaderMagic has come back.
struct LeaderHello {
  SocketToken token;  // the other leader's: a process that does not know it is not a rank
  uint32_t magic;
  int32_t node;        // the node that connects
  int32_t connection;  // index among the pair's connections
  int32_t connections;
};
static_assert(sizeof(LeaderHello) == 32, "is sent as bytes");

// Header of each piece of a message. The messages of a channel are numbered from 0; on one
// connection their numbers increase.
struct MessageFrame {
  uint64_t serial;
  uint64_t total;   // bytes of the message
  uint64_t offset;  // offset of this piece in the message
  uint32_t bytes;   // bytes of this piece, which follow
  uint32_t magic;
};
static_assert(sizeof(MessageFrame) == 32, "is sent as bytes");

// Maximum length of a piece: the other connections of the channel take the next pieces meanwhile.
constexpr size_t kMostFrameBytes = 256 << 10;

// The connections of each pair of nodes. The first carries only a Parting each way, which is never
// behind data. Each channel has its own connections: a message whose receive is not posted yet
// delays no other channel, and needs only kernel memory.
class ConnectionPlan {
 public:
  static constexpr int kControl = 0;
  static constexpr int kChannels = 5;
  // With few nodes, each channel of bulk data has several connections: one does not fill a fast
  // link.
  static constexpr int kFewNodes = 16;
  static constexpr int kStripes = 2;

  explicit ConnectionPlan(int nodes) : stripes_(nodes <= kFewNodes ? kStripes : 1) {}
  // Returns the number of connections of one pair.
  int count() const { return 2 + (kChannels - 1) * stripes_; }
  // Returns the index of the channel of a connection, except the first. Channel 0 is for headers
  // and has one connection.
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
