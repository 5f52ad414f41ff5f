// Reduce_scatter, with a block of its own size for each rank.
//
// Each element is summed as in an allreduce: local ranks in order, then nodes in order. On one node
// a rank stages all but its own pieces and reduces those straight into its output. Between nodes
// the ranks of a node share the reduction of all pieces, leaders send each node the sums that its
// ranks need, narrowed where that is asked for, add in node order, and each rank takes its piece.
// That needs a place for each rank of all nodes in every step. Where there are too many, it is an
// allreduce of which each rank takes its block: twice the bytes between nodes.
#include <algorithm>
#include <numeric>

#include "base/dtypes.hpp"
#include "base/error.hpp"
#include "base/fault_points.hpp"
#include "collectives/arguments.hpp"
#include "collectives/chunk_pipeline.hpp"
#include "collectives/collectives.hpp"
#include "collectives/one_shot.hpp"
#include "collectives/zero_copy.hpp"

namespace hsgd {
namespace {

// What of `a` lies in `b`; empty where they do not meet.
Range common(const Range& a, const Range& b) {
  const uint64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

class ReduceScatterPipeline final : public ChunkPipeline {
 public:
  ReduceScatterPipeline(Context& context, const Operation& operation, const BlockTable& table,
                        const Stages& stages)
      : ChunkPipeline(context, stages),
        in_(static_cast<const std::byte*>(operation.in)),
        out_(static_cast<std::byte*>(operation.out)),
        table_(table),
        map_(table.map()),
        reduction_(operation.reduction),
        element_bytes_(reduction_.element_bytes),
        messages_(context.links().messages()),
        mailboxes_(context.links().mailboxes()),
        narrows_(reduction_.narrowing.active()),
        sent_size_(narrows_ ? Narrowing::kElementBytes : element_bytes_) {
    if (messages_ != nullptr) messages_->start();
  }

 private:
  void stage(uint64_t step, std::byte* slot, Permission) override {
    const Range own = reduced_here(step);
    for (int place = 0; place < map_.size(); ++place) {
      const Range piece = table_.piece(place, step);
      const uint64_t offset = table_.offset(place, step);
      const Range all{offset, offset + piece.count()};
      for (const Range& part : {common(all, {0, own.begin}), common(all, {own.end, all.end})}) {
        reduction_.copy(slot + part.begin * element_bytes_,
                        in_ + (piece.begin + part.begin - offset) * element_bytes_,
                        part.count() * element_bytes_, stages_.store);
        context_.intra_bytes() += part.count() * element_bytes_;
      }
    }
  }

  void reduce(uint64_t step) override {
    const Range own = reduced_here(step);
    if (stages_.leaders == 0) {
      const Range piece = table_.piece(map_.place(), step);
      return reduce_part(step, map_.place(), own,
                         out_ + (piece.begin - own_begin()) * element_bytes_, reduction_.divisor,
                         stages_.out_store);
    }
    for (int place = 0; place < map_.size(); ++place) {
      const Range part = common(own, {table_.offset(place, step), table_.offset(place + 1, step)});
      reduce_part(step, place, part, sums(step) + part.begin * element_bytes_, 1.0, stages_.store);
    }
  }

  // What this rank reduces of a step: on one node its own piece, else an equal share of all.
  Range reduced_here(uint64_t step) const {
    if (stages_.leaders == 0) {
      return {table_.offset(map_.place(), step), table_.offset(map_.place() + 1, step)};
    }
    return part_of(table_.offset(map_.size(), step), local().size(), local().rank(),
                   element_bytes_);
  }

  // `part` of the piece at `place`, counted from the beginning of the step, over the ranks here.
  void reduce_part(uint64_t step, int place, const Range& part, std::byte* out, double divisor,
                   Store store) {
    if (part.count() == 0) return;
    const uint64_t begin =
        table_.piece(place, step).begin + part.begin - table_.offset(place, step);
    std::vector<const void*>& inputs = context_.inputs();
    for (int rank = 0; rank < local().size(); ++rank) {
      inputs[static_cast<size_t>(rank)] = rank == local().rank()
                                              ? in_ + begin * element_bytes_
                                              : in_slot(rank, step) + part.begin * element_bytes_;
    }
    reduction_.reduce({inputs.data(), local().size(), out, nullptr, part.count(), divisor, store,
                       Store::kOrdinary});
    context_.intra_bytes() += static_cast<uint64_t>(local().size()) * part.count() * element_bytes_;
  }

  // --- between nodes. At most `slots` steps are reduced and not gathered: inboxes are free, too
  // ---

  void begin_exchange(uint64_t step) override {
    messages_->begin();
    const int me = map_.node();
    const int nodes = map_.nodes();
    const size_t own_bytes = own_section(step, me).count() * sent_size_;
    HSGD_CHECK(own_bytes <= mailboxes_.in_bytes);
    for (int i = 1; i < nodes; ++i) {
      const int from = (me + nodes - i) % nodes;
      messages_->receive(from, Channel::kScatter, inbox(step, from), own_bytes);
      messages_->count_received(own_bytes);
    }
    for (int i = 1; i < nodes; ++i) {
      const int to = (me + i) % nodes;
      const Range part = own_section(step, to);
      const std::byte* sent =
          narrows_ ? narrowed_section(step, to) : sums(step) + part.begin * element_bytes_;
      messages_->send(to, Channel::kScatter, sent, part.count() * sent_size_);
    }
    HSGD_FAULT_POINT("between nodes: section sent");
  }

  // Adds up the nodes' sums. What this node's own ranks summed is narrowed as well, so that no
  // result depends on who adds.
  void end_exchange(uint64_t step) override {
    const Range part = own_section(step, map_.node());
    if (part.count() == 0) return;
    std::byte* result = sums(step) + part.begin * element_bytes_;
    const void* own = narrows_ ? narrowed_section(step, map_.node()) : result;
    std::vector<const void*>& inputs = context_.inputs();
    for (int node = 0; node < map_.nodes(); ++node) {
      inputs[static_cast<size_t>(node)] = node == map_.node() ? own : inbox(step, node);
    }
    std::byte* sum = narrows_ ? outbox(step, map_.node()) : result;
    const ReduceFn add = narrows_ ? reduction_.narrowing.reduce : reduction_.reduce;
    add({inputs.data(), map_.nodes(), sum, nullptr, part.count(), reduction_.divisor,
         Store::kOrdinary, Store::kOrdinary});
    if (narrows_) reduction_.narrowing.conversion.widen(result, sum, part.count());
  }

  // What of a node's section passes through this leader.
  Range own_section(uint64_t step, int node) const {
    const Range section = table_.section(node, step);
    const Range part = part_of(section.count(), stages_.leaders, local().rank(), element_bytes_);
    return {section.begin + part.begin, section.begin + part.end};
  }

  // This leader's share of the sums for a node, as 16-bit floats in its outbox.
  const std::byte* narrowed_section(uint64_t step, int node) {
    const Range part = own_section(step, node);
    std::byte* narrow = outbox(step, node);
    HSGD_CHECK(part.count() * sent_size_ <= mailboxes_.out_bytes);
    reduction_.narrowing.conversion.narrow(narrow, sums(step) + part.begin * element_bytes_,
                                           part.count());
    return narrow;
  }

  void gather(uint64_t step) override {
    const Range piece = table_.piece(map_.place(), step);
    reduction_.copy(out_ + (piece.begin - own_begin()) * element_bytes_,
                    sums(step) + table_.offset(map_.place(), step) * element_bytes_,
                    piece.count() * element_bytes_, stages_.out_store);
    context_.intra_bytes() += piece.count() * element_bytes_;
  }

  uint64_t own_begin() const { return table_.block(map_.place()).begin; }
  std::byte* sums(uint64_t step) const { return out_slot(0, step); }
  std::byte* inbox(uint64_t step, int node) const {
    return mailboxes_.in + part_index(step, node) * mailboxes_.in_bytes;
  }
  std::byte* outbox(uint64_t step, int node) const {
    return mailboxes_.out + part_index(step, node) * mailboxes_.out_bytes;
  }
  size_t part_index(uint64_t step, int node) const {
    return step % context_.slots() * static_cast<size_t>(map_.nodes()) + static_cast<size_t>(node);
  }

  const std::byte* in_;  // all blocks in rank order
  std::byte* out_;       // this rank's block, perhaps at its place in `in_`
  const BlockTable& table_;
  const NodeMap& map_;
  const Reduction& reduction_;
  const size_t element_bytes_;  // of an element
  StepMessages* messages_;      // on leaders of several nodes
  const Mailboxes mailboxes_;
  const bool narrows_;
  const size_t sent_size_;  // of an element between nodes
};

// The steps in which all pieces fit into the slots of `chunk_bytes`, and so into the inboxes.
uint64_t steps_needed(const BlockTable& table, size_t chunk_bytes, size_t element_bytes) {
  const NodeMap& map = table.map();
  const uint64_t capacity = chunk_bytes / static_cast<size_t>(map.nodes()) / element_bytes;
  uint64_t steps = 1;
  for (int node = 0; node < map.nodes(); ++node) {
    const uint64_t lost = static_cast<uint64_t>(map.ranks_on(node)) * table.line();
    steps = std::max(steps, steps_for(table.of_node(node), capacity, lost));
  }
  return steps;
}

void reduce_own_block(Context& context, const Operation& operation,
                      const SharedArguments& arguments) {
  const Reduction& reduction = operation.reduction;
  const Range& own = operation.part;
  if (own.count() == 0) return;
  std::vector<const void*>& inputs = context.inputs();
  const size_t ranks = arguments.in.size();
  for (size_t rank = 0; rank < ranks; ++rank) {
    inputs[rank] = arguments.in[rank] + own.begin * reduction.element_bytes;
  }
  reduction.reduce({inputs.data(), static_cast<int>(ranks), operation.out, nullptr, own.count(),
                    reduction.divisor, context.stores().into_output(operation), Store::kOrdinary});
  context.intra_bytes() += ranks * own.count() * reduction.element_bytes;
}

void run(Context& context, const Operation& operation) {
  if (is_small(context, operation)) return run_one_shot(context, operation);
  if (context.one_node()) {
    const auto shared = shared_arguments(context, operation, operation.bytes(), 0);
    if (shared) {
      return run_in_place(context, [&] { reduce_own_block(context, operation, *shared); });
    }
  }
  if (!context.one_node() && !context.sizes().has_room_for_blocks()) {
    return reduce_between_nodes(context, operation);
  }
  const size_t size = operation.reduction.element_bytes;
  BlockTable table(operation.counts.of_rank, context.map(), size);
  table.cut(steps_needed(table, context.sizes().block_step_bytes(), size));
  Stages stages;
  stages.steps = table.steps();
  stages.leaders = context.one_node() ? 0 : context.sizes().most_leaders();
  stages.reduces = true;
  stages.gathers = stages.leaders > 0;
  if (context.place().local_rank < stages.leaders) stages.window = context.links().messages();
  stages.store = context.stores().into_ring(operation);
  stages.out_store = context.stores().into_output(operation);
  ReduceScatterPipeline(context, operation, table, stages).run(operation);
}

void check(const Place& place, const hsgd_call& call) {
  check_type(call.dtype, call.op);
  const Blocks blocks = checked_blocks(place, call.counts, call.dtype);
  check_buffers({call.in, blocks.total, blocks.before}, {call.out, blocks.own},
                "this rank's block of the input as output, or");
}

Operation reduce_scatter(const Context& context, const hsgd_call& call) {
  const Place& place = context.place();
  Operation operation = reduction_of(context, call);
  operation.counts = {call.counts, place.size};
  operation.count = std::accumulate(call.counts, call.counts + place.size, uint64_t{0});
  operation.signature = Signature::pack(HSGD_REDUCE_SCATTER, call.dtype, call.op, 0,
                                        operation.count, hash_label(call.label, operation.counts));
  operation.part.begin = std::accumulate(call.counts, call.counts + place.rank, uint64_t{0});
  operation.part.end = operation.part.begin + call.counts[place.rank];
  return operation;
}

}  // namespace

const CollectiveKind kReduceScatter{check, reduce_scatter, run};

}  // namespace hsgd
