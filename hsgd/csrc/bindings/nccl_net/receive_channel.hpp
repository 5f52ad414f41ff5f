// ReceiveChannel: receives messages from one sender over several connections.
//
// Grants long receives to the sender, whose data then goes directly into their buffers, from
// whichever connection. A short message may come before its receive, and is kept until then. What a
// header says is believed only if it fits. Never blocks.
#ifndef HSGD_BINDINGS_NCCL_NET_RECEIVE_CHANNEL_HPP_
#define HSGD_BINDINGS_NCCL_NET_RECEIVE_CHANNEL_HPP_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
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
    uint64_t serial;  // among those of its tag
    bool granted;     // the sender was told
    size_t total = 0;
    size_t claimed = 0;  // bytes of pieces that were begun
    size_t got = 0;
    bool begun = false;    // `total` is known
    bool is_kept = false;  // its message is in early_
    bool done = false;
  };
  // A short message that came before its receive.
  struct Early {
    int tag;
    uint64_t serial;
    std::vector<std::byte> data;
    bool complete = false;
    Receive* receive = nullptr;  // posted before the message was complete
  };
  struct Stripe {
    Fd fd;
    Piece piece{};
    size_t piece_got = 0;       // bytes of the header
    Receive* into = nullptr;    // of the piece whose data is read
    Early* early = nullptr;     // if it has no receive yet
    std::byte* data = nullptr;  // where that data goes
    size_t got = 0;             // bytes of it
    bool is_inside() const { return into != nullptr || early != nullptr; }
    bool ended = false;
  };

  void grant(Receive& receive);
  void grant_all();
  void take_early(Receive& receive);
  void deliver(Early& early, Receive& receive);
  void begin_early(Stripe& stripe);
  void finish(Receive& receive);
  void write_grants();
  void read(Stripe& stripe);
  ssize_t take(Stripe& stripe);
  void begin_piece(Stripe& stripe);
  void end_piece(Stripe& stripe);
  bool all_ended() const;
  [[noreturn]] void fail_too_long(const Receive& receive, uint64_t total) const;

  Fd control_;  // for grants
  std::vector<Stripe> stripes_;
  std::deque<Receive> receives_;    // deque: addresses are stable
  std::map<int, uint64_t> posted_;  // receives, by tag
  std::list<Early> early_;          // list: addresses are stable
  std::vector<std::byte> grants_;
  size_t grants_sent_ = 0;  // bytes
};

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_RECEIVE_CHANNEL_HPP_
