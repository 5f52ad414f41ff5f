// TreeBroadcast: sends the data of one node to all nodes, for broadcasts of many steps.
//
// Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
// scan", Parallel Computing 35, 2009: each of two trees carries half of a step, so that every node
// receives each byte once and sends at most as many. The trees are the same on all nodes. A node
// passes on a half from its parent without waiting for the other half. Never touches flags in
// shared memory and never blocks.
#ifndef HSGD_NETWORK_ROUNDS_TREE_BROADCAST_HPP_
#define HSGD_NETWORK_ROUNDS_TREE_BROADCAST_HPP_

#include <array>
#include <cstddef>
#include <vector>

#include "network/transport/messages.hpp"
#include "network/transport/transport.hpp"

namespace hsgd {

// Two binary trees over all nodes except the root. A node that has children in one tree is a leaf
// of the other.
class TwoTrees {
 public:
  static constexpr int kTrees = 2;

  TwoTrees(int nodes, int root) : nodes_(nodes), root_(root) {}
  // Returns the parent of a node that is not the root; the root is the parent of the first node of
  // each tree.
  int parent(int tree, int node) const;
  std::vector<int> children(int tree, int node) const;

 private:
  // Returns the position: 0 for the root, 1 to nodes - 1 for others, in the order of a walk of the
  // tree from left to right. Odd positions are leaves.
  int position(int tree, int node) const;
  int node_at(int tree, int position) const;

  int nodes_;
  int root_;
};

class TreeBroadcast final : public BroadcastSteps {
 public:
  TreeBroadcast(Transport& transport, size_t slots, WireCounters& counters);
  void start(int root_node) override;
  bool is_root() const override { return node_ == root_; }
  void begin(std::byte* data, size_t bytes) override;

 private:
  // Half of a step, in one tree.
  struct Half {
    explicit Half(Transport& transport) : messages(transport) {}
    std::byte* data = nullptr;
    size_t bytes = 0;
    bool is_passed_on = false;
    bool is_done = false;
    std::byte arrived{};  // receives the message that the half has arrived
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

#endif  // HSGD_NETWORK_ROUNDS_TREE_BROADCAST_HPP_
