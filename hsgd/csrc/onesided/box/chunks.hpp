// BoxChunks: the chunks of a box, read without a lock and changed under one; every read is
// consistent.
//
// Owns locks, versions and journals, and the order in which they change. A change writes the next
// version of a chunk to a journal, which stays in a cache, publishes it there with one store, and
// then copies it home. If the holder dies half-way, the next holder of the lock copies it. So
// values move through memory as in a sum in place. Readers read the place of the published version.
// Never computes values, and knows nothing of changes of several chunks. The idea is that of a redo
// log (Mohan et al., ARIES, TODS 17, 1992); readers check as in a sequence lock (Boehm, Can
// Seqlocks Get Along With Programming Language Memory Models?, MSPC 2012).
#ifndef HSGD_ONESIDED_BOX_CHUNKS_HPP_
#define HSGD_ONESIDED_BOX_CHUNKS_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/kernels/reduce.hpp"
#include "core/os/wait.hpp"
#include "onesided/box/layout.hpp"

namespace hsgd {

class BoxChunks {
 public:
  struct Part {  // of one chunk
    uint64_t chunk;
    uint64_t begin;  // within the chunk
    uint64_t count;
    uint64_t at;  // within the caller's range
  };

  // Uses a prepared segment, which must outlive this object, from the process that creates the
  // object.
  BoxChunks(std::byte* base, const BoxPlan& plan);
  // Initializes locks and states, once per segment, before any other process sees it.
  static void prepare(std::byte* base, const BoxPlan& plan);

  Part part_of(uint64_t chunk, uint64_t offset, uint64_t count) const;
  // Copies a part of one published version. Waits only if writers overtook it many times. Throws as
  // lock().
  void read(const Part& part, float* out, const Deadline& deadline) const;

  // Locks kChunksOfLock chunks of BoxPlan. Their values are then at home; a version that a dead
  // holder published is copied there. lock() throws HSGD_ERR_TIMEOUT, naming the holder, and
  // HSGD_ERR_INTERRUPTED.
  bool try_lock(uint64_t lock) const;
  void lock(uint64_t lock, const Deadline& deadline) const;
  void unlock(uint64_t lock) const;

  // Claims a journal for this caller alone, for any number of changes, until return_journal(). The
  // caller must hold no lock. `place`: the first journal to try. Throws as lock().
  uint32_t claim_journal(uint64_t place, const Deadline& deadline) const;
  void return_journal(uint32_t journal) const;

  // The places of a part's old and next values; valid with the lock of the chunk.
  struct Draft {
    const float* old;
    float* next;
  };
  Draft begin(const Part& part, uint32_t journal) const;
  // Publishes the draft and copies it home. `store`: ordinary if the old values were just read.
  void publish(const Part& part, uint32_t journal, Store store) const;
  // Returns the stamp of the last stored copy; needs the lock.
  std::atomic<uint64_t>& stamp(uint64_t chunk) const { return chunk_at(chunk).stamp; }

 private:
  BoxHeader& header() const { return *reinterpret_cast<BoxHeader*>(base_); }
  BoxLock& lock_at(uint64_t lock) const {
    return *reinterpret_cast<BoxLock*>(base_ + plan_.lock_offset(lock));
  }
  BoxChunk& chunk_at(uint64_t chunk) const {
    return *reinterpret_cast<BoxChunk*>(base_ + plan_.chunk_offset(chunk));
  }
  BoxJournal& journal_at(uint32_t journal) const {
    return *reinterpret_cast<BoxJournal*>(base_ + plan_.journal_offset(journal));
  }
  float* home_of(uint64_t chunk) const {
    return reinterpret_cast<float*>(base_ + plan_.values_offset()) + chunk * plan_.chunk_count;
  }
  float* draft_in(uint32_t journal) const {
    return reinterpret_cast<float*>(base_ + plan_.draft_offset(journal));
  }
  uint64_t values_in(uint64_t chunk) const;
  bool take_lock(uint64_t lock, int64_t limit_ns) const;
  bool take_journal(uint32_t journal, int64_t limit_ns) const;
  bool try_read(const Part& part, float* out) const;
  void bring_home(uint64_t chunk, uint64_t begin, uint64_t count, Store store) const;
  void check_lock(uint64_t lock, const Deadline& deadline) const;
  void check_journal(uint32_t journal, const Deadline& deadline) const;
  void check(const Deadline& deadline, const std::atomic<int32_t>& holder,
             const std::string& what) const;

  std::byte* base_;
  BoxPlan plan_;
  CopyFn copy_;
  int32_t pid_;  // of the creating process: asking the kernel takes as long as changing a chunk
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_BOX_CHUNKS_HPP_
