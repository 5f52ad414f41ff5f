// The choice of radices.
#include "internode/round_schedule.hpp"

#include <algorithm>
#include <functional>

namespace hsgd {
namespace {

// What a round costs beside its messages, in messages: on Ethernet and on InfiniBand a message
// takes some 8 times as long to arrive as its sender is busy with it.
constexpr int kLatency = 8;

struct Choice {
  int cost = 0;
  int radix = 0;  // of one round; 0: no product of radices
};

// By number of cores.
std::vector<Choice> cheapest(int nodes, int most_radix) {
  std::vector<Choice> best(static_cast<size_t>(nodes) + 1);
  best[1].radix = 1;
  for (int cores = 2; cores <= nodes; ++cores) {
    Choice& choice = best[static_cast<size_t>(cores)];
    for (int radix = 2; radix <= std::min(most_radix, cores); ++radix) {
      const Choice& rest = best[static_cast<size_t>(cores / radix)];
      if (cores % radix != 0 || rest.radix == 0) continue;
      const int cost = rest.cost + kLatency + radix - 1;
      if (choice.radix == 0 || cost < choice.cost) choice = {cost, radix};
    }
  }
  return best;
}

}  // namespace

// Large radices first: then most of what is split travels between neighbours.
RoundSchedule::RoundSchedule(int nodes, int most_radix) : nodes_(nodes), cores_(nodes) {
  if (nodes > 1 && nodes <= most_radix) radices_ = {nodes};
  if (nodes > most_radix) {
    const std::vector<Choice> best = cheapest(nodes, most_radix);
    constexpr int kFold = 2 * (kLatency + 1);
    const auto cost = [&](int cores) {
      return best[static_cast<size_t>(cores)].cost + (cores < nodes ? kFold : 0);
    };
    for (int cores = nodes; 2 * cores >= nodes; --cores) {
      if (best[static_cast<size_t>(cores)].radix == 0) continue;
      if (best[static_cast<size_t>(cores_)].radix == 0 || cost(cores) < cost(cores_)) {
        cores_ = cores;
      }
    }
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
