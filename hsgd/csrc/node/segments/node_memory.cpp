// Makes, fills and maps the file.
#include "node/segments/node_memory.hpp"

#include <algorithm>
#include <utility>

#include "core/os/page.hpp"
#include "node/segments/segment_layout.hpp"

namespace hsgd {

size_t NodeMemory::pitch(size_t bytes) {
  return round_up(bytes, bytes >= kLargeSegment ? kHugePage : page_bytes());
}

NodeMemory::NodeMemory(int rank, int size, size_t first_bytes, size_t bytes,
                       const SharedSlots& slots)
    : rank_(rank),
      size_(size),
      first_bytes_(first_bytes),
      bytes_(bytes),
      slots_(slots),
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
    allocate(descriptor.get());
    segment_ = Segment::attach_empty(std::move(descriptor), begin(size_));
    if (ready) ready();
  };
  return file;
}

void NodeMemory::allocate(int fd) const {
  const bool shares = slots_.count > 0;
  const size_t own = shares && rank_ == 0 ? slots_.begin : part_bytes(rank_);
  if (own > 0) allocate_pages(fd, begin(rank_), own);
  if (!shares) return;
  // From the first page that begins in this rank's share to the first page of the next rank's
  // share.
  const auto border = [&](size_t slot, int rank) {
    const size_t share = slots_.bytes * static_cast<size_t>(rank) / static_cast<size_t>(size_);
    const bool ends = slot + 1 == slots_.count && rank == size_;
    return ends ? first_bytes_ : round_up(slots_.begin + slot * slots_.bytes + share, page_bytes());
  };
  for (size_t slot = 0; slot < slots_.count; ++slot) {
    const size_t from = border(slot, rank_);
    const size_t to = border(slot, rank_ + 1);
    if (to > from) allocate_pages(fd, from, to - from);
  }
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
