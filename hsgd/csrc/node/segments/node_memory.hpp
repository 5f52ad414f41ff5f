// NodeMemory: memory that all ranks of a node share: one file with a part for each rank, mapped
// once by each rank.
//
// Owns the mapping, and the file until all ranks have it. Each rank allocates the pages of its own
// part, and of its share of the common slots, near its cores.
#ifndef HSGD_NODE_SEGMENTS_NODE_MEMORY_HPP_
#define HSGD_NODE_SEGMENTS_NODE_MEMORY_HPP_

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>

#include "core/os/shared_memory.hpp"
#include "node/rendezvous/bootstrap.hpp"

namespace hsgd {

// Slots at the end of local rank 0's part; each rank uses a share of each slot, in the order of
// ranks.
struct SharedSlots {
  size_t begin = 0;
  size_t bytes = 0;  // of one
  size_t count = 0;  // 0: there are none
};

class NodeMemory {
 public:
  // `first_bytes`: size of local rank 0's part; `bytes`: size of each other part. The same on all
  // ranks. Each rank allocates its share of the `slots`, so they lie near all ranks and not near
  // one.
  NodeMemory(int rank, int size, size_t first_bytes, size_t bytes, const SharedSlots& slots = {});

  // Returns the distance between the beginnings of two parts: whole pages, huge ones if parts are
  // large enough.
  static size_t pitch(size_t bytes);

  // Returns what this rank brings to the meeting at which the ranks share this memory, once.
  // `remedy` and `available`: see check_memory(). `ready`: called when this rank's part can be
  // written, before any other rank learns that this rank has come.
  MeetingFile bring(const char* remedy, std::optional<size_t> available,
                    const std::function<void()>& ready = nullptr);
  // Call it after the meeting. Enters this rank's part in the page table, and all others if they
  // have at most `most_bytes` together. Closes the file.
  void complete(size_t most_bytes);

  bool is_mapped() const { return segment_.data() != nullptr; }
  std::byte* part(int rank) const { return segment_.data() + begin(rank); }
  size_t part_bytes(int rank) const { return rank == 0 ? first_bytes_ : bytes_; }

 private:
  size_t begin(int rank) const {
    return rank == 0 ? 0 : first_pitch_ + static_cast<size_t>(rank - 1) * pitch_;
  }

  void allocate(int fd) const;
  // Returns true if there are pages between parts that no rank allocates.
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
