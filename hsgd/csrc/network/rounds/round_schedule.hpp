// In which rounds all nodes exchange what each has, and in which order their parts are summed.
//
// Recursive multiplying (Ruefenacht, Bull and Booth, "Generalisation of recursive doubling for
// AllReduce", Parallel Computing 69, 2017): in round r, groups of radix(r) groups of earlier rounds
// exchange directly. Up to 8 nodes are one group, which exchanges in one round. Groups are always
// consecutive nodes, so that what they have lies side by side, and each group is a node of the one
// tree in which every sum is made: its members' sums are added in the order of nodes. Only where
// the number of nodes is no product of radices, some nodes give what they have to the node before
// them, take no part in the rounds, and get the result from there.
//
// Owns the arithmetic, which is the same on all nodes. Never communicates.
#ifndef HSGD_NETWORK_ROUNDS_ROUND_SCHEDULE_HPP_
#define HSGD_NETWORK_ROUNDS_ROUND_SCHEDULE_HPP_

#include <cstddef>
#include <vector>

namespace hsgd {

class RoundSchedule {
 public:
  // `most_radix`: at most so many nodes exchange directly; at least 2. Which do is chosen: the same
  // for a number of nodes, whatever is sent.
  RoundSchedule(int nodes, int most_radix);
  int nodes() const { return nodes_; }
  int rounds() const { return static_cast<int>(radices_.size()); }
  int radix(int round) const { return radices_[static_cast<size_t>(round)]; }
  int most_radix() const;  // of any round
  bool folds() const { return cores_ < nodes_; }
  // All nodes exchange in one round.
  bool is_direct() const { return !folds() && rounds() == 1; }
  int messages() const;  // that one node sends at most until all have everything

  // --- nodes that take part in rounds are cores ---
  int cores() const { return cores_; }
  bool is_core(int node) const { return node >= 2 * extras() || node % 2 == 0; }
  // The node that takes part for `node`, or that `node` takes part for; -1: none.
  int partner(int node) const { return node >= 2 * extras() ? -1 : node ^ 1; }
  int core_of(int node) const { return node >= 2 * extras() ? node - extras() : node / 2; }
  int node_of(int core) const { return core < extras() ? 2 * core : core + extras(); }

  // --- the group of a core in a round ---
  int index(int round, int core) const { return core / stride(round) % radix(round); }
  // The core at `index` of the group; with the first to the last index in the order of nodes.
  int member(int round, int core, int index) const {
    return core + (index - this->index(round, core)) * stride(round);
  }

  // --- leaves: where data is split evenly in each round, the parts that are left after the last
  struct Leaves {
    int begin;
    int end;
  };
  // What a core has to do with before a round; before round rounds() its own leaf alone.
  Leaves leaves(int round, int core) const;
  int core_at(int leaf) const;
  // All nodes in the order of leaves, each with its partner behind it.
  std::vector<int> nodes_by_leaf() const;

 private:
  int extras() const { return nodes_ - cores_; }
  int stride(int round) const { return strides_[static_cast<size_t>(round)]; }

  int nodes_;
  int cores_;
  std::vector<int> radices_;
  std::vector<int> strides_;
};

}  // namespace hsgd

#endif  // HSGD_NETWORK_ROUNDS_ROUND_SCHEDULE_HPP_
