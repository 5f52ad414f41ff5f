// Groups of local ranks on machines of many shapes, and the order in which ranks lead.
#include <algorithm>
#include <functional>
#include <random>
#include <set>

#include "node/segments/rank_groups.hpp"
#include "support/check.hpp"

using hsgd::CpuPlace;
using hsgd::RankGroups;

namespace {

using Places = std::vector<CpuPlace>;

// Cores, counted over the machine: so many per package, per NUMA node and per last-level cache.
struct Shape {
  int package;
  int node;
  int cache;  // 0: the kernel does not say
};

// Where a rank that is bound to one core lies.
CpuPlace on_core(const Shape& shape, int core) {
  const int cache = shape.cache == 0 ? -1 : core / shape.cache * shape.cache;
  return {cache, core / shape.node, core / shape.package * shape.package};
}

// Rank r is bound to core `core_of(r)`.
Places bound(const Shape& shape, int ranks, const std::function<int(int)>& core_of) {
  Places places;
  for (int rank = 0; rank < ranks; ++rank) places.push_back(on_core(shape, core_of(rank)));
  return places;
}

Places by_core(const Shape& shape, int ranks) {
  return bound(shape, ranks, [](int rank) { return rank; });
}

// As mpirun's --map-by numa: rank r on node r modulo their number.
Places by_turns(const Shape& shape, int ranks, int nodes) {
  return bound(shape, ranks, [&](int rank) { return rank % nodes * shape.node + rank / nodes; });
}

Places unbound(int ranks) { return Places(static_cast<size_t>(ranks), CpuPlace{-1, -1, -1}); }

// "8 8 4": the sizes in the order of the leaders.
std::string sizes(const RankGroups& groups) {
  std::string text;
  for (const auto& group : groups) text += (text.empty() ? "" : " ") + std::to_string(group.size());
  return text;
}

std::string times(int count, const std::string& size) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (text.empty() ? "" : " ") + size;
  return text;
}

// The ranks of each group, "0-7 8-15" or "0,2,4 1,3,5".
std::string members(const RankGroups& groups) {
  std::string text;
  for (const auto& group : groups) {
    if (!text.empty()) text += " ";
    const int first = group.front();
    const int last = group.back();
    if (group.size() > 2 && last - first == static_cast<int>(group.size()) - 1) {
      text += std::to_string(first) + "-" + std::to_string(last);
      continue;
    }
    for (const int rank : group) text += (rank == first ? "" : ",") + std::to_string(rank);
  }
  return text;
}

bool in_one(const RankGroups& groups, const Places& places, int32_t CpuPlace::* domain) {
  return std::all_of(groups.begin(), groups.end(), [&](const std::vector<int>& group) {
    return std::all_of(group.begin(), group.end(), [&](int rank) {
      return places[static_cast<size_t>(rank)].*domain ==
             places[static_cast<size_t>(group.front())].*domain;
    });
  });
}

// Every rank in one group, leaders first and in order, sizes within bounds.
bool is_sound(const RankGroups& groups, size_t ranks) {
  std::set<int> seen;
  int leader = -1;
  for (const std::vector<int>& group : groups) {
    if (group.empty() || group.size() > hsgd::kMostGroup) return false;
    if (!std::is_sorted(group.begin(), group.end()) || group.front() <= leader) return false;
    leader = group.front();
    for (const int rank : group) {
      if (rank < 0 || static_cast<size_t>(rank) >= ranks || !seen.insert(rank).second) return false;
    }
  }
  return seen.size() == ranks && groups.size() <= std::max<size_t>(16, ranks / 8 + 1);
}

constexpr Shape kTwoSockets = {20, 20, 20};
constexpr Shape kLargeSockets = {60, 60, 60};
constexpr Shape kClusters = {60, 15, 60};  // sub-NUMA clusters; they share the cache
constexpr Shape kRome = {64, 64, 4};       // caches of 4 cores
constexpr Shape kMilan = {64, 16, 8};      // caches of 8 cores, 4 nodes per socket
constexpr Shape kBergamo = {128, 128, 8};
constexpr Shape kGrace = {72, 72, 0};
constexpr Shape kCachesAsNodes = {64, 4, 4};
constexpr Shape kVirtual = {1, 1 << 20, 1};  // each processor a package, all of them one node

}  // namespace

