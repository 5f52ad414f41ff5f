// SectionLayout: cuts the section of each node into pieces, and these into shares of leaders.
#include "collectives/kinds/section_layout.hpp"

#include <algorithm>

namespace hsgd {

SectionLayout::SectionLayout(const NodeMap& map, const RoundSchedule& rounds,
                             const uint64_t* counts, int leaders, uint64_t step_count,
                             uint64_t piece_count)
    : map_(map),
      leaders_(leaders),
      order_(rounds.nodes_by_leaf()),
      blocks_(blocks_of(counts, map)),
      offsets_(static_cast<size_t>(leaders) * static_cast<size_t>(map.nodes()) + 1) {
  uint64_t total = 0;
  for (int node = 0; node < map.nodes(); ++node) {
    uint64_t end = 0;
    for (int place = map.first(node); place < map.end(node); ++place) {
      end += packed(place).count;
      ends_.push_back(end);
    }
    pitch_.push_back(end);
    total += end;
  }
  steps_ = steps_for(total, step_count, static_cast<uint64_t>(map.nodes()));
  for (const uint64_t section : pitch_)
    steps_ = std::max(steps_, steps_for(section, piece_count, 0));
  for (uint64_t& pitch : pitch_) pitch = (pitch + steps_ - 1) / steps_;
}

Range SectionLayout::block(int place) const {
  const uint64_t end = ends_[static_cast<size_t>(place)];
  return {end - packed(place).count, end};
}

Range SectionLayout::share(int node, int leader, uint64_t step) const {
  const uint64_t section = ends_[static_cast<size_t>(map_.end(node) - 1)];
  const uint64_t pitch = pitch_[static_cast<size_t>(node)];
  const uint64_t begin = std::min(section, step * pitch);
  const uint64_t count = std::min(section, begin + pitch) - begin;
  const auto bound = [&](int index) {
    return begin + count * static_cast<uint64_t>(index) / static_cast<uint64_t>(leaders_);
  };
  return {bound(leader), bound(leader + 1)};
}

void SectionLayout::place_shares(uint64_t step) const {
  if (offsets_step_ == step) return;
  offsets_step_ = step;
  uint64_t end = 0;
  for (int leader = 0; leader < leaders_; ++leader) {
    for (const int node : order_) {
      offsets_[index(node, leader)] = end;
      end += share(node, leader, step).count();
    }
  }
  offsets_.back() = end;
}

uint64_t SectionLayout::offset(int node, int leader, uint64_t step) const {
  place_shares(step);
  return offsets_[index(node, leader)];
}

uint64_t SectionLayout::count(uint64_t step) const {
  place_shares(step);
  return offsets_.back();
}

std::vector<uint64_t> SectionLayout::area(int leader, uint64_t step) const {
  place_shares(step);
  const auto first = offsets_.begin() + static_cast<std::ptrdiff_t>(index(0, leader));
  std::vector<uint64_t> begins(first, first + map_.nodes());
  begins.push_back(leader + 1 < leaders_ ? offsets_[index(order_.front(), leader + 1)]
                                         : offsets_.back());
  return begins;
}

int SectionLayout::place_at(int node, uint64_t element) const {
  const auto first = ends_.begin() + map_.first(node);
  const auto last = ends_.begin() + map_.end(node);
  return static_cast<int>(std::upper_bound(first, last, element) - ends_.begin());
}

}  // namespace hsgd
