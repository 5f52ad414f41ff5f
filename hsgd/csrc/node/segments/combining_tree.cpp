// Counts ranks and groups, and informs all groups.
#include "node/segments/combining_tree.hpp"

#include <algorithm>
#include <utility>

#include "core/base/error.hpp"

namespace hsgd {

void begin_counts(TreeNode* node, uint64_t step) {
  for (size_t track = 0; track < kTracks; ++track) {
    for (ArrivalCounts* counts : {&node->in_group[track], &node->of_groups[track]}) {
      for (auto& word : counts->of_step) {
        word.store(step << ArrivalCounts::kCountBits, std::memory_order_relaxed);
      }
    }
  }
}

CombiningTree::CombiningTree(const std::vector<std::vector<int>>& groups,
                             std::vector<TreeNode*> nodes, int rank)
    : nodes_(std::move(nodes)), top_(nodes_.front()) {
  HSGD_CHECK(groups.size() == nodes_.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    HSGD_CHECK(groups[i].size() < size_t{1} << ArrivalCounts::kCountBits);
    firsts_.push_back(groups[i].front());
    if (std::find(groups[i].begin(), groups[i].end(), rank) == groups[i].end()) continue;
    members_ = groups[i];
    own_ = nodes_[i];
  }
  HSGD_CHECK(own_ != nullptr);
}

bool CombiningTree::count(ArrivalCounts& counts, uint64_t step, size_t of) {
  constexpr uint64_t kOne = 1;
  constexpr uint64_t kNumbers = UINT64_MAX >> ArrivalCounts::kCountBits;
  const uint64_t number = step & kNumbers;
  std::atomic<uint64_t>& word = counts.of_step[step % ArrivalCounts::kSteps];
  uint64_t seen = word.load(std::memory_order_relaxed);
  // The first rank takes over the word of an earlier step, which was reached or skipped.
  while (seen >> ArrivalCounts::kCountBits != number) {
    const uint64_t ahead = ((seen >> ArrivalCounts::kCountBits) - number) & kNumbers;
    HSGD_CHECK(ahead > ArrivalCounts::kSteps);  // that is, behind: the numbers wrap
    const uint64_t first = number << ArrivalCounts::kCountBits | kOne;
    if (word.compare_exchange_weak(seen, first, std::memory_order_acq_rel)) return of == 1;
  }
  // Partners: other ranks that count here. Releases what this rank wrote; the last rank acquires
  // what all wrote, so it does not announce a step before their data is visible.
  const uint64_t before = word.fetch_add(kOne, std::memory_order_acq_rel);
  const uint64_t mask = (uint64_t{1} << ArrivalCounts::kCountBits) - 1;
  return (before & mask) + 1 == of;
}

void CombiningTree::reach(Track track, uint64_t step) {
  for (TreeNode* node : nodes_) {
    std::atomic<uint64_t>& word = node->reached[index(track)].step;
    // A rank that announces a later step may have been faster.
    uint64_t seen = word.load(std::memory_order_relaxed);
    // Partner: reached(). Sequentially consistent: ring() of core/os/wait.hpp, which follows, must
    // not read `asleep` before this store is visible.
    while (seen < step && !word.compare_exchange_weak(seen, step, std::memory_order_seq_cst)) {
    }
  }
}

}  // namespace hsgd