TEST("a node of no rank has no groups, and up to eight unbound ranks are one") {
  CHECK_EQ(hsgd::rank_groups({}).size(), 0U);
  CHECK_EQ(members(hsgd::rank_groups(unbound(1))), "0");
  CHECK_EQ(members(hsgd::rank_groups(unbound(2))), "0,1");
  CHECK_EQ(members(hsgd::rank_groups(unbound(3))), "0-2");
  CHECK_EQ(members(hsgd::rank_groups(unbound(7))), "0-6");
  CHECK_EQ(members(hsgd::rank_groups(unbound(8))), "0-7");
}

TEST("unbound ranks are cut into about as many runs as a run is long") {
  CHECK_EQ(members(hsgd::rank_groups(unbound(9))), "0-3 4-8");
  CHECK_EQ(sizes(hsgd::rank_groups(unbound(32))), times(4, "8"));
  CHECK_EQ(sizes(hsgd::rank_groups(unbound(64))), times(8, "8"));
  CHECK_EQ(sizes(hsgd::rank_groups(unbound(128))), times(8, "16"));
  CHECK_EQ(sizes(hsgd::rank_groups(unbound(256))), times(16, "16"));
  CHECK_EQ(sizes(hsgd::rank_groups(unbound(1024))), times(64, "16"));
}

TEST("ranks that know one domain only are grouped like unbound ones") {
  CHECK(hsgd::rank_groups(Places(64, CpuPlace{-1, 0, 0})) == hsgd::rank_groups(unbound(64)));
  CHECK(hsgd::rank_groups(Places(32, CpuPlace{-1, -1, 0})) == hsgd::rank_groups(unbound(32)));
}

TEST("no group spans two sockets that are filled core by core") {
  CHECK_EQ(members(hsgd::rank_groups(by_core(kTwoSockets, 40))),
           "0-5 6-12 13-19 20-25 26-32 33-39");
  CHECK_EQ(members(hsgd::rank_groups(by_core(kTwoSockets, 26))), "0-5 6-12 13-19 20-25");
}

TEST("a large cache is cut into runs of at most sixteen") {
  CHECK_EQ(sizes(hsgd::rank_groups(by_core(kLargeSockets, 120))), times(8, "15"));
  CHECK_EQ(sizes(hsgd::rank_groups(by_core(kLargeSockets, 60))), "7 8 7 8 7 8 7 8");
}

TEST("sub-NUMA clusters are groups, though they share a cache") {
  const Places places = by_core(kClusters, 120);
  CHECK_EQ(sizes(hsgd::rank_groups(places)), times(8, "15"));
  CHECK(in_one(hsgd::rank_groups(places), places, &CpuPlace::numa));
}

TEST("caches of eight cores are groups") {
  CHECK_EQ(sizes(hsgd::rank_groups(by_core(kMilan, 64))), times(8, "8"));
  CHECK_EQ(sizes(hsgd::rank_groups(by_core(kMilan, 128))), times(16, "8"));
}

TEST("caches of four cores are groups while there are few, and then join within their node") {
  CHECK_EQ(sizes(hsgd::rank_groups(by_core(kRome, 64))), times(16, "4"));
  const Places places = by_core(kRome, 128);
  CHECK_EQ(sizes(hsgd::rank_groups(places)), times(8, "16"));
  CHECK(in_one(hsgd::rank_groups(places), places, &CpuPlace::numa));
}

TEST("caches of eight cores join in pairs where there are 32 of them") {
  CHECK_EQ(sizes(hsgd::rank_groups(by_core(kBergamo, 256))), times(16, "16"));
}

TEST("caches that hold fewer than four ranks join in their node") {
  const auto spread = [](int every) { return [every](int rank) { return rank * every; }; };
  CHECK_EQ(sizes(hsgd::rank_groups(bound(kRome, 32, spread(2)))), times(4, "8"));
  CHECK_EQ(sizes(hsgd::rank_groups(bound(kRome, 8, spread(4)))), "8");
  CHECK_EQ(
      sizes(hsgd::rank_groups(bound(kMilan, 48, [](int rank) { return rank / 3 * 8 + rank % 3; }))),
      times(8, "6"));
}

