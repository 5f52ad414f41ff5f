// Counts the ranks of a node that have come to a step, in a tree of two levels: each rank counts
// itself in its group, the last of a group counts the group, and the last of all tells each group.
// So a rank looks at one line to know of all, and is woken when there is something to do for it.
//
// Owns the order of these stores. Never waits, and never wakes anybody: whoever counted last does.
// Source: combining trees of Yew, Tzeng and Lawrie, IEEE Transactions on Computers C-36(4), 1987.
#ifndef HSGD_NODE_SEGMENTS_COMBINING_TREE_HPP_
#define HSGD_NODE_SEGMENTS_COMBINING_TREE_HPP_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hsgd {

// What is counted apart: collectives that a rank has opened, and three of the counters in Progress.
enum class Track { kOpened, kStaged, kReduced, kGathered };
inline constexpr size_t kTracks = 4;

// Of one group, or of all groups; several writers. Words are recycled every kSteps steps: no rank
// is as far ahead of another one (LocalGroup::kMostSlots).
struct alignas(64) ArrivalCounts {
  static constexpr uint64_t kSteps = 8;
  static constexpr int kCountBits = 16;
  // The lower bits of step << kCountBits, which wrap, | how many have come to it.
  std::atomic<uint64_t> of_step[kSteps];
};
static_assert(sizeof(ArrivalCounts) == 64, "one cache line");

// The step that all ranks of the node have come to; never falls. Members of one group read it.
struct alignas(64) Reached {
  std::atomic<uint64_t> step;
};

// Lies in the shared memory of a group's first rank, near those that use it.
struct TreeNode {
  ArrivalCounts in_group[kTracks];
  ArrivalCounts of_groups[kTracks];  // in the first group's node alone
  Reached reached[kTracks];
};

// Before anybody counts: nobody counts again what is up to `step`. Zeroes are what it writes for 0.
void begin_counts(TreeNode* node, uint64_t step);

class CombiningTree {
 public:
  // `groups`: the ranks of the node by group, each in one. `nodes`: zeroes, or what begin_counts()
  // has written, one for each group.
  CombiningTree(const std::vector<std::vector<int>>& groups, std::vector<TreeNode*> nodes,
                int rank);

  const std::vector<int>& members() const { return members_; }  // of this rank's group
  const std::vector<int>& firsts() const { return firsts_; }    // of all groups

  // A rank comes to ever later steps. It may leave some out, which then are never reached, if all
  // ranks come to a later one; a step is reached when all ranks have come to that very one. True
  // when this rank was the last of its group: then it must call count_group().
  bool count_rank(Track track, uint64_t step) {
    return count(own_->in_group[index(track)], step, members_.size());
  }
  // True when it was the last group: then it must call reach().
  bool count_group(Track track, uint64_t step) {
    return count(top_->of_groups[index(track)], step, firsts_.size());
  }
  void reach(Track track, uint64_t step);
  bool reached(Track track, uint64_t step) const {
    // Partner: reach(). Who sees the step sees what all ranks wrote before they came to it.
    return own_->reached[index(track)].step.load(std::memory_order_acquire) >= step;
  }

 private:
  static size_t index(Track track) { return static_cast<size_t>(track); }
  static bool count(ArrivalCounts& counts, uint64_t step, size_t of);

  std::vector<int> members_;
  std::vector<int> firsts_;
  std::vector<TreeNode*> nodes_;
  TreeNode* own_ = nullptr;
  TreeNode* top_ = nullptr;
};

}  // namespace hsgd

#endif  // HSGD_NODE_SEGMENTS_COMBINING_TREE_HPP_
