// The two state machines: allreduce and broadcast in chunks.
#include "collectives/pipeline.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/fault_points.hpp"

namespace hsgd {
namespace {

// The least value of a counter over the other ranks of the node. The acquire pairs with
// LocalGroup::publish(): what a counter stands for is visible when the counter is.
uint64_t least_of_peers(const LocalGroup& local, std::atomic<uint64_t> Progress::* member) {
  uint64_t least = UINT64_MAX;
  for (int peer = 0; peer < local.size(); ++peer) {
    if (peer == local.rank()) continue;
    least = std::min(least, (local.progress(peer).*member).load(std::memory_order_acquire));
  }
  return least;
}

}  // namespace

Chunking::Chunking(uint64_t count, size_t element_bytes, size_t chunk_bytes) : count(count) {
  if (count == 0) return;
  const uint64_t most = chunk_bytes / element_bytes;
  steps = (count + most - 1) / most;
  // Equal steps in whole cache lines; `most` is a multiple of a line.
  elements = std::min(most, round_up((count + steps - 1) / steps, kLine));
  steps = (count + elements - 1) / elements;
}

Range Chunking::chunk(uint64_t step) const {
  return {step * elements, std::min(count, (step + 1) * elements)};
}

// --- allreduce ---

AllreducePipeline::AllreducePipeline(const PipelineContext& context, const void* in, void* out,
                                     const Chunking& chunking, const Reduction& reduction,
                                     SliceExchange* wire)
    : context_(context),
      in_(static_cast<const std::byte*>(in)),
      out_(static_cast<std::byte*>(out)),
      chunking_(chunking),
      reduction_(reduction),
      wire_(wire),
      rank_(context.local.rank()),
      size_(context.local.size()),
      inputs_(static_cast<size_t>(context.local.size())) {}

Range AllreducePipeline::slice(const Range& chunk, int rank) const {
  const Range part = part_of(chunk.count(), size_, rank, reduction_.element_bytes);
  return {chunk.begin + part.begin, chunk.begin + part.end};
}

Range AllreducePipeline::leader_slice(const Range& chunk, int leader) const {
  return part_of(chunk.count(), context_.leaders, leader, reduction_.element_bytes);
}

// Where the reduced `slice` of `chunk` lies: in the ring of the rank that reduced it, or, so that a
// leader finds a contiguous piece to send whatever the number of ranks, at its place in the node's
// only out ring.
std::byte* AllreducePipeline::reduced_slice(int rank, uint64_t step, const Range& chunk,
                                            const Range& slice) const {
  if (!context_.local.one_out_ring()) return context_.local.out_slot(rank, context_.base + step);
  return context_.local.out_slot(0, context_.base + step) +
         (slice.begin - chunk.begin) * reduction_.element_bytes;
}

bool AllreducePipeline::stage_first() { return staged_ > 0 || try_stage(); }

Step AllreducePipeline::step(Permission permission) {
  hsgd_record* record = context_.record;
  bool moved = at_level(record, &hsgd_record::reduce, [&] { return try_stage(); });
  if (permission == Permission::kGranted) {
    moved |= at_level(record, &hsgd_record::reduce, [&] { return try_reduce(); });
    if (wire_ != nullptr) {
      moved |= at_level(record, &hsgd_record::inter, [&] { return try_exchange(); });
    }
    moved |= at_level(record, &hsgd_record::gather, [&] { return try_gather(); });
  }
  if (gathered_ == chunking_.steps) return Step::kDone;
  return moved ? Step::kProgress : Step::kIdle;
}

bool AllreducePipeline::try_stage() {
  if (shared_ != nullptr) {
    if (staged_ == chunking_.steps) return false;
    staged_ = chunking_.steps;
    context_.local.publish(&Progress::staged, context_.base + staged_);
    return true;
  }
  // One chunk ahead of the reduction keeps the ring in cache; between nodes the link is slower than
  // any cache.
  const uint64_t ahead = context_.leaders == 0 ? 2 : context_.slots;
  if (staged_ == chunking_.steps || staged_ >= reduced_ + ahead) return false;
  const uint64_t step = context_.base + staged_;
  // The slot last held step - slots: every peer must have reduced that.
  if (size_ > 1 && least_of_peers(context_.local, &Progress::reduced) + context_.slots < step + 1)
    return false;
  if (size_ > 1) {
    const Range chunk = chunking_.chunk(staged_);
    const Range own = slice(chunk, rank_);
    const size_t size = reduction_.element_bytes;
    std::byte* slot = context_.local.in_slot(rank_, step);
    reduction_.copy(slot, in_ + chunk.begin * size, (own.begin - chunk.begin) * size,
                    context_.store);
    reduction_.copy(slot + (own.end - chunk.begin) * size, in_ + own.end * size,
                    (chunk.end - own.end) * size, context_.store);
    *context_.intra_bytes += (chunk.count() - own.count()) * size;
    HSGD_FAULT_POINT("allreduce: staged, not told");
    context_.local.publish(&Progress::staged, step + 1);
    HSGD_FAULT_POINT("allreduce: staged");
  }
  ++staged_;
  return true;
}

bool AllreducePipeline::try_reduce() {
  if (reduced_ == staged_) return false;
  const uint64_t step = context_.base + reduced_;
  if (size_ > 1) {
    if (least_of_peers(context_.local, &Progress::staged) < step + 1) return false;
    // The out slot last held step - slots: every peer must have gathered that.
    if (least_of_peers(context_.local, &Progress::gathered) + context_.slots < step + 1)
      return false;
  }
  if (context_.leaders > 0 && reduced_ >= gathered_ + context_.slots) return false;
  const Range chunk = chunking_.chunk(reduced_);
  const Range own = slice(chunk, rank_);
  const size_t size = reduction_.element_bytes;
  for (int rank = 0; rank < size_; ++rank) {
    inputs_[static_cast<size_t>(rank)] =
        shared_ != nullptr ? (*shared_)[static_cast<size_t>(rank)] + own.begin * size
        : rank == rank_    ? in_ + own.begin * size
                           : context_.local.in_slot(rank, step) + (own.begin - chunk.begin) * size;
  }
  const bool final = context_.leaders == 0;
  if (own.count() > 0) {
    reduction_.reduce({inputs_.data(), size_, reduced_slice(rank_, reduced_, chunk, own),
                       final ? out_ + own.begin * size : nullptr, own.count(),
                       final ? reduction_.divisor : 1.0, context_.store, context_.out_store});
  }
  *context_.intra_bytes += static_cast<uint64_t>(size_) * own.count() * size;
  HSGD_FAULT_POINT("allreduce: reduced, not told");
  context_.local.publish(&Progress::reduced, step + 1);
  HSGD_FAULT_POINT("allreduce: reduced");
  ++reduced_;
  return true;
}

bool AllreducePipeline::try_exchange() {
  bool moved = false;
  while (wire_->begun() < reduced_) {
    const uint64_t step = wire_->begun();
    const Range chunk = chunking_.chunk(step);
    if (size_ > 1 && least_of_peers(context_.local, &Progress::reduced) < context_.base + step + 1)
      break;
    const Range own = leader_slice(chunk, rank_);
    wire_->begin(
        context_.local.out_slot(0, context_.base + step) + own.begin * reduction_.element_bytes,
        own.count());
    moved = true;
  }
  moved |= wire_->progress();
  if (wire_->finished() > exchanged_) {
    exchanged_ = wire_->finished();
    context_.local.publish(&Progress::exchanged, context_.base + exchanged_);
  }
  return moved;
}

bool AllreducePipeline::try_gather() {
  if (gathered_ == reduced_) return false;
  const uint64_t step = context_.base + gathered_;
  const Range chunk = chunking_.chunk(gathered_);
  if (context_.leaders == 0) {
    if (least_of_peers(context_.local, &Progress::reduced) < step + 1) return false;
    gather_from_peers(gathered_, chunk);
  } else {
    for (int leader = 0; leader < context_.leaders; ++leader) {
      const Progress& progress = context_.local.progress(leader);
      if (progress.exchanged.load(std::memory_order_acquire) < step + 1) return false;
    }
    const size_t size = reduction_.element_bytes;
    reduction_.copy(out_ + chunk.begin * size, context_.local.out_slot(0, step),
                    chunk.count() * size, context_.out_store);
    *context_.intra_bytes += chunk.count() * size;
  }
  HSGD_FAULT_POINT("allreduce: gathered, not told");
  context_.local.publish(&Progress::gathered, step + 1);
  HSGD_FAULT_POINT("allreduce: gathered");
  ++gathered_;
  return true;
}

void AllreducePipeline::gather_from_peers(uint64_t step, const Range& chunk) {
  const size_t size = reduction_.element_bytes;
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;  // not all from the same one at once
    const Range part = slice(chunk, peer);
    reduction_.copy(out_ + part.begin * size, reduced_slice(peer, step, chunk, part),
                    part.count() * size, context_.out_store);
    *context_.intra_bytes += part.count() * size;
  }
}

