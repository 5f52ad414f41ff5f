// The two trees of broadcasts, and what goes through them: all nodes in one thread.
#include <algorithm>
#include <memory>

#include "network/rounds/tree_broadcast.hpp"
#include "support/leaders.hpp"

namespace {

using hsgd::TwoTrees;
using leaders::kMostNodes;
using leaders::Leaders;
using leaders::until_all;

constexpr int kManyNodes[] = {2, 3, 4, 5, 8, 9, 16, 17, 37, 64, 100, 255, 1000};

// How many messages after the root a node gets data of a tree; -1: never.
int depth_of(const TwoTrees& trees, int tree, int node, int root, int nodes) {
  for (int depth = 0; depth < nodes; ++depth) {
    if (node == root) return depth;
    node = trees.parent(tree, node);
  }
  return -1;
}

std::vector<std::byte> bytes_of_step(size_t bytes, size_t step) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>((i * 31 + step * 7) % 251);
  return data;
}

}  // namespace

TEST("parents and children are the same edges, and all nodes hang from the root, not deep") {
  for (const int nodes : kManyNodes) {
    for (const int root : {0, nodes / 3, nodes - 1}) {
      const TwoTrees trees(nodes, root);
      int most = 2;
      for (int reached = 1; reached < nodes; reached *= 2) ++most;
      for (int tree = 0; tree < TwoTrees::kTrees; ++tree) {
        int edges = 0;
        for (int node = 0; node < nodes; ++node) {
          for (const int child : trees.children(tree, node)) {
            CHECK_EQ(trees.parent(tree, child), node);
            ++edges;
          }
          const int depth = depth_of(trees, tree, node, root, nodes);
          CHECK(depth >= 0 && depth <= most);
        }
        CHECK_EQ(edges, nodes - 1);
        CHECK_EQ(trees.children(tree, root).size(), nodes > 1 ? 1u : 0u);
      }
    }
  }
}

TEST("no node but the root passes data on in both trees, and none to more than two nodes") {
  for (const int nodes : kManyNodes) {
    const int root = nodes / 2;
    const TwoTrees trees(nodes, root);
    for (int node = 0; node < nodes; ++node) {
      if (node == root) continue;
      const size_t first = trees.children(0, node).size();
      const size_t second = trees.children(1, node).size();
      CHECK(std::min(first, second) == 0 && std::max(first, second) <= 2);
    }
  }
}

TEST("many steps reach all nodes through the trees, and each sends and receives them once") {
  constexpr size_t kSteps = 9;
  constexpr size_t kSlots = 4;
  constexpr size_t kBytes = 1000;
  for (const int nodes : {2, 3, 5, 9, 16, 17, 37}) {
    if (nodes > kMostNodes) continue;
    for (const int root : {0, 1, nodes - 1}) {
      Leaders leaders(nodes, 16, static_cast<uint64_t>(nodes));
      std::vector<std::unique_ptr<hsgd::TreeBroadcast>> windows;
      std::vector<std::vector<std::vector<std::byte>>> data(leaders.size());
      for (size_t node = 0; node < leaders.size(); ++node) {
        windows.push_back(std::make_unique<hsgd::TreeBroadcast>(*leaders.transports[node], kSlots,
                                                                leaders.counters[node]));
        windows[node]->start(root);
        for (size_t step = 0; step < kSteps; ++step) {
          // The last is one byte, of which one tree has nothing.
          const size_t bytes = step + 1 < kSteps ? kBytes : 1;
          data[node].push_back(windows[node]->is_root() ? bytes_of_step(bytes, step)
                                                        : std::vector<std::byte>(bytes));
        }
      }
      until_all(leaders.size(), [&](size_t node) {
        hsgd::TreeBroadcast& window = *windows[node];
        while (window.begun() < kSteps && window.begun() < window.finished() + kSlots) {
          std::vector<std::byte>& step = data[node][window.begun()];
          window.begin(step.data(), step.size());
        }
        window.progress();
        return window.finished() == kSteps;
      });
      const double all = (kSteps - 1) * kBytes;
      for (size_t node = 0; node < leaders.size(); ++node) {
        for (size_t step = 0; step < kSteps; ++step) {
          CHECK(data[node][step] == bytes_of_step(data[node][step].size(), step));
        }
        const hsgd::WireCounters& counters = leaders.counters[node];
        CHECK(static_cast<double>(counters.bytes_sent) < 1.05 * all);
        CHECK(static_cast<double>(counters.bytes_received) <
              (windows[node]->is_root() ? 0.05 : 1.05) * all);
      }
    }
  }
}
