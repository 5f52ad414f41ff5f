// Who leads between nodes.
#include <vector>

#include "collectives/context/place.hpp"
#include "support/check.hpp"

namespace {

using Lanes = std::vector<std::vector<int>>;

// Ranks 0 to 3 on node 0, 4 to 7 on node 1.
const std::vector<int> kTwoNodes = {0, 0, 0, 0, 1, 1, 1, 1};

}  // namespace

TEST("ranks near no adapter lead in their order") {
  const Lanes in_order = {{0, 4}, {1, 5}, {2, 6}, {3, 7}};
  CHECK(hsgd::leaders_of(kTwoNodes, {}) == in_order);
  CHECK(hsgd::leaders_of(kTwoNodes, std::vector<int>(8, 0)) == in_order);
  CHECK(hsgd::leaders_of(kTwoNodes, std::vector<int>(8, 1)) == in_order);
}

TEST("ranks near an adapter lead first, on each node as it has them") {
  CHECK((hsgd::leaders_of(kTwoNodes, {0, 0, 1, 1, 0, 0, 0, 0}) ==
         Lanes{{2, 4}, {3, 5}, {0, 6}, {1, 7}}));
  CHECK((hsgd::leaders_of({0, 1, 0, 1, 0}, {0, 0, 0, 1, 1}) == Lanes{{4, 3}, {0, 1}}));
}

TEST("ranks near several adapters lead by turns") {
  CHECK((hsgd::leaders_of(kTwoNodes, {2, 2, 1, 1, 0, 1, 1, 3}) ==
         Lanes{{2, 5}, {0, 7}, {3, 6}, {1, 4}}));
}

TEST("a node of many ranks has eight leaders, those near an adapter wherever they are") {
  std::vector<int> nodes(200);
  std::vector<int> nics(200);
  for (size_t rank = 0; rank < 200; ++rank) {
    nodes[rank] = static_cast<int>(rank / 100);
    nics[rank] = rank % 100 >= 96 ? 1 : 0;
  }
  const Lanes lanes = hsgd::leaders_of(nodes, nics);
  CHECK(lanes.size() == hsgd::kMostLeaders);
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    const int local = static_cast<int>(lane < 4 ? 96 + lane : lane - 4);
    CHECK((lanes[lane] == std::vector<int>{local, 100 + local}));
  }
}

TEST("a rank knows its lane and the local ranks of its node's leaders") {
  const std::vector<int> nics = {0, 0, 0, 0, 1};
  const hsgd::Place last = hsgd::place_on({0, 1, 0, 1, 0}, 4, nics);
  CHECK(last.lane == 0 && last.leads(1) && last.local_rank == 2 && last.leaders == 2);
  CHECK((last.leader_ranks == std::vector<int>{2, 0}));
  const hsgd::Place first = hsgd::place_on({0, 1, 0, 1, 0}, 0, nics);
  CHECK(first.lane == 1 && !first.leads(1) && first.leads(2));
  const hsgd::Place none = hsgd::place_on({0, 1, 0, 1, 0}, 2, nics);
  CHECK(none.lane == -1 && !none.leads(2));
  const hsgd::Place alone = hsgd::place_on({0, 0, 0}, 1, {1, 0, 0});
  CHECK(alone.leaders == 0 && alone.lane == -1 && alone.leader_ranks.empty());
}
