#include "bindings/nccl_net/channel.hpp"

#include <cstring>

#include "core/os/wait.hpp"

namespace hsgd::nccl_net {

Request* Channel::new_request(size_t count) {
  if (free_.empty()) {
    requests_.emplace_back();
    free_.reserve(requests_.size());
    free_.push_back(&requests_.back());
  }
  Request* request = free_.back();
  free_.pop_back();
  *request = {this, count, count, {}};
  if (open_messages_ == 0) note_moved();
  open_messages_ += count;
  return request;
}

void Channel::finish_message(Request& request, size_t index, size_t bytes) {
  request.bytes[index] = bytes;
  --request.open;
  --open_messages_;
}

void Channel::note_moved() { moved_ns_ = now_ns(); }

int64_t Channel::silent_ns() const { return now_ns() - moved_ns_; }

void Channel::check_time() const {
  if (open_messages_ == 0 || static_cast<double>(silent_ns()) < timeout_s_ * 1e9) return;
  throw_error(HSGD_ERR_TIMEOUT, -1,
              "no byte moved for %g s between this process and %s, with %zu messages under way: "
              "that process is stopped or hangs, or the link is cut; HSGD_TIMEOUT_S sets the limit",
              timeout_s_, peer_.c_str(), open_messages_);
}

void Channel::fail_closed(int error) const {
  throw_error(HSGD_ERR_PEER_LOST, -1,
              "the connection to %s ended (%s) with %zu messages under way: that process died, "
              "gave up, or was cut off",
              peer_.c_str(), error == 0 ? "it was closed" : std::strerror(error), open_messages_);
}

void Channel::fail_garbage() const {
  throw_error(HSGD_ERR_PEER_LOST, -1,
              "%s sent invalid data; use the same version of hsgd in all processes", peer_.c_str());
}

}  // namespace hsgd::nccl_net
