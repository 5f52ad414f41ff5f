// SegmentLayout: the layout of the shared segment that each rank owns.
//
// Offsets and shared structs: fixed width, no pointers, one writer per cache line except for
// counts, claims and doorbells. A change needs a new kVersion
// (node/rendezvous/meeting_messages.hpp).
//
//   Control | cells: kCells x (header line + one-shot payload) | results: the same | in ring | out
//   ring
#ifndef HSGD_NODE_SEGMENTS_SEGMENT_LAYOUT_HPP_
#define HSGD_NODE_SEGMENTS_SEGMENT_LAYOUT_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/base/call_signature.hpp"
#include "core/os/cpu_budget.hpp"
#include "core/os/wait.hpp"
#include "core/topology/cpu_topology.hpp"
#include "hsgd_core.h"
#include "node/segments/combining_tree.hpp"

namespace hsgd {

inline constexpr size_t kLine = 64;
// Alignment of the parts of a segment within one mapping, independent of the kernel's page size.
inline constexpr size_t kPartUnit = 4096;
// Number of cells; they are reused every kCells collectives. A rank that fills the cell of
// collective n has seen every header of n - 1, so all ranks have finished n - 2: two cells would be
// enough; with four, prefetches of neighbouring lines do not touch the line in use.
inline constexpr uint64_t kCells = 4;

constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Steps (chunks) that the owner has finished, counted over the life of the communicator. Only the
// owner writes.
struct alignas(kLine) Progress {
  std::atomic<uint64_t> staged;     // the owner's input of the step lies in the in ring
  std::atomic<uint64_t> reduced;    // the sum of the owner's slice of the step can be gathered
  std::atomic<uint64_t> exchanged;  // leaders only: owner's part is summed over nodes
  std::atomic<uint64_t> gathered;   // the owner has read all it needs of the step
};
static_assert(sizeof(Progress) == kLine);

// Header of one collective; reused. `sequence` is stored last (release) and read first (acquire): a
// reader that sees it sees the whole header and payload.
struct alignas(kLine) CellHeader {
  static constexpr size_t kInlineBytes = 32;
  static constexpr uint64_t kStop = uint64_t{1} << 63;  // in `note`: a rank asks all to stop
  std::atomic<uint64_t> sequence;
  Signature signature;
  // In result cells: hsgd_status of the collective on the leader. In others: ticks that the owner
  // worked in the last collective whose cost is compared, see StoreChoice. In both with kStop.
  uint64_t note;
  std::byte payload[kInlineBytes];
};
static_assert(sizeof(CellHeader) == kLine);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Why the owner gave up; written once. `code` is stored last (release): a reader that sees it sees
// the rest.
struct Failure {
  std::atomic<int32_t> code;  // hsgd_status; 0 while all is well
  int32_t rank;
  uint64_t first_missed;  // first collective without the owner
  char message[496];
};

// State in which the survivors of a group agree which ranks continue; see
// node/segments/survivors.hpp.
struct alignas(kLine) Survival {
  static constexpr int kMostRanks = 1024;
  // Local rank 0's only; any rank changes it by compare-and-swap: round, phase and the rank that
  // decided. Memory outlives its owner, so the ranks agree even if that rank is dead.
  std::atomic<uint64_t> state;
  // Local rank 0's only: 1 once a rank of the group has given up. Exchanged, so that only one rank
  // finds 0.
  std::atomic<uint32_t> gave_up;
  // Written by the owner: 1 + the round for which it came, and 1 + the round in which it joined the
  // new group.
  alignas(kLine) std::atomic<uint64_t> came;
  std::atomic<uint64_t> joined;
  alignas(kLine) std::atomic<uint64_t> members[kMostRanks / 64];  // a bit for each local rank
  std::atomic<uint64_t> meeting[4];  // MeetingWords: where the members meet
};

struct alignas(kLine) Control {
  std::atomic<uint32_t> closed;  // the owner has destroyed its communicator
  Cores cores;                   // cores that the owner may use
  CpuPlace place;       // where these cores lie; unknown if ranks are not counted in groups
  uint64_t meeting[4];  // local rank 0: MeetingWords of the next meeting
  alignas(kLine) Progress progress;
  // In a group's first rank: the ranks of the group sleep on it and count themselves there.
  alignas(kLine) Doorbell bell;
  alignas(kLine) TreeNode tree;
  // Local rank 0: the collectives of the cells in which ranks of the node differ, and the first
  // collective in which a rank asked to stop (0: none); written by a rank that counted last.
  alignas(kLine) std::atomic<uint64_t> differ[kCells];
  std::atomic<uint64_t> stop;
  // Local rank 0: id of the group, drawn at random before the ranks meet. It lies here because this
  // line has room; the position of the line of `progress` must not change.
  uint64_t id;
  // Counts the owner's looks at its peers while it waits: a waiting rank delays no other rank.
  alignas(kLine) std::atomic<uint32_t> looks;
  // Local rank 0: claimed parts of collectives, counted over the life of the communicator.
  alignas(kLine) std::atomic<uint64_t> claimed;
  alignas(kLine) std::atomic<uint64_t> finished;
  alignas(kLine) Failure failure;
  // Why the owner leaves, for error texts, or empty; written before `closed`.
  alignas(kLine) char leaving[4 * kLine];
  alignas(kLine) Survival survival;
  alignas(kLine) Label labels[kCells];
  alignas(kLine) Call mismatch[2];  // local rank 0's: the two sides of a mismatch between nodes
};

class SegmentLayout {
 public:
  SegmentLayout() = default;
  // `in_bytes` and `out_bytes`: size of one slot of each ring.
  SegmentLayout(size_t oneshot_bytes, size_t in_bytes, size_t out_bytes, size_t slots)
      : cell_bytes_(kLine + round_up(oneshot_bytes, kLine)),
        in_bytes_(round_up(in_bytes, kPartUnit)),
        out_bytes_(round_up(out_bytes, kPartUnit)),
        slots_(slots) {}

  size_t cell(uint64_t sequence) const {
    return round_up(sizeof(Control), kPartUnit) + sequence % kCells * cell_bytes_;
  }
  size_t result(uint64_t sequence) const {
    return cell(0) + (kCells + sequence % kCells) * cell_bytes_;
  }
  size_t in_slot(uint64_t step) const {
    return round_up(cell(0) + 2 * kCells * cell_bytes_, kPartUnit) + step % slots_ * in_bytes_;
  }
  size_t out_slot(uint64_t step) const {
    return in_slot(0) + slots_ * in_bytes_ + step % slots_ * out_bytes_;
  }
  // The out ring lies last, so that a rank that never writes one needs no memory for it.
  size_t bytes(bool with_out_ring) const {
    return out_slot(0) + (with_out_ring ? slots_ * out_bytes_ : 0);
  }
  size_t slots() const { return slots_; }
  size_t out_bytes() const { return out_bytes_; }  // of one slot

 private:
  size_t cell_bytes_ = 0;
  size_t in_bytes_ = 0;
  size_t out_bytes_ = 0;
  size_t slots_ = 0;
};

}  // namespace hsgd

#endif  // HSGD_NODE_SEGMENTS_SEGMENT_LAYOUT_HPP_
