// The file, from its making to the mapping.
#include "node/node_memory.hpp"

#include <algorithm>
#include <utility>

#include "node/segment_layout.hpp"

namespace hsgd {

size_t NodeMemory::pitch(size_t bytes) {
  return round_up(bytes, bytes >= kLargeSegment ? kHugePage : page_bytes());
}

NodeMemory::NodeMemory(int rank, int size, size_t first_bytes, size_t bytes)
    : rank_(rank),
      size_(size),
      first_bytes_(first_bytes),
      bytes_(bytes),
      first_pitch_(pitch(first_bytes)),
      pitch_(pitch(bytes)) {}

MeetingFile NodeMemory::bring(const char* remedy, std::optional<size_t> available,
                              const std::function<void()>& ready) {
  MeetingFile file;
  file.make = [=] {
    check_memory(std::max(first_bytes_, bytes_), static_cast<size_t>(size_), remedy, available);
    return new_memory_file(begin(size_));
  };
  file.prepare = [=](Fd descriptor) {
    allocate_pages(descriptor.get(), begin(rank_), part_bytes(rank_));
    segment_ = Segment::attach_empty(std::move(descriptor), begin(size_));
    if (ready) ready();
  };
  return file;
}

void NodeMemory::complete(size_t most_bytes) {
  const bool all = begin(size_) <= most_bytes;
  if (all && !has_gaps()) {
    segment_.populate(0, begin(size_));
  } else {
    for (int rank = 0; rank < size_; ++rank) {
      if (all || rank == rank_) segment_.populate(begin(rank), part_bytes(rank));
    }
  }
  segment_.forget_file();
}

}  // namespace hsgd
