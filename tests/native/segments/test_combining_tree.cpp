// Ranks as threads that count themselves: who is the last, what is seen then, steps left out.
#include <memory>
#include <numeric>

#include "node/segments/combining_tree.hpp"
#include "support/ranks.hpp"

namespace {

using hsgd::CombiningTree;
using hsgd::Track;
using Groups = std::vector<std::vector<int>>;

// Memory of one node's tree, and what ranks write before they count themselves.
struct Shared {
  explicit Shared(const Groups& groups) : nodes(groups.size()), written(size_of(groups)) {}
  // Of a tree that has counted up to `step`.
  Shared(const Groups& groups, uint64_t step) : Shared(groups) {
    for (hsgd::TreeNode& node : nodes) hsgd::begin_counts(&node, step);
  }
  static size_t size_of(const Groups& groups) {
    size_t size = 0;
    for (const std::vector<int>& group : groups) size += group.size();
    return size;
  }
  CombiningTree tree(const Groups& groups, int rank) {
    std::vector<hsgd::TreeNode*> pointers;
    for (hsgd::TreeNode& node : nodes) pointers.push_back(&node);
    return CombiningTree(groups, pointers, rank);
  }
  std::vector<hsgd::TreeNode> nodes;
  std::vector<uint64_t> written;
};

const Groups kGroupings[] = {
    {{0}}, {{0, 1}}, {{0}, {1}}, {{0, 1}, {2}}, {{0, 3}, {1, 4, 2}}, {{5, 0}, {1}, {2, 3, 4, 6}}};

// True on the rank that told all.
bool come(CombiningTree& tree, Track track, uint64_t step) {
  if (!tree.count_rank(track, step) || !tree.count_group(track, step)) return false;
  tree.reach(track, step);
  return true;
}

void wait(const CombiningTree& tree, Track track, uint64_t step) {
  while (!tree.reached(track, step)) std::this_thread::yield();
}

}  // namespace

TEST("one rank is the last of each step, and then all see what all have written") {
  constexpr uint64_t kSteps = ranks::kOperations;
  for (const Groups& groups : kGroupings) {
    Shared shared(groups);
    const size_t size = shared.written.size();
    std::atomic<uint64_t> last{0};
    ranks::run(static_cast<int>(size), [&](int rank) {
      CombiningTree tree = shared.tree(groups, rank);
      for (uint64_t step = 1; step <= kSteps; ++step) {
        shared.written[static_cast<size_t>(rank)] = step;
        last += come(tree, Track::kStaged, step) ? 1 : 0;
        wait(tree, Track::kStaged, step);
        for (const uint64_t value : shared.written) CHECK_EQ(value, step);
        come(tree, Track::kGathered, step);  // so that nobody writes while others look
        wait(tree, Track::kGathered, step);
      }
    });
    CHECK_EQ(last.load(), kSteps);
  }
}

TEST("ranks may be some steps ahead of others") {
  constexpr uint64_t kAhead = hsgd::ArrivalCounts::kSteps - 2;
  constexpr uint64_t kSteps = ranks::kOperations;
  for (const Groups& groups : kGroupings) {
    Shared shared(groups);
    ranks::run(static_cast<int>(shared.written.size()), [&](int rank) {
      CombiningTree tree = shared.tree(groups, rank);
      std::mt19937_64 own(static_cast<uint64_t>(rank));
      for (uint64_t step = 1; step <= kSteps; ++step) {
        come(tree, Track::kReduced, step);
        const uint64_t ahead = own() % (kAhead + 1);
        if (step > ahead) wait(tree, Track::kReduced, step - ahead);
      }
      wait(tree, Track::kReduced, kSteps);
    });
  }
}

TEST("counts pass the end of what a word has room for") {
  constexpr uint64_t kEnd = uint64_t{1} << (64 - hsgd::ArrivalCounts::kCountBits);
  constexpr uint64_t kBefore = 3 * hsgd::ArrivalCounts::kSteps;
  for (const Groups& groups : kGroupings) {
    for (const uint64_t end : {uint64_t{1} << 32, kEnd, 5 * kEnd}) {
      Shared shared(groups, end - kBefore);
      std::atomic<uint64_t> last{0};
      ranks::run(static_cast<int>(shared.written.size()), [&](int rank) {
        CombiningTree tree = shared.tree(groups, rank);
        for (uint64_t step = end - kBefore + 1; step <= end + kBefore; ++step) {
          last += come(tree, Track::kStaged, step) ? 1 : 0;
          wait(tree, Track::kStaged, step);
        }
      });
      CHECK_EQ(last.load(), 2 * kBefore);
    }
  }
}

TEST("steps that some ranks leave out are not reached before a later one") {
  const Groups groups = {{0, 1}, {2}};
  Shared shared(groups);
  std::vector<CombiningTree> trees;
  for (int rank = 0; rank < 3; ++rank) trees.push_back(shared.tree(groups, rank));
  for (uint64_t step = 1; step <= 30; ++step) come(trees[0], Track::kStaged, step);
  CHECK(!trees[1].reached(Track::kStaged, 1));
  CHECK(!come(trees[1], Track::kStaged, 1000));
  CHECK(!come(trees[2], Track::kStaged, 1000));
  CHECK(!trees[1].reached(Track::kStaged, 1));
  CHECK(come(trees[0], Track::kStaged, 1000));
  for (const CombiningTree& tree : trees) {
    CHECK(tree.reached(Track::kStaged, 1));
    CHECK(tree.reached(Track::kStaged, 1000));
    CHECK(!tree.reached(Track::kStaged, 1001));
    CHECK(!tree.reached(Track::kOpened, 1));
  }
}
