// Channel: one direction between two processes, and its requests; what sender and receiver share.
//
// Progress is made in progress() only, which NCCL causes by testing requests in a loop: there is no
// thread. A channel that failed stays so: each further call returns the same result, and nothing is
// sent again. It is used by one thread at a time, as NCCL does.
#ifndef HSGD_BINDINGS_NCCL_NET_CHANNEL_HPP_
#define HSGD_BINDINGS_NCCL_NET_CHANNEL_HPP_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "bindings/nccl_net/frames.hpp"
#include "bindings/nccl_net/plugin_log.hpp"
#include "core/base/error.hpp"

namespace hsgd::nccl_net {

class Channel;

// A send, or a group of receives.
struct Request {
  Channel* channel;
  size_t open;   // messages that are not complete
  size_t count;  // messages
  std::array<size_t, kMostGrouped> bytes;
};

class Channel {
 public:
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  virtual ~Channel() = default;

  // Runs `step` unless the channel has failed; returns its result.
  template <class Step>
  Result run(Step&& step) noexcept {
    if (result_ == kSuccess) result_ = guarded(step);
    return result_;
  }
  // Moves what can be moved now. Throws HSGD_ERR_PEER_LOST, HSGD_ERR_TIMEOUT, HSGD_ERR_SIGNATURE.
  virtual void progress() = 0;
  // Takes back a request that is complete and was reported.
  void release(Request& request) { free_.push_back(&request); }

 protected:
  Channel(std::string peer, double timeout_s) : peer_(std::move(peer)), timeout_s_(timeout_s) {}

  Request* new_request(size_t count);
  void finish_message(Request& request, size_t index, size_t bytes);
  bool is_idle() const { return open_messages_ == 0; }
  // Restarts the time in which something must move.
  void note_moved();
  // Returns how long nothing has moved.
  int64_t silent_ns() const;
  // Throws HSGD_ERR_TIMEOUT if messages are open and nothing has moved for too long.
  void check_time() const;
  // Throws HSGD_ERR_PEER_LOST; `error`: errno, or 0 if the peer closed the connection.
  [[noreturn]] void fail_closed(int error) const;
  [[noreturn]] void fail_garbage() const;
  const std::string& peer() const { return peer_; }

 private:
  const std::string peer_;
  const double timeout_s_;
  Result result_ = kSuccess;
  std::deque<Request> requests_;  // deque: addresses are stable
  std::vector<Request*> free_;
  size_t open_messages_ = 0;
  int64_t moved_ns_ = 0;
};

}  // namespace hsgd::nccl_net

#endif  // HSGD_BINDINGS_NCCL_NET_CHANNEL_HPP_
