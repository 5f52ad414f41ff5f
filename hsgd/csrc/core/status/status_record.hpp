// The layout of a process's status page, which `hsgd status` reads.
//
// Structs of fixed width, without pointers. The only writer is the process that made the page.
// Readers are other processes (hsgd/tools/status/page.py): they copy a record and keep it if
// `version` was even and the same before and after. A change of the layout needs a new
// kStatusVersion here and there.
#ifndef HSGD_CORE_STATUS_STATUS_RECORD_HPP_
#define HSGD_CORE_STATUS_STATUS_RECORD_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace hsgd {

inline constexpr uint32_t kStatusVersion = 1;
inline constexpr char kStatusMagic[8] = {'h', 's', 'g', 'd', 's', 't', 'a', 't'};

enum class NoteState : uint32_t {
  kFree = 0,    // no communicator
  kSetUp = 1,   // its ranks meet or measure
  kOpen = 2,    // accepts collectives
  kBroken = 3,  // an error broke it
};

// One communicator of the process. Times are of CLOCK_MONOTONIC; 0: never.
struct alignas(64) StatusRecord {
  // One cache line holds everything that a call writes if it need not wait.
  std::atomic<uint64_t> version;  // odd while the writer changes the rest
  uint64_t sequence;              // of the last call that began; users see this number
  uint64_t finished;              // calls that succeeded
  uint64_t bytes;                 // payload of the last call
  int64_t since_ns;               // start of the last call; its end, if it has ended and had waited
  int64_t looked_ns;              // the last look at the other ranks during that call
  int64_t waits_since_ns;         // start of the wait for `awaited`; 0: it did not wait
  uint8_t kind;                   // of the last call: hsgd_kind, or kAllocate
  uint8_t in_call;                // 1: the call has not ended
  uint8_t named;                  // 1: `name` is the name of this call
  uint8_t reserved[5];

  int32_t awaited;       // world rank that the call waits for; -1: not known
  int32_t awaited_node;  // node that it waits for, if another one; -1: none
  NoteState state;
  int32_t error;     // hsgd_status that broke the communicator
  uint64_t id;       // equal on all ranks of the communicator; 0 until they have met
  uint64_t meeting;  // hash of the path at which the ranks of the node meet
  int32_t rank, size;
  int32_t local_rank, local_size;
  int32_t node, nodes;
  int32_t error_rank;  // world rank that the error is about, or -1
  int32_t is_first;    // 1: the first rank of its node whose collective failed

  char name[64];
  char message[192];  // of the error
};
static_assert(sizeof(StatusRecord) == 384);
static_assert(offsetof(StatusRecord, awaited) == 64);
static_assert(offsetof(StatusRecord, name) == 128);

// Header of the page; takes the place of the first record.
struct StatusHeader {
  char magic[8];
  uint32_t version;       // kStatusVersion
  uint32_t record_bytes;  // size of a record; the first record begins at this offset
  uint32_t pid;       // of the writer, in its own namespace: a forked child has the page as well
  uint32_t capacity;  // number of records that fit in the page
  // Most records that were ever in use at once: records behind them are empty. One writer at a
  // time; stored after the memory of those records is allocated.
  std::atomic<uint32_t> used;
  uint32_t without;  // communicators for which no record was free
  // Offset of the host names behind the records: hosts of the communicators' nodes, kHostBytes
  // each, with a NUL. Only one process of each node has names; 0 in other processes and in older
  // versions. `hosts` counts them, with the same rule as `used`.
  uint32_t hosts_begin;
  std::atomic<uint32_t> hosts;
};
static_assert(sizeof(StatusHeader) <= sizeof(StatusRecord));
inline constexpr size_t kHostBytes = 64;

}  // namespace hsgd

#endif  // HSGD_CORE_STATUS_STATUS_RECORD_HPP_
