// Groups of messages, finished in order.
#include "internode/step_messages.hpp"

#include "base/error.hpp"

namespace hsgd {

StepMessages::StepMessages(Transport& transport, size_t slots, WireCounters& counters)
    : counters_(counters), steps_(slots, Messages(transport)) {}

void StepMessages::start() { begun_ = finished_ = 0; }

void StepMessages::begin() {
  HSGD_CHECK(begun_ < finished_ + steps_.size());
  ++begun_;
}

void StepMessages::send(int node, Channel channel, const void* data, size_t bytes) {
  current().send(node, channel, data, bytes, counters_);
}

void StepMessages::receive(int node, Channel channel, void* data, size_t capacity_bytes) {
  WireCounters not_yet;
  current().receive(node, channel, data, capacity_bytes, not_yet);
}

bool StepMessages::progress() {
  bool moved = false;
  for (uint64_t step = finished_; step < begun_; ++step) {
    Messages& messages = steps_[step % steps_.size()];
    const bool done = messages.all_done();
    moved |= messages.progressed();
    if (done && step == finished_) {
      ++finished_;
      moved = true;
    }
  }
  return moved;
}

}  // namespace hsgd
