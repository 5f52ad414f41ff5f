// What one node has goes to all, for what takes many steps.
//
// Owns the order of messages. Each tree of two_trees.hpp carries half of a step, and a node passes
// on what has come from its parent; the other half may come later. A node receives each byte once
// and sends as many at most, and a step is as many messages behind the root as trees are deep.
// Never touches flags in shared memory and never blocks.
#ifndef HSGD_INTERNODE_TREE_BROADCAST_HPP_
#define HSGD_INTERNODE_TREE_BROADCAST_HPP_

#include <array>
#include <cstddef>
#include <vector>

#include "internode/broadcast_steps.hpp"
#include "internode/messages.hpp"
#include "internode/transport.hpp"
#include "internode/two_trees.hpp"

namespace hsgd {

class TreeBroadcast final : public BroadcastSteps {
 public:
  TreeBroadcast(Transport& transport, size_t slots, WireCounters& counters);
  void start(int root_node) override;
  bool is_root() const override { return node_ == root_; }
  void begin(std::byte* data, size_t bytes) override;

 private:
  // Of a step, in one tree.
  struct Half {
    explicit Half(Transport& transport) : messages(transport) {}
    std::byte* data = nullptr;
    size_t bytes = 0;
    bool is_passed_on = false;
    bool is_done = false;
    std::byte arrived{};  // a message that says so
    Messages messages;
  };
  struct Slice {
    explicit Slice(Transport& transport) : halves{Half(transport), Half(transport)} {}
    uint64_t step = 0;
    std::array<Half, TwoTrees::kTrees> halves;
  };
  struct Tree {
    int parent = -1;  // none on the root
    std::vector<int> children;
    uint64_t passed_on = 0;  // steps
    uint64_t finished = 0;
  };
  bool advance(size_t slot, int& phase, bool is_first) override;
  bool advance_half(Slice& slice, size_t tree_index);
  void pass_on(Half* half, Tree* tree, Channel channel);

  WireCounters& counters_;
  const int nodes_;
  const int node_;
  int root_ = 0;
  std::array<Tree, TwoTrees::kTrees> trees_;
  std::vector<Slice> slices_;
};

}  // namespace hsgd

#endif  // HSGD_INTERNODE_TREE_BROADCAST_HPP_
