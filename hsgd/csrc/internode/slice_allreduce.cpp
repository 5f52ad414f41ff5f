// Parts to their owners, sums, and sums to all.
#include "internode/slice_allreduce.hpp"

#include "base/error.hpp"
#include "base/fault_points.hpp"
#include "node/segment_layout.hpp"

namespace hsgd {

SliceAllreduce::SliceAllreduce(Transport& transport, size_t slice_bytes, size_t slots, bool narrows,
                               WireCounters& counters)
    : StepWindow(slots), transport_(transport), counters_(counters) {
  const auto nodes = static_cast<size_t>(transport.node_count());
  part_bytes_ = round_up(slice_bytes / nodes + 2 * kLine, kLine);
  out_part_bytes_ =
      narrows ? round_up(part_bytes_ / sizeof(float) * Narrowing::kElementBytes, kLine) : 0;
  const size_t outbox_bytes = nodes * out_part_bytes_;  // more than a narrowed slice
  inboxes_.reset(new std::byte[slots * nodes * part_bytes_]);
  outboxes_.reset(new std::byte[slots * outbox_bytes]);
  inputs_.resize(nodes);
  for (size_t slot = 0; slot < slots; ++slot) {
    slices_.emplace_back(transport);
    slices_.back().inbox = inboxes_.get() + slot * nodes * part_bytes_;
    slices_.back().outbox = outboxes_.get() + slot * outbox_bytes;
  }
}

void SliceAllreduce::start(const Reduction& reduction) {
  reduction_ = reduction;
  element_bytes_ =
      reduction.narrowing.active() ? Narrowing::kElementBytes : reduction.element_bytes;
  restart();
}

// Parts are the same whatever is sent, so that the order of sums is.
Range SliceAllreduce::part_at(const Slice& slice, int node) const {
  return part_of(slice.count, transport_.node_count(), node, reduction_.element_bytes);
}

void SliceAllreduce::begin(std::byte* sums, uint64_t count) {
  Slice& slice = slices_[begin_step()];
  slice.sums = slice.data = sums;
  slice.count = count;
  if (reduction_.narrowing.active()) {
    slice.data = slice.outbox;
    reduction_.narrowing.conversion.narrow(slice.data, sums, count);
  }
  const int me = transport_.node_rank();
  const int nodes = transport_.node_count();
  const size_t own_bytes = part_at(slice, me).count() * element_bytes_;
  HSGD_CHECK(own_bytes <= part_bytes_);
  for (int i = 1; i < nodes; ++i) {
    const int from = (me + nodes - i) % nodes;
    slice.receives.receive(from, Channel::kScatter,
                           slice.inbox + static_cast<size_t>(from) * part_bytes_, own_bytes,
                           counters_);
  }
  for (int i = 1; i < nodes; ++i) {
    const int to = (me + i) % nodes;
    const Range part = part_at(slice, to);
    slice.sends.send(to, Channel::kScatter, slice.data + part.begin * element_bytes_,
                     part.count() * element_bytes_, counters_);
  }
  HSGD_FAULT_POINT("between nodes: slice sent");
}

bool SliceAllreduce::advance(size_t slot, int& phase, bool is_first) {
  return phase == kScatter ? scatter(slices_[slot], phase, is_first) : gather(slices_[slot], phase);
}

// Results are posted step by step on all nodes. Other parts of the slice may be overwritten only
// when they are sent.
bool SliceAllreduce::scatter(Slice& slice, int& phase, bool is_first) {
  const bool received = slice.receives.all_done();
  const bool sent = slice.sends.all_done();
  if (!received || !sent || !is_first) {
    const bool moved = slice.receives.progressed();
    return slice.sends.progressed() || moved;
  }
  reduce_own_part(slice);
  spread_own_part(slice);
  phase = kGather;
  return true;
}

bool SliceAllreduce::gather(Slice& slice, int& phase) {
  if (!slice.results.all_done()) return slice.results.progressed();
  if (reduction_.narrowing.active()) {
    reduction_.narrowing.conversion.widen(slice.sums, slice.data, slice.count);
  }
  phase = kFinished;
  return true;
}

void SliceAllreduce::reduce_own_part(Slice& slice) {
  const int me = transport_.node_rank();
  const Range part = part_at(slice, me);
  if (part.count() == 0) return;
  std::byte* own = slice.data + part.begin * element_bytes_;
  for (size_t node = 0; node < inputs_.size(); ++node) {
    inputs_[node] = static_cast<int>(node) == me ? own : slice.inbox + node * part_bytes_;
  }
  const ReduceFn reduce =
      reduction_.narrowing.active() ? reduction_.narrowing.reduce : reduction_.reduce;
  reduce({inputs_.data(), static_cast<int>(inputs_.size()), own, nullptr, part.count(),
          reduction_.divisor, Store::kOrdinary, Store::kOrdinary});
}

void SliceAllreduce::spread_own_part(Slice& slice) {
  const int me = transport_.node_rank();
  const int nodes = transport_.node_count();
  for (int i = 1; i < nodes; ++i) {
    const int from = (me + nodes - i) % nodes;
    const Range part = part_at(slice, from);
    slice.results.receive(from, Channel::kGather, slice.data + part.begin * element_bytes_,
                          part.count() * element_bytes_, counters_);
  }
  const Range own = part_at(slice, me);
  for (int i = 1; i < nodes; ++i) {
    slice.results.send((me + i) % nodes, Channel::kGather, slice.data + own.begin * element_bytes_,
                       own.count() * element_bytes_, counters_);
  }
  HSGD_FAULT_POINT("between nodes: sum sent");
}

}  // namespace hsgd
