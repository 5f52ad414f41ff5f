// ReceiveChannel: receives messages from one sender over several connections.
//
// Grants each receive to the sender, whose data then goes directly into its buffer, from whichever
// connection. What a header says is believed only if it fits. Never blocks.
#ifndef HSGD_BINDINGS_NCCL_NET_RECEIVE_CHANNEL_HPP_
#define HSGD_BINDINGS_NCCL_NET_RECEIVE_CHANNEL_HPP_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "bindings/nccl_net/channel.hpp"
#include "bindings/nccl_net/frames.hpp"
#include "core/os/shared_memory.hpp"

namespace hsgd::nccl_net {

// Receives of one call, by their position.
struct ReceiveGroup {
  size_t count;
  void* const* data;
  const size_t* capacity;
  const int* tags;
};

class ReceiveChannel final : public Channel {
 public:
  ReceiveChannel(std::vector<Fd> connections, std::string peer, double timeout_s);

  // Returns nullptr if too many receives are open. The buffers must stay until the request is
  // complete.
  Request* receive(const ReceiveGroup& group);
  void progress() override;

 private:
  struct Receive {
    Request* request;
    size_t index;  // in its group
    std::byte* data;
    size_t capacity;
    int tag;
    size_t total = 0;
    size_t claimed = 0;  // bytes of pieces that were begun
    size_t got = 0;
    bool begun = false;  // `total` is known
    bool done = false;
  };
  struct Stripe {
    Fd fd;
    Piece piece{};
    size_t piece_got = 0;     // bytes of the header
    Receive* into = nullptr;  // of the piece whose data is read
    size_t got = 0;           // bytes of its data
    bool ended = false;
  };

  void write_grants();
  void read(Stripe& stripe);
  ssize_t take(Stripe& stripe);
  void begin_piece(Stripe& stripe);
  void end_piece(Stripe& stripe);
  bool all_ended() const;
  [[noreturn]] void fail_too_long(const Receive& receive, uint64_t total) const;

  std::vector<Stripe> stripes_;
  std::deque<Receive> receives_;  // deque: addresses are stable
  uint64_t first_ = 0;            // number of the first of receives_
  std::vector<std::byte> grants_;
  size_t grants_sent_ = 0;  // bytes
};

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_RECEIVE_CHANNEL_HPP_
