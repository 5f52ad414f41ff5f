// BoxPlan: the layout of the segment of a parameter box.
//
// The shared structs hold no pointers and only fields of fixed width, except for the lock, whose
// size depends on the C library; attaching processes check it. Never touches memory.
//
//   BoxHeader | BoxLock x locks | BoxChunk x chunks | BoxJournal x journals | BoxCounter x counters
//   | a chunk of values x journals | values
#ifndef HSGD_ONESIDED_BOX_LAYOUT_HPP_
#define HSGD_ONESIDED_BOX_LAYOUT_HPP_

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "node/segments/segment_layout.hpp"

namespace hsgd {

inline constexpr uint32_t kBoxMagic = 0x78626468;  // "hdbx"
inline constexpr uint32_t kBoxVersion = 2;

struct BoxHeader {
  static constexpr size_t kKeyBytes = 72;
  uint32_t magic;
  uint32_t version;  // of this layout
  uint32_t lock_struct_bytes;
  uint32_t counters;
  uint64_t count;        // float32 values
  uint64_t chunk_count;  // values of a chunk; the last may have fewer
  char key[kKeyBytes];
  alignas(kLine) std::atomic<uint64_t> holders;     // holders that ever attached; numbers them
  alignas(kLine) std::atomic<uint64_t> changes;     // writes and pushes that were finished
  alignas(kLine) std::atomic<uint64_t> recoveries;  // locks recovered from dead holders
};

// The place of the published version of a chunk: at home, among the values, or in a journal. One
// word, so that place and version change in one store; no two versions have the same one.
class BoxState {
 public:
  static constexpr uint32_t kHome = 0;
  static constexpr uint32_t kMostJournals = 255;

  explicit BoxState(uint64_t word) : word_(word) {}
  static BoxState home_of(uint64_t version) { return BoxState(version * kPlaces); }
  uint64_t word() const { return word_; }
  bool is_home() const { return word_ % kPlaces == kHome; }
  uint32_t journal() const { return static_cast<uint32_t>(word_ % kPlaces) - 1; }
  BoxState next_in(uint32_t journal) const {
    return BoxState((word_ / kPlaces + 1) * kPlaces + journal + 1);
  }
  BoxState at_home() const { return BoxState(word_ / kPlaces * kPlaces); }

 private:
  static constexpr uint64_t kPlaces = kMostJournals + 1;
  uint64_t word_;
};

// The lock of a few consecutive chunks: locking costs as much as changing one of them.
struct alignas(kLine) BoxLock {
  pthread_mutex_t lock;         // robust: the kernel releases it if the holder dies
  std::atomic<int32_t> holder;  // pid, for errors only
};

struct BoxChunk {
  std::atomic<uint64_t> state;  // a BoxState; written under the lock
  std::atomic<uint64_t> stamp;  // in a copy: the stamp of the last stored one; under the lock
};

// Room for the next version of one chunk at a time; each process that changes values claims one.
struct alignas(kLine) BoxJournal {
  static constexpr uint64_t kNone = UINT64_MAX;
  pthread_mutex_t lock;         // robust
  std::atomic<uint64_t> chunk;  // chunk of its version, or kNone; written under the lock
  std::atomic<int32_t> holder;  // pid, for errors only
};

struct alignas(kLine) BoxCounter {
  std::atomic<int64_t> value;
};
static_assert(sizeof(BoxCounter) == kLine && sizeof(BoxChunk) == 16);
static_assert(sizeof(BoxLock) % kLine == 0 && sizeof(BoxJournal) % kLine == 0);
static_assert(std::atomic<int64_t>::is_always_lock_free);

// The places of all parts, in bytes from the beginning of the segment.
struct BoxPlan {
  uint64_t count = 0;
  uint64_t chunk_count = 0;
  uint32_t counters = 0;

  static constexpr uint64_t kChunksOfLock = 16;
  static constexpr uint64_t kMostJournals = 64;
  static_assert(kMostJournals <= BoxState::kMostJournals);

  uint64_t chunks() const { return (count + chunk_count - 1) / chunk_count; }
  uint64_t locks() const { return (chunks() + kChunksOfLock - 1) / kChunksOfLock; }
  // Returns the number of threads that can change values at a time; more would wait for the locks
  // or for the memory.
  uint32_t journals() const {
    return static_cast<uint32_t>(locks() < kMostJournals ? locks() : kMostJournals);
  }
  size_t lock_offset(uint64_t lock) const {
    return round_up(sizeof(BoxHeader), kLine) + lock * sizeof(BoxLock);
  }
  size_t chunk_offset(uint64_t chunk) const {
    return lock_offset(locks()) + chunk * sizeof(BoxChunk);
  }
  size_t journal_offset(uint32_t journal) const {
    return round_up(chunk_offset(chunks()), kLine) + journal * sizeof(BoxJournal);
  }
  size_t counter_offset(uint64_t counter) const {
    return journal_offset(journals()) + counter * sizeof(BoxCounter);
  }
  size_t value_bytes() const { return round_up(count * sizeof(float), kPartUnit); }
  size_t draft_offset(uint32_t journal) const {
    const uint64_t most = chunk_count < count ? chunk_count : count;
    return round_up(counter_offset(counters), kPartUnit) +
           journal * round_up(most * sizeof(float), kLine);
  }
  size_t values_offset() const { return round_up(draft_offset(journals()), kPartUnit); }
  size_t segment_bytes() const { return values_offset() + value_bytes(); }
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_BOX_LAYOUT_HPP_
