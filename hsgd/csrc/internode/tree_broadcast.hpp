// Passes the steps of a broadcast down a tree of nodes: a chain for large payloads, which sends
// every byte once per link, a binomial tree for small ones, which is shallow.
//
// Owns the tree and the messages along its edges. Never touches flags in shared memory and never
// blocks.
#ifndef HSGD_INTERNODE_TREE_BROADCAST_HPP_
#define HSGD_INTERNODE_TREE_BROADCAST_HPP_

#include <cstdint>
#include <vector>

#include "internode/messages.hpp"

namespace hsgd {

class TreeBroadcast final : public StepWindow {
 public:
  TreeBroadcast(Transport& transport, size_t slots, WireCounters& counters);
  void start(int root_node, bool chain);
  bool is_root() const { return parent_ < 0; }
  // The next step: on the root's node its data, elsewhere where it goes. A step is finished when it
  // is also passed on: its slot is free.
  void begin(std::byte* data, size_t bytes);
  uint64_t arrived() const { return arrived_; }  // steps that lie complete on this node, in order

 private:
  enum Phase { kReceive, kPassOn };
  struct Chunk {
    explicit Chunk(Transport& transport) : receive(transport), sends(transport) {}
    std::byte* data = nullptr;
    size_t bytes = 0;
    Messages receive;
    Messages sends;
  };
  bool advance(size_t slot, int& phase, bool is_first) override;

  Transport& transport_;
  WireCounters& counters_;
  int parent_ = -1;
  std::vector<int> children_;
  std::vector<Chunk> chunks_;
  uint64_t arrived_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_INTERNODE_TREE_BROADCAST_HPP_
