// The messages of one step.
#include "collectives/block_exchange.hpp"

#include "base/fault_points.hpp"

namespace hsgd {

BlockExchange::BlockExchange(Context& context, const Stages& stages)
    : ChunkPipeline(context, stages), map_(context.map()), messages_(context.links().messages()) {
  if (messages_ != nullptr) messages_->start();
}

// Both sides go through the ranks of a node in the same order, because messages between two leaders
// are matched in order.
void BlockExchange::begin_exchange(uint64_t step) {
  messages_->begin();
  const int me = map_.node();
  const int nodes = map_.nodes();
  for (int i = 1; i < nodes; ++i) {
    const int from = (me + nodes - i) % nodes;
    for (int place = map_.first(from); place < map_.end(from); ++place) {
      if (carries(place)) receive(step, place);
    }
  }
  for (int place = map_.first(me); place < map_.end(me); ++place) {
    if (carries(place)) send(step, place, in_slot(place - map_.first(me), step));
  }
  HSGD_FAULT_POINT("between nodes: block sent");
}

void BlockExchange::end_exchange(uint64_t step) {
  for (int place = 0; place < map_.size(); ++place) {
    if (!map_.is_here(place) && carries(place)) {
      messages_->count_received(received_bytes(step, place));
    }
  }
}

Stages stages_of_exchange(Context& context, const Operation& operation, uint64_t steps) {
  Stages stages;
  stages.steps = steps;
  stages.leaders = context.place().leaders;
  stages.window = context.links().messages();
  stages.store = context.stores().into_ring(operation);
  stages.out_store = context.stores().into_output(operation);
  return stages;
}

}  // namespace hsgd
