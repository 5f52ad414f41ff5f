// Two binary trees over all nodes but a root, in which no node passes data on twice.
//
// Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
// scan", Parallel Computing 35, 2009: who has children in one tree is a leaf of the other, so that
// with half of the data in each tree every node receives all of it once and sends at most as much.
//
// Owns the arithmetic, which is the same on all nodes. Never communicates.
#ifndef HSGD_INTERNODE_TWO_TREES_HPP_
#define HSGD_INTERNODE_TWO_TREES_HPP_

#include <vector>

namespace hsgd {

class TwoTrees {
 public:
  static constexpr int kTrees = 2;

  TwoTrees(int nodes, int root) : nodes_(nodes), root_(root) {}
  // Of a node that is not the root; the root is the parent of the first node of each tree.
  int parent(int tree, int node) const;
  std::vector<int> children(int tree, int node) const;

 private:
  // The root has 0, others have 1 to nodes - 1, in the order in which a walk of the tree from left
  // to right meets them. Odd ones are leaves.
  int position(int tree, int node) const;
  int node_at(int tree, int position) const;

  int nodes_;
  int root_;
};

}  // namespace hsgd

#endif  // HSGD_INTERNODE_TWO_TREES_HPP_
