// Offsets and bounds.
#include "collectives/alltoall_layout.hpp"

#include <algorithm>
#include <cstring>

#include "node/segment_layout.hpp"

namespace hsgd {

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

AlltoallLayout::AlltoallLayout(const NodeMap& map, size_t chunk_bytes)
    : map_(map), chunk_bytes_(chunk_bytes), unit_bytes_(kLine) {
  for (int node = 0; node < map.nodes(); ++node) {
    const size_t lost = block_header_bytes(node) + static_cast<size_t>(map.ranks_on(node)) * kLine;
    if (landing_bytes(node) < 2 * lost) unit_bytes_ = sizeof(double);  // the largest element
  }
}

size_t AlltoallLayout::slot_header_bytes() const {
  return round_up(offsets_bytes(map_.nodes()), unit_bytes_);
}

size_t AlltoallLayout::block_header_bytes(int node) const {
  return round_up(offsets_bytes(map_.ranks_on(node)), unit_bytes_);
}

size_t AlltoallLayout::landing_bytes(int node) const {
  const int remote = map_.size() - map_.ranks_on(node);
  return remote == 0 ? chunk_bytes_ : chunk_bytes_ / static_cast<size_t>(remote) / kLine * kLine;
}

size_t AlltoallLayout::landing_offset(int place) const {
  const int node = map_.node();
  const int index = place < map_.first(node) ? place : place - map_.ranks_on(node);
  return static_cast<size_t>(index) * landing_bytes(node);
}

uint64_t AlltoallLayout::steps_needed(const uint64_t* counts, size_t element_bytes) const {
  uint64_t steps = 1;
  uint64_t total_bytes = 0;
  uint64_t total_lost = slot_header_bytes();
  for (int node = 0; node < map_.nodes(); ++node) {
    uint64_t bytes = 0;
    uint64_t lost = block_header_bytes(node);
    for (int place = map_.first(node); place < map_.end(node); ++place) {
      bytes += place == map_.place() ? 0 : counts[map_.rank(place)] * element_bytes;
      lost += unit_bytes_;
    }
    if (node != map_.node()) steps = std::max(steps, steps_for(bytes, landing_bytes(node), lost));
    total_bytes += bytes;
    total_lost += lost;
  }
  return std::max(steps, steps_for(total_bytes, chunk_bytes_, total_lost));
}

}  // namespace hsgd
