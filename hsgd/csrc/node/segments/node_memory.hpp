// Memory that all ranks of a node share: one file with a part for each rank, mapped once by each.
//
// Owns the mapping, and the file until all ranks have it. Each rank allocates the pages of its own
// part, and of its share of what all share, near its cores. Never decides what lies in a part.
#ifndef HSGD_NODE_SEGMENTS_NODE_MEMORY_HPP_
#define HSGD_NODE_SEGMENTS_NODE_MEMORY_HPP_

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>

#include "core/os/shared_memory.hpp"
#include "node/rendezvous/bootstrap.hpp"

namespace hsgd {

// Slots at the end of local rank 0's part of which each rank uses a share, in the order of ranks.
struct SharedSlots {
  size_t begin = 0;
  size_t bytes = 0;  // of one
  size_t count = 0;  // 0: there are none
};

class NodeMemory {
 public:
  // `first_bytes`: of local rank 0's part; `bytes`: of each other. The same on all ranks. Each rank
  // allocates its share of the `slots`, so that these lie near all of them, and not near one.
  NodeMemory(int rank, int size, size_t first_bytes, size_t bytes, const SharedSlots& slots = {});

  // From where one part begins to where the next one does: whole pages, huge ones where parts are
  // large enough for some.
  static size_t pitch(size_t bytes);

  // What the ranks bring to the meeting at which they share this memory, once. `available`: see
  // check_memory(), `remedy` too. `ready`: called when the own part can be written, before any
  // other rank is told that this one has come.
  MeetingFile bring(const char* remedy, std::optional<size_t> available,
                    const std::function<void()>& ready = nullptr);
  // After the meeting: enters this rank's part in the page table, and all others where they have no
  // more than `most_bytes` together. The file is closed.
  void complete(size_t most_bytes);

  bool is_mapped() const { return segment_.data() != nullptr; }
  std::byte* part(int rank) const { return segment_.data() + begin(rank); }
  size_t part_bytes(int rank) const { return rank == 0 ? first_bytes_ : bytes_; }

 private:
  size_t begin(int rank) const {
    return rank == 0 ? 0 : first_pitch_ + static_cast<size_t>(rank - 1) * pitch_;
  }

  void allocate(int fd) const;
  // Whether there are pages between parts, which nobody allocates.
  bool has_gaps() const { return std::max(first_bytes_, bytes_) >= kLargeSegment; }

  int rank_;
  int size_;
  size_t first_bytes_;
  size_t bytes_;
  SharedSlots slots_;
  size_t first_pitch_;
  size_t pitch_;
  Segment segment_;
};

}  // namespace hsgd

#endif  // HSGD_NODE_SEGMENTS_NODE_MEMORY_HPP_
