// Counting the ranks of nodes.
#include "context/place.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace hsgd {

Place place_on(std::vector<int> node_of_rank, int rank) {
  Place place;
  place.rank = rank;
  place.size = static_cast<int>(node_of_rank.size());
  place.node_rank = node_of_rank[static_cast<size_t>(rank)];
  place.node_count = *std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1;
  std::vector<int> sizes(static_cast<size_t>(place.node_count), 0);
  for (size_t other = 0; other < node_of_rank.size(); ++other) {
    int& seen = sizes[static_cast<size_t>(node_of_rank[other])];
    if (static_cast<int>(other) == rank) place.local_rank = seen;
    ++seen;
  }
  place.local_size = sizes[static_cast<size_t>(place.node_rank)];
  if (place.node_count == 1) return place;
  place.leaders = std::min(*std::min_element(sizes.begin(), sizes.end()), kMostLeaders);
  place.node_of_rank = std::move(node_of_rank);
  return place;
}

}  // namespace hsgd
