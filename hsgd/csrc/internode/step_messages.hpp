// Messages between leaders in groups, one group per step of a pipeline, several steps in flight.
//
// Owns the order: a step is finished when its messages and those of all earlier steps have arrived
// and left. Never knows what the messages hold.
#ifndef HSGD_INTERNODE_STEP_MESSAGES_HPP_
#define HSGD_INTERNODE_STEP_MESSAGES_HPP_

#include <cstdint>
#include <vector>

#include "internode/wire.hpp"

namespace hsgd {

class StepMessages {
 public:
  StepMessages(Transport& transport, size_t slots, WireCounters& counters);
  void start();
  void begin();  // the next step, without messages yet: send() and receive() add to it
  void send(int node, Channel channel, const void* data, size_t bytes);
  // The sender decides how much it sends, unless `capacity_bytes` is 0: then there is no message.
  void receive(int node, Channel channel, void* data, size_t capacity_bytes);
  void count_received(size_t bytes) { counters_.bytes_received += bytes; }
  bool progress();  // true when anything moved on
  uint64_t begun() const { return begun_; }
  uint64_t finished() const { return finished_; }

 private:
  Messages& current() { return steps_[(begun_ - 1) % steps_.size()]; }
  WireCounters& counters_;
  std::vector<Messages> steps_;
  uint64_t begun_ = 0;
  uint64_t finished_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_INTERNODE_STEP_MESSAGES_HPP_