// --- broadcast ---

BroadcastPipeline::BroadcastPipeline(const PipelineContext& context, void* data,
                                     const Chunking& chunking, size_t element_bytes, CopyFn copy,
                                     int root, TreeBroadcast* wire)
    : context_(context),
      data_(static_cast<std::byte*>(data)),
      chunking_(chunking),
      element_bytes_(element_bytes),
      copy_(copy),
      root_(root),
      wire_(wire),
      rank_(context.local.rank()),
      size_(context.local.size()) {}

// Where a chunk lies on this node: in the root's in ring, or where local rank 0 received it.
std::byte* BroadcastPipeline::slot(uint64_t step) const {
  return root_ >= 0 ? context_.local.in_slot(root_, context_.base + step)
                    : context_.local.out_slot(0, context_.base + step);
}

bool BroadcastPipeline::stage_first() { return rank_ != root_ || staged_ > 0 || try_stage(); }

Step BroadcastPipeline::step(Permission permission) {
  hsgd_record* record = context_.record;
  bool moved =
      at_level(record, &hsgd_record::reduce, [&] { return rank_ == root_ && try_stage(); });
  if (permission == Permission::kGranted) {
    if (wire_ != nullptr) {
      moved |= at_level(record, &hsgd_record::inter, [&] { return try_exchange(); });
    }
    if (rank_ != root_) {
      moved |= at_level(record, &hsgd_record::gather, [&] { return try_gather(); });
    }
  }
  const bool passed_on = wire_ == nullptr || exchanged_ == chunking_.steps;
  const uint64_t own = rank_ == root_ ? staged_ : gathered_;
  if (own == chunking_.steps && passed_on && permission == Permission::kGranted) return Step::kDone;
  return moved ? Step::kProgress : Step::kIdle;
}

