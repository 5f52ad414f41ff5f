// Rounds backwards.
#include "internode/slice_allgather.hpp"

#include <algorithm>
#include <utility>

#include "base/fault_points.hpp"
#include "internode/round_messages.hpp"

namespace hsgd {

SliceAllgather::SliceAllgather(Transport& transport, const RoundSchedule& rounds, size_t slots,
                               WireCounters& counters)
    : StepWindow(slots),
      rounds_(rounds),
      counters_(counters),
      node_(transport.node_rank()),
      partner_(rounds.partner(node_)) {
  if (rounds.folds()) stages_.push_back({Kind::kTake, 0});
  for (int round = rounds.rounds(); round-- > 0;) stages_.push_back({Kind::kSpread, round});
  if (rounds.folds()) stages_.push_back({Kind::kGive, 0});
  for (size_t slot = 0; slot < slots; ++slot) slices_.emplace_back(transport);
}

void SliceAllgather::begin(std::byte* data, std::vector<size_t> begins) {
  Slice& slice = slices_[begin_step()];
  slice.data = data;
  slice.begins = std::move(begins);
  post(slice, stages_.front());
  HSGD_FAULT_POINT("between nodes: block sent");
}

// A stage is posted in the order of steps on all nodes.
bool SliceAllgather::advance(size_t slot, int& phase, bool is_first) {
  Slice& slice = slices_[slot];
  if (!slice.messages.all_done() || !is_first) return slice.messages.progressed();
  if (static_cast<size_t>(++phase) == stages_.size()) {
    phase = kFinished;
  } else {
    post(slice, stages_[static_cast<size_t>(phase)]);
  }
  return true;
}

void SliceAllgather::post(Slice& slice, const Stage& stage) {
  if (stage.kind != Kind::kSpread) return post_fold(slice, stage.kind);
  if (!rounds_.is_core(node_)) return;
  spread(
      rounds_, stage.round, rounds_.core_of(node_), slice.data,
      [&](int leaf) { return offset(slice, leaf); }, &slice.messages, counters_);
}

// Between a core and the node that takes no part: first the part of that node, then all others'.
void SliceAllgather::post_fold(Slice& slice, Kind kind) {
  if (partner_ < 0) return;
  const bool is_core = rounds_.is_core(node_);
  const size_t begin = slice.begins[static_cast<size_t>(std::max(node_, partner_))];
  const size_t end = offset(slice, rounds_.leaves(rounds_.rounds(), rounds_.core_of(node_)).end);
  const auto pass = [&](bool to_partner, Channel channel, size_t from, size_t to) {
    if (to_partner) {
      slice.messages.send(partner_, channel, slice.data + from, to - from, counters_);
    } else {
      slice.messages.receive(partner_, channel, slice.data + from, to - from, counters_);
    }
  };
  if (kind == Kind::kTake) return pass(!is_core, Channel::kScatter, begin, end);
  pass(is_core, Channel::kGather, offset(slice, 0), begin);
  pass(is_core, Channel::kGather, end, slice.begins.back());
}

size_t SliceAllgather::offset(const Slice& slice, int leaf) const {
  if (leaf == rounds_.cores()) return slice.begins.back();
  return slice.begins[static_cast<size_t>(rounds_.node_of(rounds_.core_at(leaf)))];
}

}  // namespace hsgd
