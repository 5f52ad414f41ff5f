// Positions, and what the lowest bit of one says of its parent and children.
#include "internode/two_trees.hpp"

namespace hsgd {
namespace {

int lowest_bit(int position) { return position & -position; }

}  // namespace

// Where a position lies so far right that its parent would be behind the last one, what is left of
// the parent's subtree hangs from the position before that subtree.
int TwoTrees::parent(int tree, int node) const {
  const int own = position(tree, node);
  const int bit = lowest_bit(own);
  const int above = (own - bit) | (2 * bit);
  return node_at(tree, above < nodes_ ? above : own - bit);
}

std::vector<int> TwoTrees::children(int tree, int node) const {
  const int own = position(tree, node);
  int step = 1;
  while (own == 0 ? 2 * step < nodes_ : 2 * step < lowest_bit(own)) step *= 2;
  if (own == 0) return nodes_ > 1 ? std::vector<int>{node_at(tree, step)} : std::vector<int>{};
  if (lowest_bit(own) == 1) return {};
  std::vector<int> children{node_at(tree, own - step)};
  while (step > 0 && own + step >= nodes_) step /= 2;
  if (step > 0) children.push_back(node_at(tree, own + step));
  return children;
}

// In the second tree positions of the first are mirrored, or moved by one where their number is
// odd: even ones become odd.
int TwoTrees::position(int tree, int node) const {
  const int others = nodes_ - 1;
  const int first = (node - root_ + nodes_) % nodes_;
  if (tree == 0 || first == 0) return first;
  return others % 2 == 0 ? others + 1 - first : first % others + 1;
}

int TwoTrees::node_at(int tree, int position) const {
  const int others = nodes_ - 1;
  int first = position;
  if (tree == 1 && position > 0) {
    first = others % 2 == 0 ? others + 1 - position : (position + others - 2) % others + 1;
  }
  return (first + root_) % nodes_;
}

}  // namespace hsgd
