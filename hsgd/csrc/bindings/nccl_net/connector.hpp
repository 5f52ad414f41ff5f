// Connector: a sender's way to its receiver, until all connections are proved.
//
// Owns the sockets until then. Tries the receiver's addresses in turn. Never blocks: step() is
// called again and again. Nothing of a handle is believed but what the other end proves.
#ifndef HSGD_BINDINGS_NCCL_NET_CONNECTOR_HPP_
#define HSGD_BINDINGS_NCCL_NET_CONNECTOR_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/nccl_net/frames.hpp"
#include "bindings/nccl_net/send_channel.hpp"
#include "core/os/shared_memory.hpp"
#include "core/os/wait.hpp"

namespace hsgd::nccl_net {

class Connector {
 public:
  // `interfaces`: this host's, in the form of find_addresses(). Throws HSGD_ERR_ARGUMENT if the
  // handle is none of this version.
  Connector(const Handle& handle, const std::string& interfaces, double timeout_s);

  // Goes on. Returns the channel as soon as the receiver has proved itself, nullptr before. Throws
  // HSGD_ERR_PEER_LOST, HSGD_ERR_TIMEOUT, HSGD_ERR_SYSTEM.
  std::unique_ptr<SendChannel> step();
  // Returns true if step() was not called for so long that nobody will call it any more.
  bool is_abandoned() const { return deadline_.passed(); }

 private:
  struct Line {
    Fd fd;
    bool greeted = false;
    Answer answer{};
    size_t got = 0;
    bool is_proved() const { return got == sizeof answer; }
  };

  void open_all();
  void open(Line& line);
  void advance(Line& line, uint32_t index);
  void come_again(Line& line);
  void change_route(const std::string& why);
  std::unique_ptr<SendChannel> commit();
  std::string where() const;

  const Handle handle_;
  const double timeout_s_;
  const Deadline deadline_;
  std::vector<IpAddress> routes_;
  std::vector<std::string> tried_;  // what each address did
  size_t route_ = 0;
  size_t refused_ = 0;    // addresses in a row
  int64_t route_ns_ = 0;  // time at which the present route was taken
  int tries_ = 0;         // connections that were closed before the answer
  uint64_t channel_ = 0;
  std::vector<Line> lines_;
};

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_CONNECTOR_HPP_