TEST("one rank per NUMA node, as with a GPU each, makes one group per package") {
  CHECK_EQ(members(hsgd::rank_groups(bound(kMilan, 8, [](int rank) { return rank * 16; }))),
           "0-3 4-7");
  CHECK_EQ(members(hsgd::rank_groups(bound(kTwoSockets, 2, [](int rank) { return rank * 20; }))),
           "0,1");
}

TEST("caches that are nodes join within their package") {
  const Places places = by_core(kCachesAsNodes, 128);
  CHECK_EQ(sizes(hsgd::rank_groups(places)), times(8, "16"));
  CHECK(in_one(hsgd::rank_groups(places), places, &CpuPlace::package));
}

TEST("without a list of caches the ranks of a node are cut into runs") {
  CHECK_EQ(sizes(hsgd::rank_groups(by_core(kGrace, 72))), "14 14 15 14 15");
  const Places places = by_core(kGrace, 144);
  CHECK_EQ(hsgd::rank_groups(places).size(), 10U);
  CHECK(in_one(hsgd::rank_groups(places), places, &CpuPlace::numa));
}

TEST("processors that a virtual machine shows as packages of one core each say nothing") {
  CHECK_EQ(members(hsgd::rank_groups(by_core(kVirtual, 7))), "0-6");
  CHECK_EQ(members(hsgd::rank_groups(by_core(kVirtual, 32))), "0-7 8-15 16-23 24-31");
  CHECK_EQ(sizes(hsgd::rank_groups(by_core(kVirtual, 256))), times(16, "16"));
}

TEST("ranks that go round the nodes by turns are grouped by node") {
  CHECK_EQ(members(hsgd::rank_groups(by_turns(kTwoSockets, 10, 2))), "0,2,4,6,8 1,3,5,7,9");
  const Places places = by_turns(kMilan, 128, 8);
  CHECK_EQ(sizes(hsgd::rank_groups(places)), times(16, "8"));
  CHECK(in_one(hsgd::rank_groups(places), places, &CpuPlace::cache));
}

TEST("uneven cpusets keep their domains, and a rank that is bound to nothing joins another") {
  Places places(17, CpuPlace{0, 0, 0});
  for (size_t rank = 3; rank < 16; ++rank) places[rank] = {8, 1, 0};
  places[16] = {-1, -1, -1};
  CHECK_EQ(members(hsgd::rank_groups(places)), "0-2 3-8 9-16");
  std::swap(places[0], places[16]);
  CHECK_EQ(members(hsgd::rank_groups(places)), "0,9,10,11,12,13,14,15 1,2,16 3-8");
}

TEST("ranks of a package that may use all its nodes are apart from those bound to one") {
  Places places(16, CpuPlace{-1, -1, 0});
  for (size_t rank = 8; rank < 16; ++rank) places[rank] = {0, 0, 0};
  CHECK_EQ(members(hsgd::rank_groups(places)), "0-7 8-15");
}

TEST("whatever the places are, each rank is in one group, and groups are neither large nor many") {
  std::mt19937 random(7);
  const auto draw = [&](int most) {
    return static_cast<int>(random() % static_cast<unsigned>(most));
  };
  for (int round = 0; round < 3000; ++round) {
    const int domains = 1 + draw(40);
    Places places(static_cast<size_t>(round < 300 ? round : 1 + draw(300)));
    for (CpuPlace& place : places) place = {draw(domains) - 1, draw(9) - 1, draw(3) - 1};
    const RankGroups groups = hsgd::rank_groups(places);
    if (!CHECK(is_sound(groups, places.size()))) return;
    if (!CHECK(groups == hsgd::rank_groups(places))) return;
  }
}

TEST("every number of ranks on every machine is grouped soundly, by core and by turns") {
  for (const Shape& shape : {kTwoSockets, kLargeSockets, kClusters, kRome, kMilan, kBergamo, kGrace,
                             kCachesAsNodes, kVirtual}) {
    for (int ranks = 0; ranks <= 256; ++ranks) {
      CHECK(is_sound(hsgd::rank_groups(by_core(shape, ranks)), static_cast<size_t>(ranks)));
      CHECK(is_sound(hsgd::rank_groups(by_turns(shape, ranks, 8)), static_cast<size_t>(ranks)));
    }
  }
}
