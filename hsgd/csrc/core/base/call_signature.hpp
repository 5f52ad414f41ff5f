// Signature: describes the call of a rank, so that ranks can compare their calls before data moves.
//
// Also holds the label with shape and name, and the text of SignatureMismatch. Never communicates.
#ifndef HSGD_CORE_BASE_CALL_SIGNATURE_HPP_
#define HSGD_CORE_BASE_CALL_SIGNATURE_HPP_

#include <cstdint>
#include <string>

#include "core/base/rank_names.hpp"
#include "hsgd_core.h"

namespace hsgd {

// A kind that no hsgd_call has: ranks allocate memory together.
inline constexpr hsgd_kind kAllocate = HSGD_KIND_COUNT;

// Elements per rank, in rank order; empty for most collectives.
struct Counts {
  const uint64_t* of_rank = nullptr;
  int ranks = 0;
};

// A packed call in two words. Only packed signatures have a kind. `word` holds 1 + kind (4 bits),
// dtype (4), op (4), root (20) and a hash of the label (32).
struct Signature {
  uint64_t word = 0;
  uint64_t count = 0;

  static Signature pack(hsgd_kind kind, hsgd_dtype dtype, hsgd_op op, int root, uint64_t count,
                        uint32_t label_hash);
  hsgd_kind kind() const { return static_cast<hsgd_kind>((word & 15) - 1); }
  hsgd_dtype dtype() const { return static_cast<hsgd_dtype>(word >> 4 & 15); }
  hsgd_op op() const { return static_cast<hsgd_op>(word >> 8 & 15); }
  int root() const { return static_cast<int>(word >> 12 & 0xfffff); }
  uint32_t label_hash() const { return static_cast<uint32_t>(word >> 32); }
  bool operator==(const Signature& other) const {
    return word == other.word && count == other.count;
  }
};

inline constexpr int kMaxRoot = 0xfffff;

// The caller's label. Its width is fixed because it lies in shared memory and travels between
// nodes.
struct Label {
  static constexpr int kMaxDimensions = 7;
  static constexpr int kMostCounts = 8;
  int16_t ndim;  // -1: no shape was given
  int16_t name_given;
  int32_t ranks;                  // number of ranks that have `counts`; 0: none
  int64_t shape[kMaxDimensions];  // an extent below 0 may differ between ranks
  char name[64];
  uint64_t counts[kMostCounts];
};
static_assert(sizeof(Label) == 192, "three cache lines");

// Returns a hash of the caller's label; 0 if there is no label.
uint32_t hash_label(const hsgd_label* label, const Counts& counts = {});
// Copies what fits: the first kMaxDimensions extents of a shape and the counts of the first ranks.
// The hash covers all of them.
void fill_label(const hsgd_label* label, const Counts& counts, Label* out);
// Returns a number for "rank `from` sends `count` elements to rank `to`". If any of the three
// differs, the numbers differ with high probability, and so do sums of them.
uint64_t mix_count(uint64_t from, uint64_t to, uint64_t count);

// One rank's side of a mismatch.
struct Call {
  int rank;  // its name
  Signature signature;
  Label label;
};

hsgd_side side_of(int rank, const Label& label);
inline hsgd_side side_of(const Call& call) { return side_of(call.rank, call.label); }

// Returns "allreduce #12 "fc.weight": rank 1 sent 10 float32, rank 3 sent 12 float32; call it with
// ...". `names` are those of the roots.
std::string describe_mismatch(uint64_t sequence, const Call& one, const Call& other,
                              const RankNames& names);
// Returns "allreduce #12", with the caller's name if there is one, for other messages.
std::string describe_call(uint64_t sequence, const Signature& signature,
                          const hsgd_label* label = nullptr);

}  // namespace hsgd

#endif  // HSGD_CORE_BASE_CALL_SIGNATURE_HPP_
