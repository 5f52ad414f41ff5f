// The chunks of a box: read without a lock, changed under one, whole at any moment.
//
// Owns locks, versions and journals, and the order in which they change. A change makes the next
// version of a chunk in a journal, which stays in a cache, publishes it there with one store, and
// then copies it home; whoever comes after a holder that died half-way does the copying. So values
// move through memory as in a sum in place. Readers look where the published version is. Never
// computes values, and knows nothing of changes of several chunks. The idea is that of a redo log
// (Mohan et al., ARIES, TODS 17, 1992); the check of readers is that of a sequence lock (Boehm, Can
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

  // In a segment that was prepared, and outlives this; for the process that makes it.
  BoxChunks(std::byte* base, const BoxPlan& plan);
  // Makes locks and states, once per segment, before anybody else sees it.
  static void prepare(std::byte* base, const BoxPlan& plan);

  Part part_of(uint64_t chunk, uint64_t offset, uint64_t count) const;
  // Copies a part of the published version, whole. Waits only where it was overtaken many times.
  // Throws as lock().
  void read(const Part& part, float* out, const Deadline& deadline) const;

  // A lock, of BoxPlan::kChunksOfLock chunks. Their values are at home then: what a dead holder
  // published was brought there. lock() throws HSGD_ERR_TIMEOUT naming the holder,
  // HSGD_ERR_INTERRUPTED.
  bool try_lock(uint64_t lock) const;
  void lock(uint64_t lock, const Deadline& deadline) const;
  void unlock(uint64_t lock) const;

  // A journal that nobody else has, for any number of changes in a row, until it is given back.
  // Claimed with nothing locked. `place`: where to look first. Throws as lock().
  uint32_t claim_journal(uint64_t place, const Deadline& deadline) const;
  void return_journal(uint32_t journal) const;

  // With the lock of the chunk: where the part's values are, and where their next ones go.
  struct Draft {
    const float* old;
    float* next;
  };
  Draft begin(const Part& part, uint32_t journal) const;
  // Publishes the draft and brings it home. `store`: ordinary where the old values were just read.
  void publish(const Part& part, uint32_t journal, Store store) const;
  // The last copy that was taken; with the lock.
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
  int32_t pid_;  // of who made this: asking the kernel takes as long as changing a chunk
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_BOX_CHUNKS_HPP_
