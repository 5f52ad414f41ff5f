// SharedBuffer: a user's buffer that every rank of a node can reach; collectives on it need no
// staging.
//
// Also finds the buffer of a communicator in which an address lies. A buffer has a part for each
// rank, and all ranks of the node make it together; each rank can free its mapping at any time.
// Never reads or writes the memory.
#ifndef HSGD_NODE_SEGMENTS_SYMMETRIC_MEMORY_HPP_
#define HSGD_NODE_SEGMENTS_SYMMETRIC_MEMORY_HPP_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/os/wait.hpp"
#include "node/segments/node_memory.hpp"

namespace hsgd {

// Where a rank's argument lies, as sent in the cell of a collective.
struct ArenaPlace {
  uint64_t buffer;  // SharedBuffer::id(); 0: in private memory
  uint64_t offset;  // bytes from the beginning of the rank's own part
};

class SharedBuffer {
 public:
  // Collective over the ranks of the node, which meet at the abstract socket name `path`. `id` is
  // above 0; `id` and `bytes` (per rank) are the same on all ranks. `available`: memory that was
  // left before any rank began. `rank`, `names` and errors: see meet().
  SharedBuffer(uint64_t id, int rank, const std::vector<int>& names, size_t bytes, size_t available,
               const std::string& path, const Deadline& deadline);
  uint64_t id() const { return id_; }
  size_t bytes() const { return memory_.part_bytes(rank_); }
  std::byte* data(int rank) const { return memory_.part(rank); }
  std::byte* own() const { return data(rank_); }

 private:
  uint64_t id_;
  int rank_;
  NodeMemory memory_;
};

class Arena {
 public:
  void add(const std::shared_ptr<SharedBuffer>& buffer);
  bool empty() const { return buffers_.empty(); }
  // Returns the buffer that holds all of [data, data + bytes) and keeps it alive; nullptr: none.
  std::shared_ptr<SharedBuffer> find(const void* data, size_t bytes) const;

 private:
  // Buffers by the address of this rank's part. Freed buffers stay until the next add().
  std::map<const std::byte*, std::weak_ptr<SharedBuffer>> buffers_;
};

}  // namespace hsgd

#endif  // HSGD_NODE_SEGMENTS_SYMMETRIC_MEMORY_HPP_
