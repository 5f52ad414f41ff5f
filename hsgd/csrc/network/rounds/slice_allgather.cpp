// Runs the rounds backwards.
#include "network/rounds/slice_allgather.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "network/rounds/round_messages.hpp"

namespace hsgd {

SliceAllgather::SliceAllgather(Transport& transport, const RoundSchedule& rounds, size_t slots,
                               WireCounters& counters)
    : StepWindow(slots),
      rounds_(rounds),
      counters_(counters),
      node_(transport.node_rank()),
      partner_(rounds.partner(node_)),
      core_(rounds.core_of(node_)) {
  if (rounds.folds()) stages_.push_back({Kind::kTake, 0});
  for (int round = rounds.rounds(); round-- > 0;) stages_.push_back({Kind::kSpread, round});
  if (rounds.folds()) stages_.push_back({Kind::kGive, 0});
  for (int leaf = 0; leaf < rounds.cores(); ++leaf) {
    node_at_leaf_.push_back(rounds.node_of(rounds.core_at(leaf)));
  }
  for (size_t slot = 0; slot < slots; ++slot) slices_.emplace_back(transport);
}

void SliceAllgather::begin(std::byte* data, std::vector<size_t> begins) {
  Slice& slice = slices_[begin_step()];
  slice.data = data;
  slice.begins = std::move(begins);
  slice.has_all = std::exchange(next_rides_, false);
  if (slice.has_all) {
    riding_ = &slice;
  } else {
    post(slice, stages_.front());
  }
  HSGD_FAULT_POINT("between nodes: block sent");
}

RoundPayload* SliceAllgather::with_headers() {
  next_rides_ = true;
  return this;
}

bool SliceAllgather::fits(const std::vector<size_t>& begins, size_t most_bytes) const {
  if (rounds_.folds()) return false;
  const int last = rounds_.rounds() - 1;
  for (int index = 0; index < rounds_.radix(last); ++index) {
    size_t bytes = 0;
    for_each_held(begins, last, rounds_.member(last, 0, index),
                  [&](size_t begin, size_t end) { bytes += end - begin; });
    if (bytes > most_bytes) return false;
  }
  return true;
}

size_t SliceAllgather::write(int round, int, std::byte* out) {
  size_t bytes = 0;
  for_each_held(riding_->begins, round, core_, [&](size_t begin, size_t end) {
    std::memcpy(out + bytes, riding_->data + begin, end - begin);
    bytes += end - begin;
  });
  return bytes;
}

void SliceAllgather::merge(int round, const std::vector<Payload>& parts) {
  for (int index = 0; index < rounds_.radix(round); ++index) {
    if (index == rounds_.index(round, core_)) continue;
    const Payload& part = parts[static_cast<size_t>(index)];
    size_t bytes = 0;
    for_each_held(riding_->begins, round, rounds_.member(round, core_, index),
                  [&](size_t begin, size_t end) {
                    HSGD_CHECK(bytes + end - begin <= part.bytes);
                    std::memcpy(riding_->data + begin, part.data + bytes, end - begin);
                    bytes += end - begin;
                  });
    HSGD_CHECK(bytes == part.bytes);
  }
}

// Posts the stages in the order of steps, on all nodes.
bool SliceAllgather::advance(size_t slot, int& phase, bool is_first) {
  Slice& slice = slices_[slot];
  if (!slice.messages.all_done() || !is_first) return slice.messages.progressed();
  if (std::exchange(slice.has_all, false)) phase = rounds_.rounds() - 1;
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
      rounds_, stage.round, core_, slice.data, [&](int leaf) { return offset(slice.begins, leaf); },
      &slice.messages, counters_);
}

// Posts messages between a core and the node that takes no part: first that node's part, then all
// others' parts.
void SliceAllgather::post_fold(Slice& slice, Kind kind) {
  if (partner_ < 0) return;
  const bool is_core = rounds_.is_core(node_);
  const size_t begin = slice.begins[static_cast<size_t>(std::max(node_, partner_))];
  const size_t end = offset(slice.begins, rounds_.leaves(rounds_.rounds(), core_).end);
  const auto pass = [&](bool to_partner, Channel channel, size_t from, size_t to) {
    if (to_partner) {
      slice.messages.send(partner_, channel, slice.data + from, to - from, counters_);
    } else {
      slice.messages.receive(partner_, channel, slice.data + from, to - from, counters_);
    }
  };
  if (kind == Kind::kTake) return pass(!is_core, Channel::kScatter, begin, end);
  pass(is_core, Channel::kGather, offset(slice.begins, 0), begin);
  pass(is_core, Channel::kGather, end, slice.begins.back());
}

size_t SliceAllgather::offset(const std::vector<size_t>& begins, int leaf) const {
  if (leaf == rounds_.cores()) return begins.back();
  return begins[static_cast<size_t>(node_at_leaf_[static_cast<size_t>(leaf)])];
}

// Visits the parts of all cores that differ from `core` only in earlier rounds. The first round
// splits the leaves first, so these parts lie at equal distances.
template <class Handle>
void SliceAllgather::for_each_held(const std::vector<size_t>& begins, int round, int core,
                                   Handle&& handle) const {
  const RoundSchedule::Leaves before = rounds_.leaves(round, core);
  const int stride = before.end - before.begin;
  for (int leaf = rounds_.leaves(rounds_.rounds(), core).begin % stride; leaf < rounds_.cores();
       leaf += stride) {
    const size_t begin = offset(begins, leaf);
    const size_t end = offset(begins, leaf + 1);
    if (end > begin) handle(begin, end);
  }
}

}  // namespace hsgd
