// kReduceScatter: reduces, and leaves a block of individual size on each rank.
//
// Each element is summed as in an allreduce: local ranks in order, then nodes in the schedule's
// order. On one node a rank stages all but its own pieces and reduces those straight into its
// output. Between nodes the ranks of a node share the reduction of a step, leaders send the sums
// that other nodes need, narrowed on request, and each rank takes its pieces.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "collectives/kinds/arguments.hpp"
#include "collectives/kinds/chunk_pipeline.hpp"
#include "collectives/kinds/collectives.hpp"
#include "collectives/kinds/one_shot.hpp"
#include "collectives/kinds/section_layout.hpp"
#include "collectives/kinds/zero_copy.hpp"
#include "core/base/dtypes.hpp"
#include "core/base/fault_points.hpp"

namespace hsgd {
namespace {

// Returns the intersection of two ranges; empty if they do not overlap.
Range common(const Range& a, const Range& b) {
  const uint64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

struct ReduceTarget {
  std::byte* out;
  double divisor;
  Store store;
};

// The base of all forms: stages and reduces steps that hold pieces of all blocks in some order.
class ReduceScatterPipeline : public ChunkPipeline {
 protected:
  ReduceScatterPipeline(Context& context, const Operation& operation, const Stages& stages)
      : ChunkPipeline(context, stages),
        reduction_(operation.reduction),
        element_bytes_(reduction_.element_bytes),
        in_(static_cast<const std::byte*>(operation.in)),
        out_(static_cast<std::byte*>(operation.out)) {}

  // Stages `part` of a step, which lies at `from` in the input.
  void stage_part(std::byte* slot, const Range& part, uint64_t from) {
    const size_t bytes = part.count() * element_bytes_;
    if (bytes == 0) return;
    reduction_.copy(slot + part.begin * element_bytes_, in_ + from * element_bytes_, bytes,
                    stages_.store);
    context_.intra_bytes() += bytes;
  }

  // Sums `part` over the ranks of this node.
  void reduce_part(uint64_t step, const Range& part, uint64_t from, const ReduceTarget& target) {
    if (part.count() == 0) return;
    std::vector<const void*>& inputs = context_.inputs();
    for (int rank = 0; rank < local().size(); ++rank) {
      inputs[static_cast<size_t>(rank)] = rank == local().rank()
                                              ? in_ + from * element_bytes_
                                              : in_slot(rank, step) + part.begin * element_bytes_;
    }
    reduction_.reduce({inputs.data(), local().size(), target.out, nullptr, part.count(),
                       target.divisor, target.store, Store::kOrdinary});
    context_.intra_bytes() += static_cast<uint64_t>(local().size()) * part.count() * element_bytes_;
  }

  const Reduction& reduction_;
  const size_t element_bytes_;  // of an element
  const std::byte* in_;         // all blocks in rank order
  std::byte* out_;              // this rank's block, perhaps at its place in `in_`
};

class OnNode final : public ReduceScatterPipeline {
 public:
  OnNode(Context& context, const Operation& operation, const BlockTable& table,
         const Stages& stages)
      : ReduceScatterPipeline(context, operation, stages), table_(table), map_(table.map()) {}

 private:
  void stage(uint64_t step, std::byte* slot, Permission) override {
    for (int place = 0; place < map_.size(); ++place) {
      if (place != map_.place()) stage_part(slot, part(step, place), piece(step, place).begin);
    }
  }

  void reduce(uint64_t step) override {
    const Range own = piece(step, map_.place());
    const uint64_t done = own.begin - table_.block(map_.place()).begin;
    reduce_part(step, part(step, map_.place()), own.begin,
                {out_ + done * element_bytes_, reduction_.divisor, stages_.out_store});
  }

  Range piece(uint64_t step, int place) const { return table_.piece(place, step); }  // of the input
  Range part(uint64_t step, int place) const {                                       // of the step
    const uint64_t begin = table_.offset(place, step);
    return {begin, begin + piece(step, place).count()};
  }

  const BlockTable& table_;
  const NodeMap& map_;
};

class BetweenNodes final : public ReduceScatterPipeline {
 public:
  BetweenNodes(Context& context, const Operation& operation, const SectionLayout& layout,
               const Stages& stages)
      : ReduceScatterPipeline(context, operation, stages),
        map_(context.map()),
        layout_(layout),
        slices_(stages.window != nullptr ? context.links().slices() : nullptr) {
    if (slices_ != nullptr) slices_->start(reduction_, SliceAllreduce::Form::kParts);
  }

 private:
  void stage(uint64_t step, std::byte* slot, Permission) override {
    const Range own = reduced_here(step);
    const auto copy = [&](const Range& part, uint64_t from) { stage_part(slot, part, from); };
    for_each_piece(step, {0, own.begin}, copy);
    for_each_piece(step, {own.end, layout_.count(step)}, copy);
  }

  void reduce(uint64_t step) override {
    for_each_piece(step, reduced_here(step), [&](const Range& part, uint64_t from) {
      reduce_part(step, part, from, {sums(step) + part.begin * element_bytes_, 1.0, stages_.store});
    });
  }

  // Returns the range of a step that this rank reduces: an equal share.
  Range reduced_here(uint64_t step) const {
    return part_of(layout_.count(step), local().size(), local().rank(), element_bytes_);
  }

  void begin_exchange(uint64_t step) override {
    std::vector<uint64_t> begins = layout_.area(lane(), step);
    const uint64_t first = begins.front();
    for (uint64_t& begin : begins) begin -= first;
    slices_->begin_parts(sums(step) + first * element_bytes_, std::move(begins));
    HSGD_FAULT_POINT("between nodes: section sent");
  }

  void gather(uint64_t step) override {
    for (int leader = 0; leader < stages_.leaders; ++leader) {
      const Range share = layout_.share(map_.node(), leader, step);
      const Range block = layout_.block(map_.place());
      const Range own = common(share, block);
      if (own.count() == 0) continue;
      const uint64_t at = layout_.offset(map_.node(), leader, step) + own.begin - share.begin;
      const size_t bytes = own.count() * element_bytes_;
      reduction_.copy(out_ + (own.begin - block.begin) * element_bytes_,
                      sums(step) + at * element_bytes_, bytes, stages_.out_store);
      context_.intra_bytes() += bytes;
    }
  }

  // Cuts `range`, elements of the step, where blocks of ranks or shares of leaders end, and calls
  // handle(part, from) for each piece: `part` is its range in the step, `from` its first element in
  // the input.
  template <class Handle>
  void for_each_piece(uint64_t step, const Range& range, Handle&& handle) const {
    for (int leader = 0; leader < stages_.leaders; ++leader) {
      for (int node = 0; node < map_.nodes(); ++node) {
        const Range share = layout_.share(node, leader, step);
        const uint64_t offset = layout_.offset(node, leader, step);
        const Range part = common({offset, offset + share.count()}, range);
        if (part.count() == 0) continue;
        for_each_block(node, {share.begin + part.begin - offset, share.begin + part.end - offset},
                       [&](const Range& of_section, uint64_t from) {
                         const uint64_t begin = offset + of_section.begin - share.begin;
                         handle(Range{begin, begin + of_section.count()}, from);
                       });
      }
    }
  }

  // Does the same for `range` of a node's section.
  template <class Handle>
  void for_each_block(int node, const Range& range, Handle&& handle) const {
    for (int place = layout_.place_at(node, range.begin);
         place < map_.end(node) && layout_.block(place).begin < range.end; ++place) {
      const Range block = layout_.block(place);
      const Range part = common(block, range);
      handle(part, layout_.packed(place).begin + part.begin - block.begin);
    }
  }

  std::byte* sums(uint64_t step) const { return out_slot(0, step); }

  const NodeMap& map_;
  const SectionLayout& layout_;
  SliceAllreduce* slices_;  // on leaders
};

Stages stages_of(Context& context, const Operation& operation, uint64_t steps, int leaders) {
  Stages stages;
  stages.steps = steps;
  stages.leaders = leaders;
  stages.reduces = true;
  stages.gathers = leaders > 0;
  if (context.place().leads(leaders)) stages.window = context.links().slices();
  stages.store = context.stores().into_ring(operation);
  stages.out_store = context.stores().into_output(operation);
  return stages;
}

void run_on_node(Context& context, const Operation& operation) {
  const size_t size = operation.reduction.element_bytes;
  BlockTable table(operation.counts.of_rank, context.map(), size);
  const uint64_t lost = static_cast<uint64_t>(context.place().size) * table.line();
  table.cut(steps_for(operation.count, context.sizes().block_step_bytes() / size, lost));
  OnNode(context, operation, table, stages_of(context, operation, table.steps(), 0)).run(operation);
}

void run_between_nodes(Context& context, const Operation& operation) {
  const WirePlan plan = context.sizes().wire_plan(operation.bytes());
  const size_t size = operation.reduction.element_bytes;
  const auto nodes = static_cast<uint64_t>(context.place().node_count);
  const uint64_t share_count = context.sizes().share_bytes() / size;
  const uint64_t step_count = std::max<uint64_t>(plan.step_bytes / size, 2 * nodes);
  const uint64_t piece_count =
      std::min(static_cast<uint64_t>(plan.leaders) * share_count, step_count / nodes);
  const SectionLayout layout(context.map(), context.rounds(), operation.counts.of_rank,
                             plan.leaders, step_count, piece_count);
  BetweenNodes(context, operation, layout,
               stages_of(context, operation, layout.steps(), plan.leaders))
      .run(operation);
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
  if (!context.one_node()) return run_between_nodes(context, operation);
  const auto shared = shared_arguments(context, operation, operation.bytes(), 0);
  if (!shared) return run_on_node(context, operation);
  run_in_place(context, [&] { reduce_own_block(context, operation, *shared); });
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
