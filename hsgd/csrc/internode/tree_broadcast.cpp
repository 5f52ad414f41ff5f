// The edges of the tree, and what goes along them.
#include "internode/tree_broadcast.hpp"

#include "base/fault_points.hpp"

namespace hsgd {

TreeBroadcast::TreeBroadcast(Transport& transport, size_t slots, WireCounters& counters)
    : StepWindow(slots), transport_(transport), counters_(counters) {
  for (size_t slot = 0; slot < slots; ++slot) chunks_.emplace_back(transport);
}

void TreeBroadcast::start(int root_node, bool chain) {
  restart();
  arrived_ = 0;
  children_.clear();
  const int nodes = transport_.node_count();
  const int place = (transport_.node_rank() - root_node + nodes) % nodes;  // the root's is 0
  const auto node_at = [&](int at) { return (at + root_node) % nodes; };
  if (chain) {
    parent_ = place == 0 ? -1 : node_at(place - 1);
    if (place + 1 < nodes) children_.push_back(node_at(place + 1));
    return;
  }
  // Binomial tree: the parent of a place is the place without its highest set bit.
  int highest = 1;
  while (2 * highest <= place) highest *= 2;
  parent_ = place == 0 ? -1 : node_at(place - highest);
  for (int bit = place == 0 ? 1 : 2 * highest; place + bit < nodes; bit *= 2) {
    children_.push_back(node_at(place + bit));
  }
}

void TreeBroadcast::begin(std::byte* data, size_t bytes) {
  Chunk& chunk = chunks_[begin_step()];
  chunk.data = data;
  chunk.bytes = bytes;
  if (!is_root()) chunk.receive.receive(parent_, Channel::kBroadcast, data, bytes, counters_);
}

bool TreeBroadcast::advance(size_t slot, int& phase, bool is_first) {
  Chunk& chunk = chunks_[slot];
  if (phase == kPassOn) {
    if (chunk.sends.all_done()) phase = kFinished;
    return phase == kFinished;
  }
  if (!is_first || !chunk.receive.all_done()) return false;
  for (const int child : children_) {
    chunk.sends.send(child, Channel::kBroadcast, chunk.data, chunk.bytes, counters_);
  }
  HSGD_FAULT_POINT("between nodes: chunk passed on");
  ++arrived_;
  phase = chunk.sends.all_done() ? kFinished : static_cast<int>(kPassOn);
  return true;
}

}  // namespace hsgd
