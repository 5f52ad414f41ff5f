// Cuts and joins domains until groups are neither large nor many.
#include "node/segments/rank_groups.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>

namespace hsgd {
namespace {

constexpr size_t kMostGroups = 16;
constexpr size_t kSmall = 4;  // fewer ranks are not worth their own leader
constexpr size_t kFewRanks = 64;

struct Group {
  CpuPlace place;  // -1 if its ranks differ
  std::vector<int> ranks;
};
using Groups = std::vector<Group>;

// A leader collects from as many ranks as there are leaders, if both are about the root of all
// ranks.
size_t most_of_group(size_t ranks) { return ranks <= kFewRanks ? kMostGroup / 2 : kMostGroup; }

// Sorts neighbours together; being unsigned, it sorts unknown places last.
using Key = std::tuple<uint32_t, uint32_t, uint32_t>;

Key key_of(const CpuPlace& place) {
  return {static_cast<uint32_t>(place.numa), static_cast<uint32_t>(place.package),
          static_cast<uint32_t>(place.cache)};
}

// Returns the domains. A cache that NUMA nodes share (sub-NUMA clusters) is one domain in each of
// them.
Groups domains_of(const std::vector<CpuPlace>& places) {
  std::map<Key, Group> domains;
  for (size_t rank = 0; rank < places.size(); ++rank) {
    Group& domain = domains[key_of(places[rank])];
    domain.place = places[rank];
    domain.ranks.push_back(static_cast<int>(rank));
  }
  Groups groups;
  for (auto& [key, domain] : domains) groups.push_back(std::move(domain));
  return groups;
}

Groups cut(const Groups& domains, size_t most) {
  Groups groups;
  for (const Group& domain : domains) {
    const std::vector<int>& ranks = domain.ranks;
    const size_t runs = (ranks.size() + most - 1) / most;
    for (size_t run = 0; run < runs; ++run) {
      const auto border = [&](size_t which) {
        return ranks.begin() + static_cast<std::ptrdiff_t>(which * ranks.size() / runs);
      };
      groups.push_back({domain.place, {border(run), border(run + 1)}});
    }
  }
  return groups;
}

int32_t common(int32_t a, int32_t b) { return a == b ? a : -1; }

void append(const Group& other, Group* group) {
  CpuPlace& place = group->place;
  place = {common(place.cache, other.place.cache), common(place.numa, other.place.numa),
           common(place.package, other.place.package)};
  group->ranks.insert(group->ranks.end(), other.ranks.begin(), other.ranks.end());
}

// Joins each group to the one before it if one of the two has fewer than `least` ranks.
template <class AreNear>
Groups join(const Groups& groups, size_t least, size_t most, const AreNear& are_near) {
  Groups joined;
  for (const Group& group : groups) {
    const bool first = joined.empty();
    const size_t before = first ? 0 : joined.back().ranks.size();
    const bool small = std::min(before, group.ranks.size()) < least;
    if (first || !small || before + group.ranks.size() > most ||
        !are_near(joined.back().place, group.place)) {
      joined.push_back(group);
    } else {
      append(group, &joined.back());
    }
  }
  return joined;
}

// Joins small groups always, larger ones while there are too many.
template <class AreNear>
void join_within(Groups* groups, size_t ranks, size_t most, const AreNear& are_near) {
  const size_t enough = std::max(kMostGroups, (ranks + kMostGroup - 1) / kMostGroup);
  for (size_t least = kSmall; least <= most; least *= 2) {
    if (least > kSmall && groups->size() <= enough) return;
    *groups = join(*groups, least, most, are_near);
  }
}

}  // namespace

RankGroups rank_groups(const std::vector<CpuPlace>& places, size_t most) {
  const size_t ranks = places.size();
  if (most == 0) most = most_of_group(ranks);
  Groups groups = cut(domains_of(places), most);
  join_within(&groups, ranks, most,
              [](const CpuPlace& a, const CpuPlace& b) { return a.numa >= 0 && a.numa == b.numa; });
  join_within(&groups, ranks, most, [](const CpuPlace& a, const CpuPlace& b) {
    return a.package >= 0 && a.package == b.package;
  });
  join_within(&groups, ranks, most, [](const CpuPlace&, const CpuPlace&) { return true; });
  RankGroups found;
  for (Group& group : groups) {
    std::sort(group.ranks.begin(), group.ranks.end());
    found.push_back(std::move(group.ranks));
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace hsgd
