// What `hsgd status` reads of a process: the layout of its status page.
//
// Owns the structs, of fixed width and without pointers. One writer: the process that made the
// page. Readers are other processes (hsgd/tools/status/page.py), which copy a record and keep it if
// `version` was even and the same before and after. A change of the layout needs a new
// kStatusVersion here and there. Never touches memory.
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
  kSetUp = 1,   // its ranks meet, or measure
  kOpen = 2,    // takes collectives
  kBroken = 3,  // since an error
};

// One communicator of the process. Times are of CLOCK_MONOTONIC; 0: never.
struct alignas(64) StatusRecord {
  // All that a call writes that need not wait lies in one line.
  std::atomic<uint64_t> version;  // odd while the writer changes the rest
  uint64_t sequence;              // of the last call that began, as users count
  uint64_t finished;              // calls that ended well
  uint64_t bytes;                 // of that call's payload
  int64_t since_ns;               // that call began; its end, once it has ended and had waited
  int64_t looked_ns;              // the last look at the other ranks during that call
  int64_t waits_since_ns;         // it has been waiting for `awaited`; 0: it did not wait
  uint8_t kind;                   // of that call: hsgd_kind, or kAllocate
  uint8_t in_call;                // 1: it has not ended
  uint8_t named;                  // 1: `name` is that of this call
  uint8_t reserved[5];

  int32_t awaited;       // world rank that it waits for; -1: not known
  int32_t awaited_node;  // the node, where it waits for another one; -1: it does not
  NoteState state;
  int32_t error;     // hsgd_status that broke it
  uint64_t id;       // equal on all ranks of the communicator; 0 until they have met
  uint64_t meeting;  // hash of the path at which the ranks of the node meet
  int32_t rank, size;
  int32_t local_rank, local_size;
  int32_t node, nodes;
  int32_t error_rank;  // world rank that the error is about, or -1
  int32_t is_first;    // 1: it is the first rank of its node for which a collective failed

  char name[64];
  char message[192];  // of the error
};
static_assert(sizeof(StatusRecord) == 384);
static_assert(offsetof(StatusRecord, awaited) == 64);
static_assert(offsetof(StatusRecord, name) == 128);

// Takes the place of the first record.
struct StatusHeader {
  char magic[8];
  uint32_t version;       // kStatusVersion
  uint32_t record_bytes;  // the first record lies behind so many
  uint32_t pid;           // of the writer, as it sees itself: a forked child has the page as well
  uint32_t capacity;      // records that the page has room for
  // Records that were in use at one time: what lies behind them holds nothing. One writer at a
  // time, and stored after the memory of those records is there.
  std::atomic<uint32_t> used;
  uint32_t without;  // communicators that found no room
  // Behind the room for records: names of hosts of the communicators' nodes, in kHostBytes each,
  // with a NUL. Only one process of each node has them; of an older hsgd none, and 0 stands here.
  // The same rule as for `used`.
  uint32_t hosts_begin;
  std::atomic<uint32_t> hosts;
};
static_assert(sizeof(StatusHeader) <= sizeof(StatusRecord));
inline constexpr size_t kHostBytes = 64;

}  // namespace hsgd

#endif  // HSGD_CORE_STATUS_STATUS_RECORD_HPP_
