// Groups messages, and finishes steps in order.
#include "network/transport/messages.hpp"

#include <algorithm>
#include <utility>

#include "core/base/error.hpp"

namespace hsgd {

void Messages::send(int node, Channel channel, const void* data, size_t bytes,
                    WireCounters& counters) {
  if (bytes == 0) return;
  pending_.push_back(transport_.send(node, channel, data, bytes));
  counters.bytes_sent += bytes;
}

void Messages::receive(int node, Channel channel, void* data, size_t bytes,
                       WireCounters& counters) {
  if (bytes == 0) return;
  pending_.push_back(transport_.receive(node, channel, data, bytes));
  counters.bytes_received += bytes;
}

bool Messages::all_done() {
  for (size_t i = 0; i < pending_.size();) {
    if (transport_.done(pending_[i])) {
      pending_[i] = pending_.back();
      pending_.pop_back();
      progressed_ = true;
    } else {
      ++i;
    }
  }
  return pending_.empty();
}

bool Messages::progressed() { return std::exchange(progressed_, false); }

size_t StepWindow::begin_step() {
  HSGD_CHECK(begun_ < finished_ + slots());
  const size_t slot = begun_++ % slots();
  phases_[slot] = 0;
  return slot;
}

bool StepWindow::progress() {
  bool moved = false;
  int least = kFinished;  // phase of all earlier steps
  for (uint64_t step = finished_; step < begun_; ++step) {
    const size_t slot = step % slots();
    int& phase = phases_[slot];
    moved |= phase != kFinished && advance(slot, phase, phase < least);
    least = std::min(least, phase);
  }
  for (; finished_ < begun_ && phases_[finished_ % slots()] == kFinished; ++finished_) moved = true;
  return moved;
}

StepMessages::StepMessages(Transport& transport, size_t slots, WireCounters& counters)
    : StepWindow(slots), counters_(counters), steps_(slots, Messages(transport)) {}

void StepMessages::send(int node, Channel channel, const void* data, size_t bytes) {
  steps_[current_].send(node, channel, data, bytes, counters_);
}

void StepMessages::receive(int node, Channel channel, void* data, size_t capacity_bytes) {
  WireCounters not_yet;
  steps_[current_].receive(node, channel, data, capacity_bytes, not_yet);
}

bool StepMessages::advance(size_t slot, int& phase, bool) {
  Messages& messages = steps_[slot];
  if (messages.all_done()) phase = kFinished;
  return messages.progressed();
}

}  // namespace hsgd
