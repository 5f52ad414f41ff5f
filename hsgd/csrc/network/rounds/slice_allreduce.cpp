// Sends parts to the nodes that sum them, round by round, then the sums to all nodes.
#include "network/rounds/slice_allreduce.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "network/rounds/round_messages.hpp"
#include "node/segments/segment_layout.hpp"

namespace hsgd {
namespace {

// Elements of each input, so that the inputs of a group stay in the first-level cache.
constexpr uint64_t kWidenedCount = 512;

}  // namespace

SliceAllreduce::SliceAllreduce(Transport& transport, const RoundSchedule& rounds,
                               size_t slice_bytes, size_t slots, bool narrows,
                               WireCounters& counters)
    : StepWindow(slots),
      transport_(transport),
      rounds_(rounds),
      counters_(counters),
      node_(transport.node_rank()),
      core_(rounds.is_core(node_) ? rounds.core_of(node_) : -1),
      partner_(rounds.partner(node_)),
      buffers_(rounds, slice_bytes, narrows) {
  inboxes_.reset(new std::byte[slots * buffers_.inbox_bytes]);
  outboxes_.reset(new std::byte[slots * buffers_.outbox_bytes]);
  wide_.reset(new float[slots * buffers_.wide_count]);
  inputs_.reserve(static_cast<size_t>(rounds.most_radix()));
  for (size_t slot = 0; slot < slots; ++slot) {
    slices_.emplace_back(transport);
    slices_.back().inbox = inboxes_.get() + slot * buffers_.inbox_bytes;
    slices_.back().outbox = outboxes_.get() + slot * buffers_.outbox_bytes;
    slices_.back().wide = wide_.get() + slot * buffers_.wide_count;
  }
}

SliceAllreduce::Buffers::Buffers(const RoundSchedule& rounds, size_t slice_bytes, bool narrows) {
  const size_t wide_factor = rounds.is_direct() ? 1 : sizeof(float) / Narrowing::kElementBytes;
  const auto radix = static_cast<size_t>(rounds.most_radix());
  part_bytes = round_up(wide_factor * (slice_bytes / radix + 2 * kLine), kLine);
  inbox_bytes = std::max(radix * part_bytes, rounds.folds() ? slice_bytes : 0);
  outbox_bytes = narrows ? radix * round_up(part_bytes / 2, kLine) : 0;
  wide_count = rounds.is_direct() ? 0 : slice_bytes / Narrowing::kElementBytes;
}

size_t SliceAllreduce::most_part_bytes(const RoundSchedule& rounds, size_t slice_bytes) {
  return Buffers(rounds, slice_bytes, false).part_bytes;
}

size_t SliceAllreduce::buffer_bytes(const RoundSchedule& rounds, size_t slice_bytes, size_t slots,
                                    bool narrows) {
  const Buffers buffers(rounds, slice_bytes, narrows);
  return slots * (buffers.inbox_bytes + buffers.outbox_bytes + buffers.wide_count * sizeof(float));
}

void SliceAllreduce::start(const Reduction& reduction, Form form) {
  reduction_ = reduction;
  form_ = form;
  const int rounds = rounds_.rounds();
  stages_.clear();
  if (rounds_.folds()) stages_.push_back({Kind::kTake, 0});
  for (int round = 0; round < rounds; ++round) stages_.push_back({Kind::kSum, round});
  for (int round = rounds; form == Form::kWhole && round-- > 0;) {
    stages_.push_back({Kind::kSpread, round});
  }
  if (rounds_.folds()) stages_.push_back({Kind::kGive, 0});
  const bool narrows = reduction.narrowing.active();
  element_bytes_ = narrows ? Narrowing::kElementBytes : reduction.element_bytes;
  widens_ = !rounds_.is_direct() && (narrows || reduction.widening.active());
  restart();
}

void SliceAllreduce::begin(std::byte* sums, uint64_t count) {
  HSGD_CHECK(form_ == Form::kWhole);
  begin_slice(next_slice(sums, count));
}

void SliceAllreduce::begin_parts(std::byte* sums, std::vector<uint64_t> begins) {
  HSGD_CHECK(form_ == Form::kParts);
  Slice& slice = next_slice(sums, begins.back());
  slice.begins = std::move(begins);
  begin_slice(slice);
}

SliceAllreduce::Slice& SliceAllreduce::next_slice(std::byte* sums, uint64_t count) {
  Slice& slice = slices_[begin_step()];
  slice.sums = slice.data = sums;
  slice.count = count;
  slice.is_wide = false;
  return slice;
}

void SliceAllreduce::begin_slice(Slice& slice) {
  if (reduction_.narrowing.active()) {
    slice.data = slice.outbox;
    reduction_.narrowing.conversion.narrow(slice.data, slice.sums, slice.count);
  }
  slice.is_summed = std::exchange(next_rides_, false);
  if (slice.is_summed) {
    riding_ = &slice;
  } else {
    post(slice, stages_.front());
  }
  HSGD_FAULT_POINT("between nodes: slice sent");
}

// Posts the stages in the order of steps, on all nodes. Data may be overwritten only after it has
// been sent.
bool SliceAllreduce::advance(size_t slot, int& phase, bool is_first) {
  Slice& slice = slices_[slot];
  if (!slice.messages.all_done() || !is_first) return slice.messages.progressed();
  if (std::exchange(slice.is_summed, false)) {
    phase = (rounds_.folds() ? 1 : 0) + rounds_.rounds() - 1;  // the last round of sums
  } else {
    finish(slice, stages_[static_cast<size_t>(phase)]);
  }
  if (static_cast<size_t>(++phase) < stages_.size()) {
    post(slice, stages_[static_cast<size_t>(phase)]);
    HSGD_FAULT_POINT("between nodes: sum sent");
    return true;
  }
  if (reduction_.narrowing.active()) {
    const Range own = result_of(slice, node_);
    reduction_.narrowing.conversion.widen(slice.sums + own.begin * reduction_.element_bytes,
                                          slice.data + own.begin * element_bytes_, own.count());
  }
  phase = kFinished;
  return true;
}

RoundPayload* SliceAllreduce::with_headers() {
  next_rides_ = true;
  return this;
}

size_t SliceAllreduce::write(int round, int core, std::byte* out) {
  const size_t size = partial_bytes(*riding_);
  const Range part = round == kFold ? Range{0, riding_->count} : range(*riding_, round + 1, core);
  if (part.count() > 0) {
    std::memcpy(out, partial_sums(*riding_) + part.begin * size, part.count() * size);
  }
  return part.count() * size;
}

void SliceAllreduce::merge(int round, const std::vector<Payload>& parts) {
  Slice& slice = *riding_;
  const size_t size = partial_bytes(slice);
  const Range own = round == kFold ? Range{0, slice.count} : range(slice, round + 1, core_);
  const int own_index = round == kFold ? 0 : rounds_.index(round, core_);
  inputs_.clear();
  for (size_t index = 0; index < std::max<size_t>(1, parts.size()); ++index) {
    const bool is_own = static_cast<int>(index) == own_index;
    HSGD_CHECK(is_own || parts[index].bytes == own.count() * size);
    inputs_.push_back(is_own ? partial_sums(slice) + own.begin * size : parts[index].data);
  }
  if (round == kFold && parts.empty() && !widens_) return;
  reduce(slice, own, round + 1 == rounds_.rounds());
}

void SliceAllreduce::post(Slice& slice, const Stage& stage) {
  if (stage.kind == Kind::kTake || stage.kind == Kind::kGive) return post_fold(slice, stage.kind);
  if (core_ < 0) return;
  if (stage.kind == Kind::kSum) post_sum(slice, stage.round);
  if (stage.kind == Kind::kSpread) {
    spread(
        rounds_, stage.round, core_, slice.data,
        [&](int leaf) { return bound(slice, leaf) * element_bytes_; }, &slice.messages, counters_);
  }
}

// Posts messages between a core and the node that takes no part: first all that this node has, then
// its result.
void SliceAllreduce::post_fold(Slice& slice, Kind kind) {
  if (partner_ < 0) return;
  Messages& messages = slice.messages;
  const size_t bytes = slice.count * element_bytes_;
  if (kind == Kind::kTake) {
    if (core_ >= 0) messages.receive(partner_, Channel::kScatter, slice.inbox, bytes, counters_);
    if (core_ < 0) messages.send(partner_, Channel::kScatter, slice.data, bytes, counters_);
    return;
  }
  const Range result = result_of(slice, std::max(node_, partner_));
  std::byte* data = slice.data + result.begin * element_bytes_;
  const size_t result_bytes = result.count() * element_bytes_;
  if (core_ >= 0) messages.send(partner_, Channel::kGather, data, result_bytes, counters_);
  if (core_ < 0) messages.receive(partner_, Channel::kGather, data, result_bytes, counters_);
}

void SliceAllreduce::post_sum(Slice& slice, int round) {
  const size_t size = partial_bytes(slice);
  const Range own = range(slice, round + 1, core_);
  for_each_member(
      rounds_, round, core_,
      [&](int member) {
        slice.messages.receive(rounds_.node_of(member), Channel::kScatter,
                               arriving(slice, rounds_.index(round, member), own),
                               own.count() * size, counters_);
      },
      [&](int member) {
        const Range part = range(slice, round + 1, member);
        slice.messages.send(rounds_.node_of(member), Channel::kScatter,
                            partial_sums(slice) + part.begin * size, part.count() * size,
                            counters_);
      });
}

void SliceAllreduce::finish(Slice& slice, const Stage& stage) {
  if (core_ < 0) return;
  if (stage.kind == Kind::kSum) finish_sum(slice, stage.round);
  // In the rounds either all cores send wide sums, or none.
  if (stage.kind == Kind::kTake && (partner_ >= 0 || widens_)) {
    inputs_ = {slice.data};
    if (partner_ >= 0) inputs_.push_back(slice.inbox);
    reduce(slice, {0, slice.count}, false);
  }
}

void SliceAllreduce::finish_sum(Slice& slice, int round) {
  const Range own = range(slice, round + 1, core_);
  inputs_.clear();
  for (int index = 0; index < rounds_.radix(round); ++index) {
    inputs_.push_back(index == rounds_.index(round, core_)
                          ? partial_sums(slice) + own.begin * partial_bytes(slice)
                          : arriving(slice, index, own));
  }
  reduce(slice, own, round + 1 == rounds_.rounds());
}

// Sums the inputs, parts of as many groups of nodes, into this node's own part, or its wide form.
void SliceAllreduce::reduce(Slice& slice, const Range& part, bool is_last) {
  if (widens_ && !slice.is_wide) {
    slice.is_wide = true;
    return reduce_widened(slice, part);
  }
  if (part.count() == 0) return;
  const bool narrows = reduction_.narrowing.active();
  const ReduceFn add = !slice.is_wide ? (narrows ? reduction_.narrowing.reduce : reduction_.reduce)
                       : narrows      ? reduction_.reduce
                                      : reduction_.widening.reduce;
  std::byte* out = partial_sums(slice) + part.begin * partial_bytes(slice);
  add({inputs_.data(), static_cast<int>(inputs_.size()), out, nullptr, part.count(),
       is_last ? reduction_.divisor : 1.0, Store::kOrdinary, Store::kOrdinary});
  if (!is_last || !slice.is_wide) return;
  const Conversion& conversion =
      narrows ? reduction_.narrowing.conversion : reduction_.widening.conversion;
  conversion.narrow(slice.data + part.begin * element_bytes_, out, part.count());
}

void SliceAllreduce::reduce_widened(Slice& slice, const Range& part) {
  const bool narrows = reduction_.narrowing.active();
  const Conversion& conversion =
      narrows ? reduction_.narrowing.conversion : reduction_.widening.conversion;
  const ReduceFn add = narrows ? reduction_.reduce : reduction_.widening.reduce;
  widened_.resize(inputs_.size() * kWidenedCount);
  std::vector<const void*> blocks(inputs_.size());
  for (uint64_t begin = 0; begin < part.count(); begin += kWidenedCount) {
    const uint64_t count = std::min(kWidenedCount, part.count() - begin);
    for (size_t i = 0; i < inputs_.size(); ++i) {
      float* block = widened_.data() + i * kWidenedCount;
      const auto* input = static_cast<const std::byte*>(inputs_[i]);
      conversion.widen(block, input + begin * Narrowing::kElementBytes, count);
      blocks[i] = block;
    }
    add({blocks.data(), static_cast<int>(blocks.size()), slice.wide + part.begin + begin, nullptr,
         count, 1.0, Store::kOrdinary, Store::kOrdinary});
  }
}

Range SliceAllreduce::result_of(const Slice& slice, int node) const {
  if (form_ == Form::kWhole) return {0, slice.count};
  const uint64_t begin = slice.begins[static_cast<size_t>(node)];
  const int partner = rounds_.partner(node);
  if (partner > node) return {begin, slice.begins[static_cast<size_t>(partner)]};
  return {begin, range(slice, rounds_.rounds(), rounds_.core_of(node)).end};
}

Range SliceAllreduce::range(const Slice& slice, int round, int core) const {
  const RoundSchedule::Leaves leaves = rounds_.leaves(round, core);
  return {bound(slice, leaves.begin), bound(slice, leaves.end)};
}

// Returns the bound of a leaf; parts do not depend on the format that is sent.
uint64_t SliceAllreduce::bound(const Slice& slice, int leaf) const {
  if (leaf == rounds_.cores()) return slice.count;
  if (form_ == Form::kParts) {
    return slice.begins[static_cast<size_t>(rounds_.node_of(rounds_.core_at(leaf)))];
  }
  return part_of(slice.count, rounds_.cores(), leaf, reduction_.element_bytes).begin;
}

std::byte* SliceAllreduce::arriving(const Slice& slice, int index, const Range& part) const {
  const size_t bytes = round_up(part.count() * partial_bytes(slice), kLine);
  HSGD_CHECK((static_cast<size_t>(index) + 1) * bytes <= buffers_.inbox_bytes);
  return slice.inbox + static_cast<size_t>(index) * bytes;
}

std::byte* SliceAllreduce::partial_sums(const Slice& slice) const {
  return slice.is_wide ? reinterpret_cast<std::byte*>(slice.wide) : slice.data;
}

size_t SliceAllreduce::partial_bytes(const Slice& slice) const {
  return slice.is_wide ? sizeof(float) : element_bytes_;
}

}  // namespace hsgd
