// What lies in the segment of a parameter box.
//
// Owns offsets and the shared structs: no pointers, fixed width but for the lock, whose size is
// that of the C library and is checked by whoever attaches. Never touches memory.
//
//   BoxHeader | BoxChunk x chunks | BoxCounter x counters | values A | values B
#ifndef HSGD_BOX_LAYOUT_HPP_
#define HSGD_BOX_LAYOUT_HPP_

#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "layout.hpp"

namespace hsgd {

inline constexpr uint32_t kBoxMagic = 0x78626468;  // "hdbx"
inline constexpr uint32_t kBoxVersion = 1;

struct BoxHeader {
  static constexpr size_t kKeyBytes = 72;
  uint32_t magic;
  uint32_t version;  // of this layout
  uint32_t chunk_struct_bytes;
  uint32_t counters;
  uint64_t count;        // float32 values
  uint64_t chunk_count;  // values of a chunk; the last may have fewer
  char key[kKeyBytes];
  alignas(kLine) std::atomic<uint64_t> holders;     // that ever attached; gives each a place
  alignas(kLine) std::atomic<uint64_t> changes;     // writes and pushes that were finished
  alignas(kLine) std::atomic<uint64_t> recoveries;  // locks that were taken from the dead
};

// One chunk of the values has two places, A and B. Version v lies in place v mod 2; the next one is
// made in the other place, under the lock, and then published. So a writer that dies leaves the
// published version whole, and a reader needs no lock.
struct alignas(kLine) BoxChunk {
  pthread_mutex_t lock;              // robust: the kernel takes it from a holder that dies
  std::atomic<uint64_t> version;     // published; written under the lock
  std::atomic<uint64_t> unfinished;  // the version that is being made, or was last
  std::atomic<uint64_t> stamp;       // of a copy: the last one that was taken; under the lock
  std::atomic<int32_t> holder;       // pid, for errors only
};

struct alignas(kLine) BoxCounter {
  std::atomic<int64_t> value;
};
static_assert(sizeof(BoxCounter) == kLine && sizeof(BoxChunk) % kLine == 0);
static_assert(std::atomic<int64_t>::is_always_lock_free);

// Where things lie, in bytes from the beginning of the segment.
struct BoxPlan {
  uint64_t count = 0;
  uint64_t chunk_count = 0;
  uint32_t counters = 0;

  uint64_t chunks() const { return (count + chunk_count - 1) / chunk_count; }
  size_t chunk_offset(uint64_t chunk) const {
    return round_up(sizeof(BoxHeader), kLine) + chunk * sizeof(BoxChunk);
  }
  size_t counter_offset(uint64_t counter) const {
    return chunk_offset(chunks()) + counter * sizeof(BoxCounter);
  }
  size_t place_bytes() const { return round_up(count * sizeof(float), kPage); }
  size_t place_offset(uint64_t version) const {
    return round_up(counter_offset(counters), kPage) + (version % 2) * place_bytes();
  }
  size_t segment_bytes() const { return place_offset(1) + place_bytes(); }
};

}  // namespace hsgd

#endif  // HSGD_BOX_LAYOUT_HPP_
