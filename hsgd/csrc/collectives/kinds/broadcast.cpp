// kBroadcast: copies the root's data to all ranks.
//
// The root stages its data once, and all ranks of its node copy it. Between nodes leader k of each
// node receives part k of a step in the node's out ring and sends it on.
#include <algorithm>

#include "collectives/kinds/arguments.hpp"
#include "collectives/kinds/chunk_pipeline.hpp"
#include "collectives/kinds/collectives.hpp"
#include "collectives/kinds/one_shot.hpp"
#include "collectives/kinds/zero_copy.hpp"
#include "core/base/dtypes.hpp"
#include "core/base/error.hpp"

namespace hsgd {
namespace {

class BroadcastPipeline final : public ChunkPipeline {
 public:
  // `root`: local rank of the root, or -1 if it is on another node.
  BroadcastPipeline(Context& context, const Operation& operation, const Chunking& chunking,
                    const Stages& stages, int root, BroadcastSteps* copies)
      : ChunkPipeline(context, stages),
        data_(static_cast<std::byte*>(operation.out)),
        chunking_(chunking),
        element_bytes_(operation.reduction.element_bytes),
        copy_(operation.reduction.copy),
        root_(root),
        copies_(copies) {
    if (copies_ != nullptr) copies_->start(context.node_of(operation.root));
  }

 private:
  // Returns true if all ranks of the node have copied the slot and all leaders have sent it.
  bool may_stage(uint64_t step) const override {
    if (!peers_freed(&Progress::gathered, step) || !earlier_is_sent(step)) return false;
    for (int lane = 0; lane < stages_.leaders; ++lane) {
      const bool freed = lane == this->lane()
                             ? step < exchanged() + context_.slots()
                             : rank_freed(leader(lane), &Progress::exchanged, step);
      if (!freed) return false;
    }
    return true;
  }

  void stage(uint64_t step, std::byte* slot, Permission) override {
    const Range chunk = chunking_.chunk(step);
    copy(slot, data_ + chunk.begin * element_bytes_, chunk, stages_.store);
  }

  // Returns true if all ranks of the node have copied the earlier step that receiving overwrites.
  bool may_exchange(uint64_t step) const override {
    if (step >= copies_->finished() + context_.slots()) return false;
    if (!copies_->is_root()) {
      return step < gathered() + context_.slots() && peers_freed(&Progress::gathered, step);
    }
    return root_ == local().rank() ? step < staged() : rank_reached(root_, &Progress::staged, step);
  }

  void begin_exchange(uint64_t step) override {
    const Range own =
        part_of(chunking_.chunk(step).count(), stages_.leaders, lane(), element_bytes_);
    copies_->begin(slot(step) + own.begin * element_bytes_, own.count() * element_bytes_);
  }

  bool may_gather(uint64_t step) const override {
    if (root_ >= 0) return rank_reached(root_, &Progress::staged, step);
    return leaders_reached(step);
  }

  void gather(uint64_t step) override {
    const Range chunk = chunking_.chunk(step);
    copy(data_ + chunk.begin * element_bytes_, slot(step), chunk, stages_.out_store);
  }

  void copy(std::byte* to, const std::byte* from, const Range& chunk, Store store) {
    copy_(to, from, chunk.count() * element_bytes_, store);
    context_.intra_bytes() += chunk.count() * element_bytes_;
  }

  // Returns the place of a step on this node: the root's in ring, or the ring in which leaders
  // received it.
  std::byte* slot(uint64_t step) const {
    return root_ >= 0 ? in_slot(root_, step) : out_slot(0, step);
  }

  std::byte* data_;
  const Chunking chunking_;
  const size_t element_bytes_;  // of an element
  const CopyFn copy_;
  const int root_;
  BroadcastSteps* copies_;  // on leaders
};

// Copies this rank's part from the root's buffer into those of all others.
void copy_part(Context& context, const Operation& operation, const SharedArguments& arguments) {
  const int size = context.place().local_size;
  const Range part = part_of(operation.bytes(), size, context.place().local_rank, 1);
  const int root = context.local_rank_of(operation.root);
  const std::byte* from = arguments.out[static_cast<size_t>(root)];
  for (size_t begin = part.begin; begin < part.end; begin += kCacheBlockBytes) {
    const size_t length = std::min<size_t>(kCacheBlockBytes, part.end - begin);
    for (int i = 0; i < size; ++i) {
      const int to = in_turn(context, i);
      if (to == root) continue;
      context.copy()(arguments.out[static_cast<size_t>(to)] + begin, from + begin, length,
                     Store::kOrdinary);
    }
  }
  context.intra_bytes() += static_cast<uint64_t>(size) * part.count();
}

void run(Context& context, const Operation& operation) {
  if (is_small(context, operation)) return run_one_shot(context, operation);
  const size_t bytes = operation.bytes();
  if (context.one_node()) {
    const auto shared = shared_arguments(context, operation, bytes, bytes);
    if (shared) {
      return run_in_place(context, [&] { copy_part(context, operation, *shared); });
    }
  }
  const WirePlan plan = context.sizes().broadcast_plan(bytes);
  const Chunking chunking(operation.count, operation.reduction.element_bytes, plan.step_bytes);
  const bool is_root = operation.root == context.place().rank;
  Stages stages;
  stages.steps = chunking.steps;
  stages.leaders = plan.leaders;
  if (!is_root) stages.staging = Stages::Staging::kNothing;
  stages.gathers = !is_root;
  const bool leads = context.place().leads(plan.leaders);
  BroadcastSteps* copies = leads ? context.links().copies(plan.form) : nullptr;
  stages.window = copies;
  stages.store = context.stores().into_ring(operation);
  stages.out_store = context.stores().into_output(operation);
  BroadcastPipeline(context, operation, chunking, stages, context.local_rank_of(operation.root),
                    copies)
      .run(operation);
}

void check(const Place& place, const hsgd_call& call) {
  check_type(call.dtype, HSGD_SUM);
  const uint64_t bytes = checked_bytes(call.count, call.dtype);
  check_buffers({call.out, bytes}, {call.out, bytes}, "one");
  if (call.root < 0 || call.root >= place.size || call.root > kMaxRoot) {
    throw_error(HSGD_ERR_ARGUMENT, call.root, "broadcast: root %d is not a rank; ranks are 0 to %d",
                call.root, place.size - 1);
  }
}

Operation broadcast(const Context& context, const hsgd_call& call) {
  Operation operation = operation_of(context, call);
  operation.signature = Signature::pack(HSGD_BROADCAST, call.dtype, HSGD_SUM, call.root, call.count,
                                        hash_label(call.label));
  operation.in = call.out;
  operation.count = call.count;
  operation.root = call.root;
  return operation;
}

}  // namespace

const CollectiveKind kBroadcast{check, broadcast, run};

}  // namespace hsgd
