// Computes positions in trees, whose lowest bits give parents and children, and advances halves of
// steps.
#include "network/rounds/tree_broadcast.hpp"

#include "core/base/fault_points.hpp"
#include "network/rounds/reduction.hpp"

namespace hsgd {
namespace {

// The trees use two channels: one node may send another messages of both trees, in different steps.
Channel channel_of(size_t tree) { return tree == 0 ? Channel::kBroadcast : Channel::kGather; }

// Halves in each tree that the root has in flight. Sends of short messages complete before the
// messages arrive; a root that began all steps at once would share its link among them: then the
// first would arrive as late as the last, and no node could pass anything on before.
constexpr uint64_t kAhead = 2;

int lowest_bit(int position) { return position & -position; }

}  // namespace

// Returns the parent. If a position is so far right that its parent is behind the last position,
// the rest of the parent's subtree hangs from the position before that subtree.
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

// Returns the position. In the second tree the positions of the first are mirrored, or moved by one
// if their number is odd: even ones become odd.
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

TreeBroadcast::TreeBroadcast(Transport& transport, size_t slots, WireCounters& counters)
    : BroadcastSteps(slots),
      counters_(counters),
      nodes_(transport.node_count()),
      node_(transport.node_rank()) {
  for (size_t slot = 0; slot < slots; ++slot) slices_.emplace_back(transport);
}

void TreeBroadcast::start(int root_node) {
  restart();
  root_ = root_node;
  const TwoTrees trees(nodes_, root_);
  for (int tree = 0; tree < TwoTrees::kTrees; ++tree) {
    trees_[static_cast<size_t>(tree)] = {is_root() ? -1 : trees.parent(tree, node_),
                                         trees.children(tree, node_), 0, 0};
  }
}

void TreeBroadcast::begin(std::byte* data, size_t bytes) {
  const uint64_t step = begun();
  Slice& slice = slices_[begin_step()];
  slice.step = step;
  for (size_t tree = 0; tree < trees_.size(); ++tree) {
    const Range range = part_of(bytes, TwoTrees::kTrees, static_cast<int>(tree), 1);
    Half& half = slice.halves[tree];
    half.data = data + range.begin;
    half.bytes = range.count();
    half.is_passed_on = half.is_done = false;
    if (is_root()) continue;
    half.messages.receive(trees_[tree].parent, channel_of(tree), half.data, half.bytes, counters_);
  }
}

bool TreeBroadcast::advance(size_t slot, int& phase, bool) {
  Slice& slice = slices_[slot];
  bool moved = false;
  bool is_done = true;
  for (size_t tree = 0; tree < trees_.size(); ++tree) {
    moved |= advance_half(slice, tree);
    is_done &= slice.halves[tree].is_done;
  }
  if (is_done) phase = kFinished;
  return moved;
}

// Passes a half on, in the order of steps, without waiting for the other half.
bool TreeBroadcast::advance_half(Slice& slice, size_t tree_index) {
  Half& half = slice.halves[tree_index];
  Tree& tree = trees_[tree_index];
  if (half.is_done || !half.messages.all_done()) return half.messages.progressed();
  if (half.is_passed_on) {
    half.is_done = true;
    ++tree.finished;
    return true;
  }
  const bool may_pass_on =
      tree.passed_on == slice.step && (!is_root() || tree.passed_on < tree.finished + kAhead);
  if (may_pass_on) pass_on(&half, &tree, channel_of(tree_index));
  return may_pass_on || half.messages.progressed();
}

// Sends a half to the children. The first node of a tree also tells the root what has arrived.
void TreeBroadcast::pass_on(Half* half, Tree* tree, Channel channel) {
  if (half->bytes > 0) {
    for (const int child : tree->children) {
      half->messages.send(child, channel, half->data, half->bytes, counters_);
      if (is_root()) half->messages.receive(child, channel, &half->arrived, 1, counters_);
    }
    if (tree->parent == root_) half->messages.send(root_, channel, &half->arrived, 1, counters_);
  }
  half->is_passed_on = true;
  ++tree->passed_on;
  HSGD_FAULT_POINT("between nodes: chunk passed on");
}

}  // namespace hsgd
