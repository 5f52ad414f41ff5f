// SendChannel: sends messages to one receiver over several connections.
//
// A long message waits for the grant of its receive, a short one only if many of its tag are ahead
// of their receives: no message is in the way of another, and the receiver needs little memory of
// its own. A message is complete when the kernel has all of its bytes. Data is sent without a copy.
// Never blocks.
#ifndef HSGD_BINDINGS_NCCL_NET_SEND_CHANNEL_HPP_
#define HSGD_BINDINGS_NCCL_NET_SEND_CHANNEL_HPP_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "bindings/nccl_net/channel.hpp"
#include "bindings/nccl_net/frames.hpp"
#include "core/os/shared_memory.hpp"

namespace hsgd::nccl_net {

class SendChannel final : public Channel {
 public:
  SendChannel(std::vector<Fd> connections, std::string peer, double timeout_s);

  // Returns nullptr if too many sends are open. `data` must stay until the request is complete.
  Request* send(const void* data, size_t bytes, int tag);
  void progress() override;

 private:
  struct Message {
    Request* request;
    const std::byte* data;
    size_t bytes;
    int tag;
    uint64_t serial;         // among those of its tag
    size_t taken = 0;        // bytes of pieces that were begun
    size_t sent = 0;         // bytes that the kernel has
    bool announced = false;  // a piece was begun; an empty message has one piece, too
    bool done = false;       // the kernel has all pieces
  };
  struct Stripe {
    Fd fd;
    Piece piece{};
    size_t sent = 0;             // bytes of header and data
    Message* message = nullptr;  // whose piece is in progress
  };

  // The messages of a tag.
  struct Numbers {
    uint64_t next = 0;      // of the next message
    uint64_t receives = 0;  // first receives of which this end knows
  };

  void read_grants();
  void take_grant(const Grant& grant);
  bool may_go(const Message& message) const;
  void check_capacity(const Message& message, uint64_t capacity);
  Message* next_message();
  void begin_piece(Stripe& stripe, Message& message);
  void end_piece(Stripe& stripe);
  void write(Stripe& stripe);
  [[noreturn]] void fail_too_long(const Message& message, uint64_t capacity) const;

  Fd control_;  // for grants
  std::vector<Stripe> stripes_;
  std::map<int, Numbers> numbers_;  // by tag
  std::deque<Message> waiting_;     // for a grant, in the order of send()
  std::vector<Grant> grants_;       // without a message, in the order of arrival
  std::deque<Message> going_;       // deque: addresses are stable
  size_t begun_ = 0;                // first messages of going_ without a further piece
  Grant grant_{};                   // as far as it has arrived
  size_t grant_got_ = 0;
  bool ended_ = false;  // the receiver closed its end
};

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_SEND_CHANNEL_HPP_
