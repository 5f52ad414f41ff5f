// RoundSchedule: the rounds in which all nodes exchange their data, and the order in which parts
// are summed.
//
// Recursive multiplying (Ruefenacht, Bull and Booth, "Generalisation of recursive doubling for
// AllReduce", Parallel Computing 69, 2017): in round r, radix(r) groups of earlier rounds exchange
// directly. Up to 8 nodes are one group, which exchanges in one round. Groups are always
// consecutive nodes, so their data lies side by side. Each group is a node of one tree, in which
// every sum is made: the sums of its members are added in the order of nodes. If the number of
// nodes is not a product of radices, some nodes give their data to the node before them, take no
// part in the rounds, and get the result from that node.
//
// Pure arithmetic, the same on all nodes.
#ifndef HSGD_NETWORK_ROUNDS_ROUND_SCHEDULE_HPP_
#define HSGD_NETWORK_ROUNDS_ROUND_SCHEDULE_HPP_

#include <cstddef>
#include <vector>

namespace hsgd {

class RoundSchedule {
 public:
  // `most_radix` (at least 2): how many nodes may exchange directly. The choice depends only on the
  // number of nodes, not on the data.
  RoundSchedule(int nodes, int most_radix);
  int nodes() const { return nodes_; }
  int rounds() const { return static_cast<int>(radices_.size()); }
  int radix(int round) const { return radices_[static_cast<size_t>(round)]; }
  int most_radix() const;  // of any round
  bool folds() const { return cores_ < nodes_; }
  // Returns true if all nodes exchange in one round.
  bool is_direct() const { return !folds() && rounds() == 1; }
  int messages() const;  // most messages that one node sends until all nodes have everything

  // --- cores: the nodes that take part in rounds ---
  int cores() const { return cores_; }
  bool is_core(int node) const { return node >= 2 * extras() || node % 2 == 0; }
  // Returns the node that takes part for `node`, or for which `node` takes part; -1: none.
  int partner(int node) const { return node >= 2 * extras() ? -1 : node ^ 1; }
  int core_of(int node) const { return node >= 2 * extras() ? node - extras() : node / 2; }
  int node_of(int core) const { return core < extras() ? 2 * core : core + extras(); }

  // --- the group of a core in a round ---
  int index(int round, int core) const { return core / stride(round) % radix(round); }
  // Returns the core at `index` of the group. Indices ascend in the order of nodes.
  int member(int round, int core, int index) const {
    return core + (index - this->index(round, core)) * stride(round);
  }

  // --- leaves: the parts after the last round, if data is split evenly in each round ---
  struct Leaves {
    int begin;
    int end;
  };
  // Returns the leaves that a core handles before a round; before round rounds(), only its own
  // leaf.
  Leaves leaves(int round, int core) const;
  int core_at(int leaf) const;
  // Returns all nodes in the order of leaves, each followed by its partner.
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
