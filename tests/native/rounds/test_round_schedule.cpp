// In which rounds nodes exchange.
#include <algorithm>
#include <numeric>
#include <set>

#include "network/rounds/round_schedule.hpp"
#include "support/check.hpp"

namespace {

using hsgd::RoundSchedule;

template <class Check>
void for_each_schedule(Check&& check) {
  for (const int radix : {2, 3, 4, 7, 16}) {
    for (int nodes = 2; nodes <= 130; ++nodes) check(RoundSchedule(nodes, radix), radix);
  }
  for (const int nodes : {509, 1000, 1024, 4093}) check(RoundSchedule(nodes, 16), 16);
}

// Whether the number of nodes is a product of numbers from 2 to the radix.
bool is_product(int nodes, int radix) {
  int left = nodes;
  for (int factor = 2; factor <= radix; ++factor) {
    while (left % factor == 0) left /= factor;
  }
  return left == 1;
}

std::vector<int> radices(const RoundSchedule& rounds) {
  std::vector<int> all;
  for (int round = 0; round < rounds.rounds(); ++round) all.push_back(rounds.radix(round));
  return all;
}

}  // namespace

TEST("groups have at most as many members as the radix, and all cores are their product") {
  for_each_schedule([](const RoundSchedule& rounds, int radix) {
    int cores = 1;
    for (int round = 0; round < rounds.rounds(); ++round) {
      CHECK(rounds.radix(round) >= 2 && rounds.radix(round) <= radix);
      cores *= rounds.radix(round);
    }
    CHECK_EQ(cores, rounds.cores());
    CHECK(2 * rounds.cores() >= rounds.nodes());
  });
}

TEST("up to 8 nodes exchange directly, and primes up to the radix") {
  for (const int nodes : {2, 3, 4, 5, 6, 7, 8, 11, 13}) CHECK(RoundSchedule(nodes, 16).is_direct());
  for (const int nodes : {9, 10, 12, 14, 15, 16, 17}) CHECK(!RoundSchedule(nodes, 16).is_direct());
  CHECK(!RoundSchedule(5, 4).is_direct());
}

TEST("no node is left out of the rounds where the number of nodes is a product of radices") {
  for_each_schedule([](const RoundSchedule& rounds, int radix) {
    CHECK_EQ(rounds.folds(), !is_product(rounds.nodes(), radix));
  });
}

TEST("a node sends a number of messages that grows as the logarithm of the number of nodes") {
  CHECK(radices(RoundSchedule(16, 16)) == (std::vector<int>{4, 4}));
  CHECK(radices(RoundSchedule(64, 16)) == (std::vector<int>{4, 4, 4}));
  CHECK(radices(RoundSchedule(1000, 16)) == (std::vector<int>{5, 5, 5, 4, 2}));
  CHECK(radices(RoundSchedule(1024, 16)) == (std::vector<int>{4, 4, 4, 4, 4}));
  CHECK_EQ(RoundSchedule(1000, 16).messages(), 16);
  CHECK(RoundSchedule(4093, 16).messages() <= 20);
  CHECK_EQ(RoundSchedule(1024, 2).messages(), 10);
}

TEST("every node is a core, or the partner of the core before it") {
  for_each_schedule([](const RoundSchedule& rounds, int) {
    for (int node = 0; node < rounds.nodes(); ++node) {
      const int partner = rounds.partner(node);
      if (rounds.is_core(node)) {
        CHECK_EQ(rounds.node_of(rounds.core_of(node)), node);
        CHECK(partner == -1 || (partner == node + 1 && !rounds.is_core(partner)));
      } else {
        CHECK_EQ(partner, node - 1);
        CHECK_EQ(rounds.core_of(node), rounds.core_of(partner));
      }
    }
  });
}

TEST("groups of a round are consecutive, and every core meets all others") {
  for_each_schedule([](const RoundSchedule& rounds, int) {
    if (rounds.nodes() > 60) return;
    for (int core = 0; core < rounds.cores(); ++core) {
      std::set<int> met{core};
      for (int round = 0; round < rounds.rounds(); ++round) {
        CHECK_EQ(rounds.member(round, core, rounds.index(round, core)), core);
        std::set<int> of_group;
        for (int index = 0; index < rounds.radix(round); ++index) {
          const int member = rounds.member(round, core, index);
          CHECK_EQ(rounds.index(round, member), index);
          for (const int other : met) of_group.insert(other + member - core);
        }
        met = of_group;
        CHECK_EQ(*met.rbegin() - *met.begin() + 1, static_cast<int>(met.size()));
      }
      CHECK_EQ(static_cast<int>(met.size()), rounds.cores());
    }
  });
}

TEST("in each round the members of a group share out the leaves that all of them had") {
  for_each_schedule([](const RoundSchedule& rounds, int) {
    for (int core = 0; core < rounds.cores(); ++core) {
      for (int round = 0; round < rounds.rounds(); ++round) {
        const RoundSchedule::Leaves all = rounds.leaves(round, core);
        int end = all.begin;
        for (int index = 0; index < rounds.radix(round); ++index) {
          const int member = rounds.member(round, core, index);
          CHECK_EQ(rounds.leaves(round, member).begin, all.begin);
          const RoundSchedule::Leaves own = rounds.leaves(round + 1, member);
          CHECK_EQ(own.begin, end);
          end = own.end;
        }
        CHECK_EQ(end, all.end);
      }
      const RoundSchedule::Leaves leaf = rounds.leaves(rounds.rounds(), core);
      CHECK_EQ(leaf.end, leaf.begin + 1);
      CHECK_EQ(rounds.core_at(leaf.begin), core);
    }
  });
}

TEST("the order of leaves has each node once, partners behind their cores") {
  for_each_schedule([](const RoundSchedule& rounds, int) {
    std::vector<int> nodes = rounds.nodes_by_leaf();
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (!rounds.is_core(nodes[i])) CHECK_EQ(nodes[i - 1], rounds.partner(nodes[i]));
    }
    std::sort(nodes.begin(), nodes.end());
    std::vector<int> all(static_cast<size_t>(rounds.nodes()));
    std::iota(all.begin(), all.end(), 0);
    CHECK(nodes == all);
  });
}
