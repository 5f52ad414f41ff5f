// The pipeline of a large allgather between nodes.
#include "collectives/node_allgather.hpp"

#include <algorithm>
#include <vector>

#include "collectives/chunk_pipeline.hpp"
#include "collectives/section_layout.hpp"

namespace hsgd {
namespace {

// Where the parts of nodes begin in the area of a leader, in bytes of the step.
std::vector<size_t> begins_of(const SectionLayout& layout, int leader, uint64_t step,
                              size_t element_bytes) {
  std::vector<size_t> begins;
  for (const uint64_t begin : layout.area(leader, step)) begins.push_back(begin * element_bytes);
  return begins;
}

class NodeAllgather final : public ChunkPipeline {
 public:
  NodeAllgather(Context& context, const Operation& operation, const SectionLayout& layout,
                const Stages& stages)
      : ChunkPipeline(context, stages),
        map_(context.map()),
        in_(static_cast<const std::byte*>(operation.in)),
        out_(static_cast<std::byte*>(operation.out)),
        layout_(layout),
        element_bytes_(operation.reduction.element_bytes),
        blocks_(stages.window != nullptr ? context.links().blocks() : nullptr) {
    if (blocks_ != nullptr) blocks_->start();
  }

 private:
  // At the place of this node in the out ring, not in the in ring of this rank: leaders find what
  // they send in one piece.
  void stage(uint64_t step, std::byte*, Permission) override {
    const Range own = layout_.block(map_.place());
    for (int leader = 0; leader < stages_.leaders; ++leader) {
      const Range share = layout_.share(map_.node(), leader, step);
      const uint64_t begin = std::max(own.begin, share.begin);
      const uint64_t end = std::min(own.end, share.end);
      if (end <= begin) continue;
      const uint64_t at = layout_.offset(map_.node(), leader, step) + begin - share.begin;
      copy(out_slot(0, step) + at * element_bytes_, in_ + (begin - own.begin) * element_bytes_,
           end - begin, stages_.store);
    }
  }

  void begin_exchange(uint64_t step) override {
    blocks_->begin(out_slot(0, step), begins_of(layout_, lane(), step, element_bytes_));
  }

  void gather(uint64_t step) override {
    for (int i = 0; i < map_.nodes(); ++i) {
      const int node = (map_.node() + i) % map_.nodes();
      for (int leader = 0; leader < stages_.leaders; ++leader) gather_share(step, node, leader);
    }
  }

  // Block by block, as these may lie apart in the output.
  void gather_share(uint64_t step, int node, int leader) {
    const Range share = layout_.share(node, leader, step);
    if (share.count() == 0) return;
    const std::byte* from = out_slot(0, step) + layout_.offset(node, leader, step) * element_bytes_;
    for (int place = layout_.place_at(node, share.begin);
         place < map_.end(node) && layout_.block(place).begin < share.end; ++place) {
      const Range block = layout_.block(place);
      const uint64_t begin = std::max(block.begin, share.begin);
      const uint64_t end = std::min(block.end, share.end);
      if (end <= begin) continue;
      std::byte* to = out_ + (layout_.packed(place).begin + begin - block.begin) * element_bytes_;
      const std::byte* at = place == map_.place() ? in_ + (begin - block.begin) * element_bytes_
                                                  : from + (begin - share.begin) * element_bytes_;
      if (at != to) copy(to, at, end - begin, stages_.out_store);
    }
  }

  void copy(std::byte* to, const std::byte* from, uint64_t count, Store store) {
    context_.copy()(to, from, count * element_bytes_, store);
    context_.intra_bytes() += count * element_bytes_;
  }

  const NodeMap& map_;
  const std::byte* in_;  // this rank's block, perhaps at its place in `out_`
  std::byte* out_;
  const SectionLayout& layout_;
  const size_t element_bytes_;  // of an element
  SliceAllgather* blocks_;      // on leaders
};

}  // namespace

void allgather_between_nodes(Context& context, const Operation& operation) {
  const WirePlan plan = context.sizes().wire_plan(operation.bytes());
  // Rounding takes an element of each node; any step has room for more (context/step_sizes.cpp).
  const uint64_t step_count = std::max<uint64_t>(
      plan.step_bytes / operation.reduction.element_bytes, 2 * context.place().node_count);
  const SectionLayout layout(context.map(), context.rounds(), operation.counts.of_rank,
                             plan.leaders, step_count);
  Stages stages;
  stages.steps = layout.steps();
  stages.leaders = plan.leaders;
  if (context.place().leads(plan.leaders)) stages.window = context.links().blocks();
  if (context.place().leads(1)) {
    stages.rides =
        context.links().blocks()->fits(begins_of(layout, 0, 0, operation.reduction.element_bytes),
                                       context.links().headers().most_part_bytes());
  }
  stages.store = context.stores().into_ring(operation);
  stages.out_store = context.stores().into_output(operation);
  NodeAllgather(context, operation, layout, stages).run(operation);
}

}  // namespace hsgd
