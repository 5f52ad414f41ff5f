// Headers, slices and broadcast chunks between the leaders of nodes.
#include "internode/wire.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/fault_points.hpp"
#include "node/segment_layout.hpp"

namespace hsgd {

Range part_of(uint64_t count, int parts, int index, size_t element_bytes) {
  const uint64_t line = std::max<uint64_t>(1, kLine / element_bytes);
  const auto bound = [&](int i) {
    if (i == parts) return count;
    const uint64_t exact = count / static_cast<uint64_t>(parts) * static_cast<uint64_t>(i) +
                           count % static_cast<uint64_t>(parts) * static_cast<uint64_t>(i) /
                               static_cast<uint64_t>(parts);
    return std::min(count, round_up(exact, line));
  };
  return {bound(index), bound(index + 1)};
}

void Messages::send(int node, Channel channel, const void* data, size_t bytes,
                    WireCounters& counters) {
  if (bytes == 0) return;
  pending_.push_back(transport_.send(node, channel, data, bytes));
  counters.bytes_sent += bytes;
}

void Messages::receive(int node, Channel channel, void* data, size_t bytes,
                       WireCounters& counters) {
  if (bytes == 0) return;
  pending_.push_back(transport_.receive(node, channel, data, bytes));
  counters.bytes_received += bytes;
}

bool Messages::all_done() {
  for (size_t i = 0; i < pending_.size();) {
    if (transport_.done(pending_[i])) {
      pending_[i] = pending_.back();
      pending_.pop_back();
      progressed_ = true;
    } else {
      ++i;
    }
  }
  return pending_.empty();
}

bool Messages::progressed() { return std::exchange(progressed_, false); }

// --- headers ---

HeaderExchange::HeaderExchange(Transport& transport, size_t payload_bytes, WireCounters& counters)
    : transport_(transport),
      counters_(counters),
      stride_(round_up(sizeof(WireHeader) + payload_bytes, kLine)),
      messages_(new std::byte[stride_ * static_cast<size_t>(transport.node_count())]),
      pending_(transport) {}

void HeaderExchange::start(const WireHeader& header, const void* payload, size_t bytes) {
  const int me = transport_.node_rank();
  const int nodes = transport_.node_count();
  std::memcpy(message(me), &header, sizeof header);
  if (bytes > 0) std::memcpy(message(me) + sizeof header, payload, bytes);
  // A node that called with another size sends another length, so every receive takes the longest.
  WireCounters longest;
  for (int i = 1; i < nodes; ++i) {
    const int from = (me + nodes - i) % nodes;
    pending_.receive(from, Channel::kHeader, message(from), stride_, longest);
  }
  counters_.bytes_received += static_cast<uint64_t>(nodes - 1) * (sizeof header + bytes);
  for (int i = 1; i < nodes; ++i) {
    pending_.send((me + i) % nodes, Channel::kHeader, message(me), sizeof header + bytes,
                  counters_);
  }
  HSGD_FAULT_POINT("between nodes: header sent");
}

bool HeaderExchange::done() { return pending_.all_done(); }

const WireHeader& HeaderExchange::header(int node) const {
  return *reinterpret_cast<const WireHeader*>(message(node));
}

const std::byte* HeaderExchange::payload(int node) const {
  return message(node) + sizeof(WireHeader);
}

// --- slices ---

SliceExchange::SliceExchange(Transport& transport, size_t slice_bytes, size_t slots, bool narrows,
                             WireCounters& counters)
    : transport_(transport), counters_(counters) {
  const auto nodes = static_cast<size_t>(transport.node_count());
  part_bytes_ = round_up(slice_bytes / nodes + 2 * kLine, kLine);
  out_part_bytes_ =
      narrows ? round_up(part_bytes_ / sizeof(float) * Narrowing::kElementBytes, kLine) : 0;
  const size_t outbox_bytes = nodes * out_part_bytes_;  // more than a narrowed slice
  inboxes_.reset(new std::byte[slots * nodes * part_bytes_]);
  outboxes_.reset(new std::byte[slots * outbox_bytes]);
  inputs_.resize(nodes);
  for (size_t slot = 0; slot < slots; ++slot) {
    chunks_.emplace_back(transport);
    chunks_.back().inbox = inboxes_.get() + slot * nodes * part_bytes_;
    chunks_.back().outbox = outboxes_.get() + slot * outbox_bytes;
  }
}

void SliceExchange::start(const Reduction& reduction) {
  reduction_ = reduction;
  element_bytes_ =
      reduction.narrowing.active() ? Narrowing::kElementBytes : reduction.element_bytes;
  begun_ = finished_ = 0;
}

// Parts are the same whatever is sent, so that the order of sums is.
Range SliceExchange::part_at(const Chunk& chunk, int node) const {
  return part_of(chunk.count, transport_.node_count(), node, reduction_.element_bytes);
}

void SliceExchange::begin(std::byte* slice, uint64_t count) {
  Chunk& chunk = chunks_[begun_++ % chunks_.size()];
  HSGD_CHECK(chunk.phase == Phase::kIdle);
  chunk.phase = Phase::kScatter;
  chunk.slice = chunk.data = slice;
  chunk.count = count;
  if (reduction_.narrowing.active()) {
    chunk.data = chunk.outbox;
    reduction_.narrowing.conversion.narrow(chunk.data, slice, count);
  }
  const int me = transport_.node_rank();
  const int nodes = transport_.node_count();
  const size_t own_bytes = part_at(chunk, me).count() * element_bytes_;
  HSGD_CHECK(own_bytes <= part_bytes_);
  for (int i = 1; i < nodes; ++i) {
    const int from = (me + nodes - i) % nodes;
    chunk.receives.receive(from, Channel::kScatter,
                           chunk.inbox + static_cast<size_t>(from) * part_bytes_, own_bytes,
                           counters_);
  }
  for (int i = 1; i < nodes; ++i) {
    const int to = (me + i) % nodes;
    const Range part = part_at(chunk, to);
    chunk.sends.send(to, Channel::kScatter, chunk.data + part.begin * element_bytes_,
                     part.count() * element_bytes_, counters_);
  }
  HSGD_FAULT_POINT("between nodes: slice sent");
}

bool SliceExchange::progress() {
  bool moved = false;
  // Results are posted chunk by chunk on all nodes, because messages of a channel are matched in
  // order.
  bool in_order = true;
  for (uint64_t i = finished_; i < begun_; ++i) {
    Chunk& chunk = chunks_[i % chunks_.size()];
    moved |= advance(chunk, in_order);
    in_order &= chunk.phase != Phase::kScatter;
  }
  while (finished_ < begun_ && chunks_[finished_ % chunks_.size()].phase == Phase::kFinished) {
    chunks_[finished_++ % chunks_.size()].phase = Phase::kIdle;
    moved = true;
  }
  return moved;
}

bool SliceExchange::advance(Chunk& chunk, bool may_spread) {
  if (chunk.phase == Phase::kScatter) {
    const bool received = chunk.receives.all_done();
    const bool sent = chunk.sends.all_done();
    if (received && sent &&
        may_spread) {  // other parts of the slice may be overwritten only when they are sent
      reduce_own_part(chunk);
      spread_own_part(chunk);
      chunk.phase = Phase::kGather;
      return true;
    }
    return chunk.receives.progressed() || chunk.sends.progressed();
  }
  if (chunk.phase == Phase::kGather) {
    if (chunk.results.all_done()) {
      if (reduction_.narrowing.active()) {
        reduction_.narrowing.conversion.widen(chunk.slice, chunk.data, chunk.count);
      }
      chunk.phase = Phase::kFinished;
      return true;
    }
    return chunk.results.progressed();
  }
  return false;
}

void SliceExchange::reduce_own_part(Chunk& chunk) {
  const int me = transport_.node_rank();
  const Range part = part_at(chunk, me);
  if (part.count() == 0) return;
  std::byte* own = chunk.data + part.begin * element_bytes_;
  for (size_t node = 0; node < inputs_.size(); ++node) {
    inputs_[node] = static_cast<int>(node) == me ? own : chunk.inbox + node * part_bytes_;
  }
  const ReduceFn reduce =
      reduction_.narrowing.active() ? reduction_.narrowing.reduce : reduction_.reduce;
  reduce({inputs_.data(), static_cast<int>(inputs_.size()), own, nullptr, part.count(),
          reduction_.divisor, Store::kOrdinary, Store::kOrdinary});
}

void SliceExchange::spread_own_part(Chunk& chunk) {
  const int me = transport_.node_rank();
  const int nodes = transport_.node_count();
  for (int i = 1; i < nodes; ++i) {
    const int from = (me + nodes - i) % nodes;
    const Range part = part_at(chunk, from);
    chunk.results.receive(from, Channel::kGather, chunk.data + part.begin * element_bytes_,
                          part.count() * element_bytes_, counters_);
  }
  const Range own = part_at(chunk, me);
  for (int i = 1; i < nodes; ++i) {
    chunk.results.send((me + i) % nodes, Channel::kGather, chunk.data + own.begin * element_bytes_,
                       own.count() * element_bytes_, counters_);
  }
  HSGD_FAULT_POINT("between nodes: sum sent");
}

// --- broadcast ---

TreeBroadcast::TreeBroadcast(Transport& transport, size_t slots, WireCounters& counters)
    : transport_(transport), counters_(counters) {
  for (size_t slot = 0; slot < slots; ++slot) chunks_.emplace_back(transport);
}

void TreeBroadcast::start(int root_node, bool chain) {
  begun_ = arrived_ = finished_ = 0;
  children_.clear();
  const int nodes = transport_.node_count();
  const int place = (transport_.node_rank() - root_node + nodes) % nodes;  // the root's is 0
  const auto node_at = [&](int at) { return (at + root_node) % nodes; };
  if (chain) {
    parent_ = place == 0 ? -1 : node_at(place - 1);
    if (place + 1 < nodes) children_.push_back(node_at(place + 1));
    return;
  }
  // Binomial tree: the parent of a place is the place without its highest set bit.
  int highest = 1;
  while (2 * highest <= place) highest *= 2;
  parent_ = place == 0 ? -1 : node_at(place - highest);
  for (int bit = place == 0 ? 1 : 2 * highest; place + bit < nodes; bit *= 2) {
    children_.push_back(node_at(place + bit));
  }
}

void TreeBroadcast::begin(std::byte* data, size_t bytes) {
  Chunk& chunk = chunks_[begun_++ % chunks_.size()];
  chunk.data = data;
  chunk.bytes = bytes;
  if (!is_root()) chunk.receive.receive(parent_, Channel::kBroadcast, data, bytes, counters_);
}

bool TreeBroadcast::progress() {
  bool moved = false;
  while (arrived_ < begun_) {
    Chunk& chunk = chunks_[arrived_ % chunks_.size()];
    if (!chunk.receive.all_done()) break;
    for (const int child : children_) {
      chunk.sends.send(child, Channel::kBroadcast, chunk.data, chunk.bytes, counters_);
    }
    HSGD_FAULT_POINT("between nodes: chunk passed on");
    ++arrived_;
    moved = true;
  }
  while (finished_ < arrived_ && chunks_[finished_ % chunks_.size()].sends.all_done()) {
    ++finished_;
    moved = true;
  }
  return moved;
}

}  // namespace hsgd
