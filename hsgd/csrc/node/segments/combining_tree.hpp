// CombiningTree: counts the ranks of a node that have reached a step, in a tree of two levels.
//
// Each rank counts itself in its group, the last rank of a group counts the group, and the last
// rank of all informs each group. So a rank reads one cache line to know about all ranks, and is
// woken only if it has something to do. Never waits, and never wakes a rank: the rank that counted
// last does so. Source: combining trees of Yew, Tzeng and Lawrie, IEEE Transactions on Computers
// C-36(4), 1987.
#ifndef HSGD_NODE_SEGMENTS_COMBINING_TREE_HPP_
#define HSGD_NODE_SEGMENTS_COMBINING_TREE_HPP_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hsgd {

// Counters: the collectives that a rank has opened, and three of the counters in Progress.
enum class Track { kOpened, kStaged, kReduced, kGathered };
inline constexpr size_t kTracks = 4;

// Counts of one group, or of all groups; several writers. Words are reused every kSteps steps: no
// rank is that far ahead of another (LocalGroup::kMostSlots).
struct alignas(64) ArrivalCounts {
  static constexpr uint64_t kSteps = 8;
  static constexpr int kCountBits = 16;
  // Low bits of the step << kCountBits, which wrap, | the number of ranks that have reached it.
  std::atomic<uint64_t> of_step[kSteps];
};
static_assert(sizeof(ArrivalCounts) == 64, "one cache line");

// The step that all ranks of the node have reached; never decreases. Members of one group read it.
struct alignas(64) Reached {
  std::atomic<uint64_t> step;
};

// Lies in the shared memory of a group's first rank, near the ranks that use it.
struct TreeNode {
  ArrivalCounts in_group[kTracks];
  ArrivalCounts of_groups[kTracks];  // only in the first group's node
  Reached reached[kTracks];
};

// Sets the counts to `step`, before any rank counts; no rank counts steps up to `step` again. For
// step 0 it writes zeros.
void begin_counts(TreeNode* node, uint64_t step);

class CombiningTree {
 public:
  // `groups`: ranks of the node by group; each rank is in one. `nodes`: one per group, all zeros or
  // as begin_counts() wrote them.
  CombiningTree(const std::vector<std::vector<int>>& groups, std::vector<TreeNode*> nodes,
                int rank);

  const std::vector<int>& members() const { return members_; }  // of this rank's group
  const std::vector<int>& firsts() const { return firsts_; }    // of all groups

  // Counts this rank for `step`; steps of a rank increase. A rank may skip a step, which is then
  // never reached, if all ranks reach a later one; a step is reached if all ranks have counted
  // exactly this step. Returns true if this rank was the last of its group: then it must call
  // count_group().
  bool count_rank(Track track, uint64_t step) {
    return count(own_->in_group[index(track)], step, members_.size());
  }
  // Returns true if this was the last group: then the rank must call reach().
  bool count_group(Track track, uint64_t step) {
    return count(top_->of_groups[index(track)], step, firsts_.size());
  }
  void reach(Track track, uint64_t step);
  bool reached(Track track, uint64_t step) const {
    // Partner: reach(). A rank that sees the step sees what all ranks wrote before they reached it.
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
