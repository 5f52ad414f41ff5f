// Chooses the radices.
#include "network/rounds/round_schedule.hpp"

#include <algorithm>
#include <functional>

namespace hsgd {
namespace {

// Cost of a round besides its messages, in messages: the time until a message arrives, divided by
// the time that its sender is busy with it: about 3 on InfiniBand, 8 over TCP. A smaller value
// gives smaller groups: with 3, up to 8 nodes exchange directly, and 16 in two rounds.
constexpr int kLatency = 3;

struct Choice {
  int cost = 0;
  int radix = 0;  // of one round; 0: not a product of radices
};

// Returns the cheapest choice for each number of cores. Of equal costs, one round is preferred,
// then the fewest messages.
std::vector<Choice> cheapest(int nodes, int most_radix) {
  std::vector<Choice> best(static_cast<size_t>(nodes) + 1);
  best[1].radix = 1;
  for (int cores = 2; cores <= nodes; ++cores) {
    Choice& choice = best[static_cast<size_t>(cores)];
    for (int radix = 2; radix <= std::min(most_radix, cores); ++radix) {
      const Choice& rest = best[static_cast<size_t>(cores / radix)];
      if (cores % radix != 0 || rest.radix == 0) continue;
      const int cost = rest.cost + kLatency + radix - 1;
      const bool wins_tie = cost == choice.cost && radix == cores;
      if (choice.radix == 0 || cost < choice.cost || wins_tie) choice = {cost, radix};
    }
  }
  return best;
}

// Returns the number of cores with the least cost, all nodes if possible: a node that serves a
// partner sends and receives up to twice the bytes.
int most_cores(const std::vector<Choice>& best) {
  const auto nodes = static_cast<int>(best.size()) - 1;
  if (best.back().radix != 0) return nodes;
  int cores = 0;
  for (int few = nodes; 2 * few >= nodes; --few) {
    const Choice& choice = best[static_cast<size_t>(few)];
    if (choice.radix == 0) continue;
    if (cores == 0 || choice.cost < best[static_cast<size_t>(cores)].cost) cores = few;
  }
  return cores;
}

}  // namespace

// Uses large radices first: then most of the split data travels between neighbours.
RoundSchedule::RoundSchedule(int nodes, int most_radix) : nodes_(nodes), cores_(nodes) {
  if (nodes > 1) {
    const std::vector<Choice> best = cheapest(nodes, most_radix);
    cores_ = most_cores(best);
    for (int left = cores_; left > 1; left /= radices_.back()) {
      radices_.push_back(best[static_cast<size_t>(left)].radix);
    }
    std::sort(radices_.begin(), radices_.end(), std::greater<>());
  }
  int stride = 1;
  for (const int radix : radices_) {
    strides_.push_back(stride);
    stride *= radix;
  }
}

int RoundSchedule::most_radix() const {
  return radices_.empty() ? 1 : *std::max_element(radices_.begin(), radices_.end());
}

int RoundSchedule::messages() const {
  int messages = folds() ? 1 : 0;
  for (const int radix : radices_) messages += radix - 1;
  return messages;
}

RoundSchedule::Leaves RoundSchedule::leaves(int round, int core) const {
  int begin = 0;
  int count = cores_;
  for (int i = 0; i < round; ++i) {
    count /= radix(i);
    begin += index(i, core) * count;
  }
  return {begin, begin + count};
}

std::vector<int> RoundSchedule::nodes_by_leaf() const {
  std::vector<int> nodes;
  for (int leaf = 0; leaf < cores_; ++leaf) {
    nodes.push_back(node_of(core_at(leaf)));
    if (partner(nodes.back()) >= 0) nodes.push_back(partner(nodes.back()));
  }
  return nodes;
}

int RoundSchedule::core_at(int leaf) const {
  int core = 0;
  int count = cores_;
  for (int i = 0; i < rounds(); ++i) {
    count /= radix(i);
    core += leaf / count * stride(i);
    leaf %= count;
  }
  return core;
}

}  // namespace hsgd
