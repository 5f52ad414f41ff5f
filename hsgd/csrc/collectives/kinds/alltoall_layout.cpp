// AlltoallLayout: computes offsets and bounds.
#include "collectives/kinds/alltoall_layout.hpp"

#include <algorithm>
#include <cstring>

#include "core/base/error.hpp"
#include "node/segments/segment_layout.hpp"

namespace hsgd {
namespace {

constexpr size_t kLeastUnitBytes = sizeof(double);  // the largest element

// Returns the number of ranks for which offsets and rounding take half of a slot.
int ranks_that_fit(const NodeMap& map, size_t slot_bytes) {
  const size_t per_rank = sizeof(uint32_t) + kLeastUnitBytes;
  HSGD_CHECK(slot_bytes / 2 >= 2 * per_rank);
  const auto fit = static_cast<int>((slot_bytes / 2 - per_rank) / per_rank);
  return std::min(map.most_ranks(), fit);
}

}  // namespace

uint32_t offset_at(const std::byte* header, int index) {
  uint32_t offset = 0;
  std::memcpy(&offset, header + static_cast<size_t>(index) * sizeof offset, sizeof offset);
  return offset;
}

void set_offset(std::byte* header, int index, uint64_t offset) {
  const auto value = static_cast<uint32_t>(offset);
  std::memcpy(header + static_cast<size_t>(index) * sizeof value, &value, sizeof value);
}

size_t offsets_bytes(int count) { return (static_cast<size_t>(count) + 1) * sizeof(uint32_t); }

AlltoallLayout::AlltoallLayout(const NodeMap& map, size_t slot_bytes)
    : map_(map),
      landing_bytes_(map.nodes() == 1
                         ? slot_bytes
                         : slot_bytes / static_cast<size_t>(map.most_ranks()) / kLine * kLine),
      group_ranks_(ranks_that_fit(map, landing_bytes_)),
      groups_((map.most_ranks() + group_ranks_ - 1) / group_ranks_),
      unit_bytes_(kLine) {
  const auto ranks = static_cast<size_t>(group_ranks_);
  if (landing_bytes_ < 2 * (header_bytes() + ranks * kLine)) unit_bytes_ = kLeastUnitBytes;
}

Range AlltoallLayout::group(uint64_t index) const {
  const auto ranks = static_cast<uint64_t>(group_ranks_);
  return {index * ranks, std::min((index + 1) * ranks, static_cast<uint64_t>(map_.most_ranks()))};
}

size_t AlltoallLayout::header_bytes() const {
  return round_up(offsets_bytes(group_ranks_), unit_bytes_);
}

uint64_t AlltoallLayout::pieces_needed(const uint64_t* counts, size_t element_bytes) const {
  const uint64_t lost = header_bytes() + static_cast<uint64_t>(group_ranks_) * unit_bytes_;
  uint64_t pieces = 1;
  for (int node = 0; node < map_.nodes(); ++node) {
    for (int first = map_.first(node); first < map_.end(node); first += group_ranks_) {
      const int end = std::min(map_.end(node), first + group_ranks_);
      uint64_t bytes = 0;
      for (int place = first; place < end; ++place) {
        bytes += place == map_.place() ? 0 : counts[map_.rank(place)] * element_bytes;
      }
      pieces = std::max(pieces, steps_for(bytes, landing_bytes_, lost));
    }
  }
  return pieces;
}

}  // namespace hsgd
