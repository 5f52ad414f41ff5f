// Acceptor: a receiver that listens, until all connections of a sender are proved.
//
// Owns the listening sockets and the connections that came. Strangers cost a descriptor for a few
// seconds, and never more than SocketDoor lets in. Never blocks: step() is called again and again.
#ifndef HSGD_BINDINGS_NCCL_NET_ACCEPTOR_HPP_
#define HSGD_BINDINGS_NCCL_NET_ACCEPTOR_HPP_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/nccl_net/frames.hpp"
#include "bindings/nccl_net/receive_channel.hpp"
#include "core/os/shared_memory.hpp"
#include "core/os/wait.hpp"
#include "network/tcp_common/door.hpp"

namespace hsgd::nccl_net {

class Acceptor {
 public:
  // Listens from now on, and fills the handle. `where`: see SocketListener, whose errors it throws.
  Acceptor(const std::string& where, double timeout_s, Handle* handle);

  // Goes on. Returns the channel of a sender whose connections are complete; nullptr if there is
  // none yet. Throws HSGD_ERR_TIMEOUT, counted from the first call after the last channel.
  std::unique_ptr<ReceiveChannel> step();

 private:
  // A connection that has not said hello.
  struct Guest {
    Fd fd;
    Hello hello{};
    size_t got = 0;
  };
  // A connection that has proved itself, with its kGo as far as it has arrived.
  struct Line {
    Fd fd;
    uint32_t word = 0;
    size_t got = 0;
    bool is_ready() const { return got == sizeof word && word == kGo; }
  };
  struct Arrival {
    Hello hello{};
    std::vector<Line> lines;
  };

  void let_in();
  void hear(int fd);
  void hear_last(int fd);
  void show_out(int fd);
  bool is_expected(const Hello& hello) const;
  static bool is_complete(Arrival& arrival);
  static bool is_gone(const Arrival& arrival);
  std::unique_ptr<ReceiveChannel> make_channel(Arrival& arrival) const;

  const double timeout_s_;
  std::optional<Deadline> deadline_;
  SocketToken sender_token_{};
  SocketToken receiver_token_{};
  Fd poll_;
  std::optional<SocketDoor> door_;
  std::map<int, Guest> guests_;           // by descriptor
  std::map<uint64_t, Arrival> arrivals_;  // by Hello::channel
};

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_ACCEPTOR_HPP_
