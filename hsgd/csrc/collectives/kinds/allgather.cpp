// kAllgather: gathers a block of individual size from each rank.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "collectives/kinds/arguments.hpp"
#include "collectives/kinds/chunk_pipeline.hpp"
#include "collectives/kinds/collectives.hpp"
#include "collectives/kinds/section_layout.hpp"
#include "collectives/kinds/zero_copy.hpp"
#include "core/base/dtypes.hpp"

namespace hsgd {
namespace {

// The pipeline on one node: in each step a rank stages a piece of its block, which the others copy.
class OnNode final : public ChunkPipeline {
 public:
  OnNode(Context& context, const Operation& operation, const BlockTable& table,
         const Stages& stages)
      : ChunkPipeline(context, stages),
        in_(static_cast<const std::byte*>(operation.in)),
        out_(static_cast<std::byte*>(operation.out)),
        table_(table),
        element_bytes_(operation.reduction.element_bytes) {}

 private:
  // Copies to the ring and, if the output may be written, to the output: the second copy finds the
  // input in the cache.
  void stage(uint64_t step, std::byte* slot, Permission permission) override {
    const Range piece = table_.piece(local().rank(), step);
    const std::byte* from = own_input(piece);
    std::byte* to = out_ + piece.begin * element_bytes_;
    const size_t bytes = piece.count() * element_bytes_;
    context_.copy()(slot, from, bytes, stages_.store);
    if (permission == Permission::kGranted) {
      context_.copy()(to, from, bytes, stages_.out_store);
    } else {
      ++early_;
    }
    context_.intra_bytes() += bytes;
  }

  void gather(uint64_t step) override {
    for (int i = 0; i < local().size(); ++i) {
      const int rank = (local().rank() + i) % local().size();  // each starts at another rank
      const Range piece = table_.piece(rank, step);
      const std::byte* from = in_slot(rank, step);
      if (rank == local().rank()) {
        if (step >= early_) continue;  // already copied while staging
        from = own_input(piece);
      } else {
        context_.intra_bytes() += piece.count() * element_bytes_;
      }
      context_.copy()(out_ + piece.begin * element_bytes_, from, piece.count() * element_bytes_,
                      stages_.out_store);
    }
  }

  const std::byte* own_input(const Range& piece) const {
    return in_ + (piece.begin - table_.block(local().rank()).begin) * element_bytes_;
  }

