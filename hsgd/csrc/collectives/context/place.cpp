// Place: counts the ranks of nodes and chooses leaders.
#include "collectives/context/place.hpp"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace hsgd {
namespace {

// Returns the ranks of each node, ascending.
std::vector<std::vector<int>> ranks_on_nodes(const std::vector<int>& node_of_rank) {
  const int last = *std::max_element(node_of_rank.begin(), node_of_rank.end());
  std::vector<std::vector<int>> nodes(static_cast<size_t>(last) + 1);
  for (size_t rank = 0; rank < node_of_rank.size(); ++rank) {
    nodes[static_cast<size_t>(node_of_rank[rank])].push_back(static_cast<int>(rank));
  }
  return nodes;
}

int most_leaders(const std::vector<std::vector<int>>& nodes) {
  size_t least = kMostLeaders;
  for (const std::vector<int>& ranks : nodes) least = std::min(least, ranks.size());
  return static_cast<int>(least);
}

// Returns the ranks of a node in the order in which they should lead.
std::vector<int> leader_order(std::vector<int> ranks, const std::vector<int>& nic_of_rank) {
  if (nic_of_rank.empty()) return ranks;
  // Sorted by turn, then adapter: the first rank near each adapter, then the second one, ...
  std::map<int, int> seen;
  std::vector<std::pair<std::pair<int, int>, int>> order;
  for (const int rank : ranks) {
    const int nic = nic_of_rank[static_cast<size_t>(rank)];
    const int turn = nic > 0 ? seen[nic]++ : static_cast<int>(ranks.size());
    order.push_back({{turn, nic}, rank});
  }
  std::sort(order.begin(), order.end());
  std::transform(order.begin(), order.end(), ranks.begin(),
                 [](const auto& one) { return one.second; });
  return ranks;
}

}  // namespace

std::vector<std::vector<int>> leaders_of(const std::vector<int>& node_of_rank,
                                         const std::vector<int>& nic_of_rank) {
  const std::vector<std::vector<int>> nodes = ranks_on_nodes(node_of_rank);
  std::vector<std::vector<int>> lanes(static_cast<size_t>(most_leaders(nodes)));
  for (const std::vector<int>& ranks : nodes) {
    const std::vector<int> order = leader_order(ranks, nic_of_rank);
    for (size_t lane = 0; lane < lanes.size(); ++lane) lanes[lane].push_back(order[lane]);
  }
  return lanes;
}

Place place_on(std::vector<int> node_of_rank, int rank, const std::vector<int>& nic_of_rank) {
  const std::vector<std::vector<int>> nodes = ranks_on_nodes(node_of_rank);
  Place place;
  place.rank = rank;
  place.size = static_cast<int>(node_of_rank.size());
  place.node_rank = node_of_rank[static_cast<size_t>(rank)];
  place.node_count = static_cast<int>(nodes.size());
  const std::vector<int>& near = nodes[static_cast<size_t>(place.node_rank)];
  const auto local_rank = [&near](int of) {
    return static_cast<int>(std::lower_bound(near.begin(), near.end(), of) - near.begin());
  };
  place.local_rank = local_rank(rank);
  place.local_size = static_cast<int>(near.size());
  if (place.node_count == 1) return place;
  for (const std::vector<int>& lane : leaders_of(node_of_rank, nic_of_rank)) {
    const int leader = lane[static_cast<size_t>(place.node_rank)];
    if (leader == rank) place.lane = place.leaders;
    place.leader_ranks.push_back(local_rank(leader));
    ++place.leaders;
  }
  place.node_of_rank = std::move(node_of_rank);
  return place;
}

}  // namespace hsgd
