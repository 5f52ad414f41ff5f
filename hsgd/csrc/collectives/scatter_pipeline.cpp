// The state machine of reduce_scatter.
#include "collectives/scatter_pipeline.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/fault_points.hpp"

namespace hsgd {
namespace {

// What of `a` lies in `b`; empty where they do not meet.
Range common(const Range& a, const Range& b) {
  const uint64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

}  // namespace

ReduceScatterPipeline::ReduceScatterPipeline(const PipelineContext& context, const void* in,
                                             void* out, const BlockTable& table,
                                             const Reduction& reduction, StepMessages* wire,
                                             const Mailboxes& mailboxes)
    : context_(context),
      in_(static_cast<const std::byte*>(in)),
      out_(static_cast<std::byte*>(out)),
      table_(table),
      map_(table.map()),
      reduction_(reduction),
      size_(reduction.element_bytes),
      wire_(wire),
      mailboxes_(mailboxes),
      sent_size_(reduction.narrowing.active() ? Narrowing::kElementBytes : size_),
      inputs_(static_cast<size_t>(std::max(context.local.size(), map_.nodes()))) {
  if (wire_ != nullptr) wire_->start();
}

uint64_t ReduceScatterPipeline::steps_needed(const BlockTable& table, size_t chunk_bytes,
                                             size_t element_bytes) {
  const NodeMap& map = table.map();
  const uint64_t capacity = chunk_bytes / static_cast<size_t>(map.nodes()) / element_bytes;
  uint64_t steps = 1;
  for (int node = 0; node < map.nodes(); ++node) {
    const uint64_t lost = static_cast<uint64_t>(map.ranks_on(node)) * table.line();
    steps = std::max(steps, steps_for(table.of_node(node), capacity, lost));
  }
  return steps;
}

bool ReduceScatterPipeline::stage_first() { return staged_ > 0 || try_stage(); }

Step ReduceScatterPipeline::step(Permission permission) {
  hsgd_record* record = context_.record;
  bool moved = at_level(record, &hsgd_record::reduce, [&] { return try_stage(); });
  if (permission == Permission::kGranted) {
    moved |= at_level(record, &hsgd_record::reduce, [&] { return try_reduce(); });
    if (wire_ != nullptr) {
      moved |= at_level(record, &hsgd_record::inter, [&] { return try_exchange(); });
    }
    if (context_.leaders > 0) {
      moved |= at_level(record, &hsgd_record::gather, [&] { return try_take(); });
    }
  }
  if ((context_.leaders > 0 ? taken_ : reduced_) == table_.steps()) return Step::kDone;
  return moved ? Step::kProgress : Step::kIdle;
}

// What this rank reduces of a step: on one node its own piece, else an equal share of all.
Range ReduceScatterPipeline::reduced_here(uint64_t step) const {
  if (context_.leaders == 0) {
    return {table_.offset(map_.place(), step), table_.offset(map_.place() + 1, step)};
  }
  return part_of(table_.offset(map_.size(), step), context_.local.size(), context_.local.rank(),
                 size_);
}

bool ReduceScatterPipeline::try_stage() {
  // One step ahead keeps the ring in cache; between nodes the link is slower than any cache.
  const uint64_t ahead = context_.leaders == 0 ? 2 : context_.slots;
  if (staged_ == table_.steps() || staged_ >= reduced_ + ahead) return false;
  const uint64_t step = context_.base + staged_;
  if (!context_.local.peers_freed(&Progress::reduced, step, context_.slots)) return false;
  std::byte* slot = context_.local.in_slot(context_.local.rank(), step);
  const Range own = reduced_here(staged_);
  for (int place = 0; place < map_.size(); ++place) {
    const Range piece = table_.piece(place, staged_);
    const uint64_t offset = table_.offset(place, staged_);
    const Range all{offset, offset + piece.count()};
    for (const Range& part : {common(all, {0, own.begin}), common(all, {own.end, all.end})}) {
      reduction_.copy(slot + part.begin * size_, in_ + (piece.begin + part.begin - offset) * size_,
                      part.count() * size_, context_.store);
      *context_.intra_bytes += part.count() * size_;
    }
  }
  HSGD_FAULT_POINT("reduce_scatter: staged, not told");
  context_.local.publish(&Progress::staged, step + 1);
  HSGD_FAULT_POINT("reduce_scatter: staged");
  ++staged_;
  return true;
}

bool ReduceScatterPipeline::try_reduce() {
  if (reduced_ == staged_) return false;
  const uint64_t step = context_.base + reduced_;
  if (!context_.local.peers_reached(&Progress::staged, step + 1)) return false;
  const Range own = reduced_here(reduced_);
  if (context_.leaders == 0) {
    const Range piece = table_.piece(map_.place(), reduced_);
    reduce(reduced_, map_.place(), own, out_ + (piece.begin - own_begin()) * size_,
           reduction_.divisor, context_.out_store);
  } else {
    // The slot held step - slots: everybody must have taken that.
    if (reduced_ >= taken_ + context_.slots) return false;
    if (!context_.local.peers_freed(&Progress::gathered, step, context_.slots)) return false;
    for (int place = 0; place < map_.size(); ++place) {
      const Range part =
          common(own, {table_.offset(place, reduced_), table_.offset(place + 1, reduced_)});
      reduce(reduced_, place, part, sums(reduced_) + part.begin * size_, 1.0, context_.store);
    }
  }
  HSGD_FAULT_POINT("reduce_scatter: reduced, not told");
  context_.local.publish(&Progress::reduced, step + 1);
  HSGD_FAULT_POINT("reduce_scatter: reduced");
  ++reduced_;
  return true;
}

// `part` of the piece at `place`, counted from the beginning of the step, over the ranks here.
void ReduceScatterPipeline::reduce(uint64_t step, int place, const Range& part, std::byte* out,
                                   double divisor, Store store) {
  if (part.count() == 0) return;
  const uint64_t begin = table_.piece(place, step).begin + part.begin - table_.offset(place, step);
  for (int rank = 0; rank < context_.local.size(); ++rank) {
    inputs_[static_cast<size_t>(rank)] =
        rank == context_.local.rank()
            ? in_ + begin * size_
            : context_.local.in_slot(rank, context_.base + step) + part.begin * size_;
  }
  reduction_.reduce({inputs_.data(), context_.local.size(), out, nullptr, part.count(), divisor,
                     store, Store::kOrdinary});
  *context_.intra_bytes += static_cast<uint64_t>(context_.local.size()) * part.count() * size_;
}

// --- between nodes ---

// What of a node's section passes through this leader.
Range ReduceScatterPipeline::own_section(uint64_t step, int node) const {
  const Range section = table_.section(node, step);
  const Range part = part_of(section.count(), context_.leaders, context_.local.rank(), size_);
  return {section.begin + part.begin, section.begin + part.end};
}

bool ReduceScatterPipeline::try_exchange() {
  bool moved = false;
  // At most `slots` steps are reduced and not yet taken, so that inboxes are free, too.
  while (wire_->begun() < reduced_) {
    const uint64_t step = context_.base + wire_->begun();
    if (!context_.local.peers_reached(&Progress::reduced, step + 1)) break;
    post(wire_->begun());
    moved = true;
  }
  moved |= wire_->progress();
  for (; exchanged_ < wire_->finished(); ++exchanged_) {
    add_nodes(exchanged_);
    context_.local.publish(&Progress::exchanged, context_.base + exchanged_ + 1);
  }
  return moved;
}

void ReduceScatterPipeline::post(uint64_t step) {
  wire_->begin();
  const int me = map_.node();
  const int nodes = map_.nodes();
  const size_t own_bytes = own_section(step, me).count() * sent_size_;
  HSGD_CHECK(own_bytes <= mailboxes_.in_bytes);
  for (int i = 1; i < nodes; ++i) {
    const int from = (me + nodes - i) % nodes;
    wire_->receive(from, Channel::kScatter, inbox(step, from), own_bytes);
    wire_->count_received(own_bytes);
  }
  for (int i = 1; i < nodes; ++i) {
    const int to = (me + i) % nodes;
    const Range part = own_section(step, to);
    const std::byte* sent = reduction_.narrowing.active() ? narrowed_section(step, to)
                                                          : sums(step) + part.begin * size_;
    wire_->send(to, Channel::kScatter, sent, part.count() * sent_size_);
  }
  HSGD_FAULT_POINT("between nodes: section sent");
}

// This leader's share of the sums for a node, as 16-bit floats in its outbox.
const std::byte* ReduceScatterPipeline::narrowed_section(uint64_t step, int node) {
  const Range part = own_section(step, node);
  std::byte* narrow = outbox(step, node);
  HSGD_CHECK(part.count() * sent_size_ <= mailboxes_.out_bytes);
  reduction_.narrowing.conversion.narrow(narrow, sums(step) + part.begin * size_, part.count());
  return narrow;
}

// What this node's own ranks summed is narrowed as well, so that no result depends on who adds.
void ReduceScatterPipeline::add_nodes(uint64_t step) {
  const Range part = own_section(step, map_.node());
  if (part.count() == 0) return;
  std::byte* result = sums(step) + part.begin * size_;
  const bool narrows = reduction_.narrowing.active();
  const void* own = narrows ? narrowed_section(step, map_.node()) : result;
  for (int node = 0; node < map_.nodes(); ++node) {
    inputs_[static_cast<size_t>(node)] = node == map_.node() ? own : inbox(step, node);
  }
  std::byte* sum = narrows ? outbox(step, map_.node()) : result;
  const ReduceFn add = narrows ? reduction_.narrowing.reduce : reduction_.reduce;
  add({inputs_.data(), map_.nodes(), sum, nullptr, part.count(), reduction_.divisor,
       Store::kOrdinary, Store::kOrdinary});
  if (narrows) reduction_.narrowing.conversion.widen(result, sum, part.count());
}

bool ReduceScatterPipeline::try_take() {
  if (taken_ == reduced_) return false;
  const uint64_t step = context_.base + taken_;
  for (int leader = 0; leader < context_.leaders; ++leader) {
    const Progress& progress = context_.local.progress(leader);
    if (progress.exchanged.load(std::memory_order_acquire) < step + 1) return false;
  }
  const Range piece = table_.piece(map_.place(), taken_);
  reduction_.copy(out_ + (piece.begin - own_begin()) * size_,
                  sums(taken_) + table_.offset(map_.place(), taken_) * size_, piece.count() * size_,
                  context_.out_store);
  *context_.intra_bytes += piece.count() * size_;
  HSGD_FAULT_POINT("between nodes: section taken");
  context_.local.publish(&Progress::gathered, step + 1);
  ++taken_;
  return true;
}

}  // namespace hsgd