bool BroadcastPipeline::try_stage() {
  if (staged_ == chunking_.steps) return false;
  const uint64_t step = context_.base + staged_;
  // The slot last held step - slots: every peer must have copied that, and local rank 0 have passed
  // it on.
  if (size_ > 1 && least_of_peers(context_.local, &Progress::gathered) + context_.slots < step + 1)
    return false;
  const bool passes_on = context_.leaders > 0;
  const uint64_t passed_on =
      wire_ != nullptr ? context_.base + exchanged_
                       : context_.local.progress(0).exchanged.load(std::memory_order_acquire);
  if (passes_on && passed_on + context_.slots < step + 1) return false;
  const Range chunk = chunking_.chunk(staged_);
  copy_(context_.local.in_slot(rank_, step), data_ + chunk.begin * element_bytes_,
        chunk.count() * element_bytes_, context_.store);
  *context_.intra_bytes += chunk.count() * element_bytes_;
  HSGD_FAULT_POINT("broadcast: staged, not told");
  context_.local.publish(&Progress::staged, step + 1);
  HSGD_FAULT_POINT("broadcast: staged");
  ++staged_;
  return true;
}

bool BroadcastPipeline::try_exchange() {
  bool moved = false;
  while (wire_->begun() < chunking_.steps && wire_->begun() < wire_->finished() + context_.slots) {
    const uint64_t step = wire_->begun();
    const Range chunk = chunking_.chunk(step);
    if (wire_->is_root()) {
      const uint64_t staged =
          rank_ == root_ ? context_.base + staged_
                         : context_.local.progress(root_).staged.load(std::memory_order_acquire);
      if (staged < context_.base + step + 1) break;
    } else {
      // Receiving overwrites the slot of step - slots: it must be copied by everybody here.
      const uint64_t peers =
          size_ > 1 ? least_of_peers(context_.local, &Progress::gathered) : UINT64_MAX;
      const uint64_t gathered = std::min(peers, context_.base + gathered_);
      if (gathered + context_.slots < context_.base + step + 1) break;
    }
    wire_->begin(slot(step), chunk.count() * element_bytes_);
    moved = true;
  }
  moved |= wire_->progress();
  if (!wire_->is_root() &&
      context_.base + wire_->arrived() >
          context_.local.progress(rank_).staged.load(std::memory_order_relaxed)) {
    context_.local.publish(&Progress::staged, context_.base + wire_->arrived());
  }
  if (wire_->finished() > exchanged_) {
    exchanged_ = wire_->finished();
    context_.local.publish(&Progress::exchanged, context_.base + exchanged_);
  }
  return moved;
}

bool BroadcastPipeline::try_gather() {
  if (gathered_ == chunking_.steps) return false;
  const uint64_t step = context_.base + gathered_;
  const int source = root_ >= 0 ? root_ : 0;  // whose `staged` says that the chunk lies in its slot
  const uint64_t staged =
      source == rank_ && wire_ != nullptr
          ? context_.base + wire_->arrived()
          : context_.local.progress(source).staged.load(std::memory_order_acquire);
  if (staged < step + 1) return false;
  const Range chunk = chunking_.chunk(gathered_);
  copy_(data_ + chunk.begin * element_bytes_, slot(gathered_), chunk.count() * element_bytes_,
        context_.out_store);
  *context_.intra_bytes += chunk.count() * element_bytes_;
  HSGD_FAULT_POINT("broadcast: gathered, not told");
  context_.local.publish(&Progress::gathered, step + 1);
  HSGD_FAULT_POINT("broadcast: gathered");
  ++gathered_;
  return true;
}

}  // namespace hsgd
