// Runs the rounds forwards, then backwards.
#include "network/rounds/slice_broadcast.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "network/rounds/round_messages.hpp"

namespace hsgd {

SliceBroadcast::SliceBroadcast(Transport& transport, const RoundSchedule& rounds, size_t slots,
                               WireCounters& counters)
    : BroadcastSteps(slots),
      rounds_(rounds),
      counters_(counters),
      node_(transport.node_rank()),
      partner_(rounds.partner(node_)),
      core_(rounds.core_of(node_)) {
  if (rounds.folds()) stages_.push_back({Kind::kTake, 0});
  for (int round = 0; round < rounds.rounds(); ++round) stages_.push_back({Kind::kScatter, round});
  for (int round = rounds.rounds(); round-- > 0;) stages_.push_back({Kind::kSpread, round});
  if (rounds.folds()) stages_.push_back({Kind::kGive, 0});
  for (size_t slot = 0; slot < slots; ++slot) slices_.emplace_back(transport);
}

void SliceBroadcast::start(int root_node) {
  restart();
  root_ = root_node;
  root_core_ = rounds_.core_of(root_node);
}

void SliceBroadcast::begin(std::byte* data, size_t bytes) {
  Slice& slice = slices_[begin_step()];
  slice.data = data;
  slice.bytes = bytes;
  slice.is_split = std::exchange(next_rides_, false);
  if (slice.is_split) {
    riding_ = &slice;
  } else {
    post(slice, stages_.front());
  }
}

RoundPayload* SliceBroadcast::with_headers() {
  next_rides_ = true;
  return this;
}

size_t SliceBroadcast::write(int round, int core, std::byte* out) {
  const bool has_all = round == kFold && node_ == root_;
  if (!has_all && (round == kFold || !holds(core_, round))) return 0;
  const Range range = has_all ? Range{0, riding_->bytes} : part(*riding_, round, core);
  if (range.count() > 0) std::memcpy(out, riding_->data + range.begin, range.count());
  return range.count();
}

void SliceBroadcast::merge(int round, const std::vector<Payload>& parts) {
  const bool is_new = round == kFold ? folds_root() && core_ == root_core_
                                     : !holds(core_, round) && holds(core_, round + 1);
  if (!is_new) return;
  const Range range = round == kFold ? Range{0, riding_->bytes} : part(*riding_, round, core_);
  const int from = round == kFold ? 1 : rounds_.index(round, root_core_);
  const Payload& payload = parts[static_cast<size_t>(from)];
  HSGD_CHECK(payload.bytes == range.count());
  if (payload.bytes > 0) std::memcpy(riding_->data + range.begin, payload.data, payload.bytes);
}

// Posts the next stage of a step only if `is_first`, so that all nodes post messages in one order.
// Returns true if anything advanced.
bool SliceBroadcast::advance(size_t slot, int& phase, bool is_first) {
  Slice& slice = slices_[slot];
  if (!slice.messages.all_done() || !is_first) return slice.messages.progressed();
  if (std::exchange(slice.is_split, false)) {
    phase = (rounds_.folds() ? 1 : 0) + rounds_.rounds() - 1;  // the last round that splits
  }
  if (static_cast<size_t>(++phase) == stages_.size()) {
    phase = kFinished;
  } else {
    post(slice, stages_[static_cast<size_t>(phase)]);
    HSGD_FAULT_POINT("between nodes: chunk passed on");
  }
  return true;
}

void SliceBroadcast::post(Slice& slice, const Stage& stage) {
  if (stage.kind == Kind::kTake || stage.kind == Kind::kGive) return post_fold(slice, stage.kind);
  if (!rounds_.is_core(node_)) return;
  if (stage.kind == Kind::kScatter) post_scatter(slice, stage.round);
  if (stage.kind == Kind::kSpread) post_spread(slice, stage.round);
}

// Posts messages between a core and the node that takes no part: this node is the root, or gets
// what all have.
void SliceBroadcast::post_fold(Slice& slice, Kind kind) {
  if (partner_ < 0 || (core_ == root_core_ && folds_root()) != (kind == Kind::kTake)) return;
  if (rounds_.is_core(node_) == (kind == Kind::kGive)) {
    slice.messages.send(partner_, Channel::kBroadcast, slice.data, slice.bytes, counters_);
  } else {
    slice.messages.receive(partner_, Channel::kBroadcast, slice.data, slice.bytes, counters_);
  }
}

void SliceBroadcast::post_scatter(Slice& slice, int round) {
  if (!holds(core_, round + 1)) return;
  const bool sends = holds(core_, round);
  for_each_member(
      rounds_, round, core_,
      [&](int member) {
        if (sends || !holds(member, round)) return;
        const Range own = part(slice, round, core_);
        slice.messages.receive(rounds_.node_of(member), Channel::kBroadcast, slice.data + own.begin,
                               own.count(), counters_);
      },
      [&](int member) {
        if (!sends) return;
        const Range its_part = part(slice, round, member);
        slice.messages.send(rounds_.node_of(member), Channel::kBroadcast,
                            slice.data + its_part.begin, its_part.count(), counters_);
      });
}

void SliceBroadcast::post_spread(Slice& slice, int round) {
  for_each_member(
      rounds_, round, core_,
      [&](int member) {
        if (holds(core_, round)) return;
        const Range its_part = part(slice, round, member);
        slice.messages.receive(rounds_.node_of(member), Channel::kGather,
                               slice.data + its_part.begin, its_part.count(), counters_);
      },
      [&](int member) {
        if (holds(member, round)) return;
        const Range own = part(slice, round, core_);
        slice.messages.send(rounds_.node_of(member), Channel::kGather, slice.data + own.begin,
                            own.count(), counters_);
      });
}

// Returns true for the cores that differ from the root's core only in earlier rounds: they have the
// root's data.
bool SliceBroadcast::holds(int core, int round) const {
  for (int later = round; later < rounds_.rounds(); ++later) {
    if (rounds_.index(later, core) != rounds_.index(later, root_core_)) return false;
  }
  return true;
}

Range SliceBroadcast::part(const Slice& slice, int round, int core) const {
  const RoundSchedule::Leaves leaves = rounds_.leaves(round + 1, core);
  return {offset(slice, leaves.begin), offset(slice, leaves.end)};
}

// The leaves of the root's group of the first round are empty; the others have equal sizes.
size_t SliceBroadcast::offset(const Slice& slice, int leaf) const {
  const RoundSchedule::Leaves empty = rounds_.leaves(1, root_core_);
  const int width = empty.end - empty.begin;
  const int before = leaf <= empty.begin ? leaf : std::max(empty.begin, leaf - width);
  const int parts = rounds_.cores() - width;
  return before == parts ? slice.bytes : part_of(slice.bytes, parts, before, 1).begin;
}

}  // namespace hsgd