  const std::byte* in_;  // this rank's block, perhaps at its place in `out_`
  std::byte* out_;
  const BlockTable& table_;
  const size_t element_bytes_;  // of an element
  uint64_t early_ = 0;          // steps staged before the output could be written
};

// --- large, between nodes ---

// Returns the begins of nodes' parts in the area of a leader, in bytes of the step.
std::vector<size_t> begins_of(const SectionLayout& layout, int leader, uint64_t step,
                              size_t element_bytes) {
  std::vector<size_t> begins;
  for (const uint64_t begin : layout.area(leader, step)) begins.push_back(begin * element_bytes);
  return begins;
}

// The pipeline between nodes. A rank stages its part of each step in the out ring of its node;
// leaders send it from there and receive the other nodes' parts beside it; then each rank copies
// the whole step. Each byte crosses a link once per node that needs it. To stage it takes 2
// accesses to memory on its own node, and to copy it out 2 for each rank. A step lies packed in the
// ring, with no fixed place for a rank, so it needs no more memory than an allreduce.
class BetweenNodes final : public ChunkPipeline {
 public:
  BetweenNodes(Context& context, const Operation& operation, const SectionLayout& layout,
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
  // Stages at this node's place in the out ring, not in this rank's in ring, so that leaders find
  // their data in one piece.
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

  // Copies block by block, because blocks may lie apart in the output.
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

void run_between_nodes(Context& context, const Operation& operation) {
  const WirePlan plan = context.sizes().wire_plan(operation.bytes());
  // Rounding takes an element of each node; every step has room for more
  // (collectives/context/step_sizes.cpp).
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
  BetweenNodes(context, operation, layout, stages).run(operation);
}

// --- small ---

void run_small_on_node(Context& context, const Operation& operation) {
  const size_t size = operation.reduction.element_bytes;
  const uint64_t* counts = operation.counts.of_rank;
  const Place& place = context.place();
  const LocalGroup& local = context.local();
  const auto join = [&](std::byte* to) {
    for (int rank = 0; rank < place.size; ++rank) {
      const size_t bytes = counts[rank] * size;
      const void* from =
          rank == place.rank ? operation.in : local.payload(rank, context.sequence(), bytes);
      if (from != to && bytes > 0) std::memcpy(to, from, bytes);
      to += bytes;
    }
    context.intra_bytes() += operation.bytes();
  };
  // If many ranks share cores and there is room for the result, one rank reads all blocks, and the
  // others read its result.
  std::byte* result = nullptr;
  const bool has_room = operation.bytes() <= context.sizes().oneshot_bytes();
  if (local.combines() && local.shares_cores() && has_room)
    result = context.local().result_payload(context.sequence(), operation.bytes());
  context.open(operation, operation.in, counts[place.rank] * size, [&] {
    if (result != nullptr) join(result);
  });
  context.wait_for_headers();
  if (result == nullptr) return join(static_cast<std::byte*>(operation.out));
  if (operation.bytes() > 0) std::memcpy(operation.out, result, operation.bytes());
  context.intra_bytes() += operation.bytes();
}

void run_small_between_nodes(Context& context, const Operation& operation) {
  const size_t size = operation.reduction.element_bytes;
  const size_t bytes = operation.bytes();
  const NodeMap& map = context.map();
  const LocalGroup& local = context.local();
  const uint64_t sequence = context.sequence();
  const auto bytes_of = [&](int place) { return operation.counts.of_rank[map.rank(place)] * size; };
  context.open(operation, operation.in, bytes_of(map.place()));
  if (context.place().leads(1)) {
    std::byte* result = context.local().result_payload(sequence, bytes);
    const std::vector<Block> blocks = blocks_of(operation.counts.of_rank, map);
    // Groups of nodes have blocks in the order of places, but the result has them in the order of
    // ranks.
    const auto join = [&](const std::vector<Payload>& parts, std::byte* out, bool is_last) {
      int place = 0;
      std::byte* end = out;
      for (const Payload& part : parts) {
        if (!is_last && part.bytes > 0) std::memcpy(end, part.data, part.bytes);
        end += part.bytes;
        const std::byte* from = part.data;
        while (is_last && place < map.size() && from < part.data + part.bytes) {
          const Block& block = blocks[static_cast<size_t>(place++)];
          if (block.count > 0) std::memcpy(out + block.begin * size, from, block.count * size);
          from += block.count * size;
        }
      }
      return static_cast<size_t>(end - out);
    };
    context.lead([&] {
      std::byte* end = result;
      for (int rank = 0; rank < context.place().local_size; ++rank) {
        const size_t part = bytes_of(map.first(map.node()) + rank);
        if (part > 0) std::memcpy(end, local.payload(rank, sequence, part), part);
        end += part;
      }
      return Outgoing{{result, static_cast<size_t>(end - result)}, join, result, {}};
    });
  }
  context.wait_for_result();
  if (bytes > 0) {
    std::memcpy(operation.out, context.local().result_payload(sequence, bytes), bytes);
  }
  context.intra_bytes() += bytes;
}

// --- in place ---

void join_blocks(Context& context, const Operation& operation, const SharedArguments& arguments) {
  const std::vector<Block> blocks = blocks_of(operation.counts.of_rank, context.map());
  const size_t size = operation.reduction.element_bytes;
  const Store store = context.stores().into_output(operation);
  for (int i = 0; i < context.place().local_size; ++i) {
    const auto peer = static_cast<size_t>(in_turn(context, i));
    const size_t bytes = blocks[peer].count * size;
    context.copy()(static_cast<std::byte*>(operation.out) + blocks[peer].begin * size,
                   arguments.in[peer], bytes, store);
    context.intra_bytes() += bytes;
  }
}

void run(Context& context, const Operation& operation) {
  const size_t size = operation.reduction.element_bytes;
  const uint64_t* counts = operation.counts.of_rank;
  const bool one_node = context.one_node();
  // Between nodes one cell holds the whole result.
  const uint64_t held =
      one_node ? *std::max_element(counts, counts + context.place().size) : operation.count;
  // On one node the small form moves no more bytes than the large one, so it serves all that fits
  // into cells. If blocks may be in reach and need only one copy, the large form pays off earlier.
  const size_t oneshot_bytes = !one_node          ? context.sizes().oneshot_bytes()
                               : context.shares() ? context.sizes().oneshot_bytes() / 2
                                                  : context.sizes().cell_bytes();
  if (held * size <= oneshot_bytes) {
    return one_node ? run_small_on_node(context, operation)
                    : run_small_between_nodes(context, operation);
  }
  if (one_node) {
    const auto shared =
        shared_arguments(context, operation, counts[context.place().rank] * size, 0);
    if (shared) {
      return run_in_place(context, [&] { join_blocks(context, operation, *shared); });
    }
  }
  if (!one_node) return run_between_nodes(context, operation);
  BlockTable table(counts, context.map(), size);
  table.cut(steps_for(held, context.sizes().block_step_bytes() / size, table.line()));
  Stages stages;
  stages.steps = table.steps();
  stages.store = context.stores().into_ring(operation);
  stages.out_store = context.stores().into_output(operation);
  OnNode(context, operation, table, stages).run(operation);
}

void check(const Place& place, const hsgd_call& call) {
  check_type(call.dtype, HSGD_SUM);
  check_gathered(checked_blocks(place, call.counts, call.dtype), call.in, call.out);
}

Operation allgather(const Context& context, const hsgd_call& call) {
  Operation operation = operation_of(context, call);
  operation.counts = {call.counts, context.place().size};
  operation.count = std::accumulate(call.counts, call.counts + context.place().size, uint64_t{0});
  operation.signature = Signature::pack(HSGD_ALLGATHER, call.dtype, HSGD_SUM, 0, operation.count,
                                        hash_label(call.label, operation.counts));
  return operation;
}

}  // namespace

const CollectiveKind kAllgather{check, allgather, run};

void check_gathered(const Blocks& blocks, const void* in, const void* out) {
  check_buffers({in, blocks.own}, {out, blocks.total, blocks.before},
                "this rank's block of the output as input, or");
}

}  // namespace hsgd
