// kAllreduce and kBarrier: a barrier is an allreduce of no elements.
//
// Inside a node the pipeline moves (5 - 2/L) bytes per byte of payload for L ranks: a rank stages
// all but its own slice, reduces its slice from the others' slots and its own buffer, and copies
// the other slices of the result. In place it moves 2 S bytes per rank. If ranks outnumber cores,
// any running rank computes the next part of the sums.
#include <algorithm>
#include <optional>

#include "collectives/kinds/arguments.hpp"
#include "collectives/kinds/chunk_pipeline.hpp"
#include "collectives/kinds/collectives.hpp"
#include "collectives/kinds/one_shot.hpp"
#include "collectives/kinds/zero_copy.hpp"
#include "core/base/dtypes.hpp"
#include "core/base/fault_points.hpp"

namespace hsgd {
namespace {

class AllreducePipeline final : public ChunkPipeline {
 public:
  // `shared`: the inputs of all ranks of the node, by local rank, if they are in reach.
  AllreducePipeline(Context& context, const Operation& operation, const Chunking& chunking,
                    const Stages& stages, const std::vector<const std::byte*>* shared)
      : ChunkPipeline(context, stages),
        in_(static_cast<const std::byte*>(operation.in)),
        out_(static_cast<std::byte*>(operation.out)),
        chunking_(chunking),
        reduction_(operation.reduction),
        element_bytes_(reduction_.element_bytes),
        slices_(stages.window != nullptr ? context.links().slices() : nullptr),
        shared_(shared) {
    if (slices_ != nullptr) slices_->start(reduction_);
  }

 private:
  void stage(uint64_t step, std::byte* slot, Permission) override {
    const Range chunk = chunking_.chunk(step);
    const Range own = slice(chunk, local().rank());
    reduction_.copy(slot, in_ + chunk.begin * element_bytes_,
                    (own.begin - chunk.begin) * element_bytes_, stages_.store);
    reduction_.copy(slot + (own.end - chunk.begin) * element_bytes_, in_ + own.end * element_bytes_,
                    (chunk.end - own.end) * element_bytes_, stages_.store);
    context_.intra_bytes() += (chunk.count() - own.count()) * element_bytes_;
  }

  void reduce(uint64_t step) override {
    const Range chunk = chunking_.chunk(step);
    const Range own = slice(chunk, local().rank());
    if (own.count() == 0) return;
    std::vector<const void*>& inputs = context_.inputs();
    for (int rank = 0; rank < local().size(); ++rank) {
      inputs[static_cast<size_t>(rank)] =
          shared_ != nullptr ? (*shared_)[static_cast<size_t>(rank)] + own.begin * element_bytes_
          : rank == local().rank()
              ? in_ + own.begin * element_bytes_
              : in_slot(rank, step) + (own.begin - chunk.begin) * element_bytes_;
    }
    const bool final = stages_.leaders == 0;
    reduction_.reduce({inputs.data(), local().size(),
                       reduced_slice(local().rank(), step, chunk, own),
                       final ? out_ + own.begin * element_bytes_ : nullptr, own.count(),
                       final ? reduction_.divisor : 1.0, stages_.store, stages_.out_store});
    context_.intra_bytes() += static_cast<uint64_t>(local().size()) * own.count() * element_bytes_;
  }

  void begin_exchange(uint64_t step) override {
    const Range own =
        part_of(chunking_.chunk(step).count(), stages_.leaders, lane(), element_bytes_);
    slices_->begin(out_slot(0, step) + own.begin * element_bytes_, own.count());
  }

  void gather(uint64_t step) override {
    const Range chunk = chunking_.chunk(step);
    if (stages_.leaders > 0) return copy_out(chunk, out_slot(0, step));
    for (int i = 1; i < local().size(); ++i) {
      const int peer = (local().rank() + i) % local().size();  // each starts at another rank
      const Range part = slice(chunk, peer);
      copy_out(part, reduced_slice(peer, step, chunk, part));
    }
  }

  void copy_out(const Range& part, const std::byte* from) {
    const size_t bytes = part.count() * element_bytes_;
    reduction_.copy(out_ + part.begin * element_bytes_, from, bytes, stages_.out_store);
    context_.intra_bytes() += bytes;
  }

  Range slice(const Range& chunk, int rank) const {
    const Range part = part_of(chunk.count(), local().size(), rank, element_bytes_);
    return {chunk.begin + part.begin, chunk.begin + part.end};
  }

  // Returns the place for `rank`'s sum of its `slice` of `chunk`: over the input that the next rank
  // staged, which only `rank` reads. Those lines are in its cache, and two ranks pass them to and
  // fro; in a ring of its own the sum took up to 1.8 times as long (docs/performance.md). Between
  // nodes the sum goes to its place in the node's only out ring, so that a leader finds a
  // contiguous piece to send.
  std::byte* reduced_slice(int rank, uint64_t step, const Range& chunk, const Range& slice) const {
    std::byte* slot =
        stages_.sums_in_ring() ? in_slot((rank + 1) % local().size(), step) : out_slot(0, step);
    return slot + (slice.begin - chunk.begin) * element_bytes_;
  }

  const std::byte* in_;
  std::byte* out_;
  const Chunking chunking_;
  const Reduction& reduction_;
  const size_t element_bytes_;  // of an element
  SliceAllreduce* slices_;
  const std::vector<const std::byte*>* shared_;
};

Stages stages_of(Context& context, const Operation& operation, uint64_t steps, int leaders) {
  Stages stages;
  stages.steps = steps;
  stages.leaders = leaders;
  stages.reduces = true;
  if (context.place().leads(leaders)) stages.window = context.links().slices();
  stages.store = context.stores().usual();
  stages.out_store = context.stores().into_output(operation);
  return stages;
}

// parts that ranks claim one by one, if ranks outnumber cores

// Calls work(part) for the parts that this rank claims, and waits for the others.
template <class Work>
void do_claimed(Context& context, uint64_t parts, Work&& work) {
  context.wait_until([&] {
    while (const std::optional<uint64_t> part = context.local().claim(parts)) {
      at_level(context.record(), &hsgd_record::reduce, [&] {
        work(*part);
        return true;
      });
      HSGD_FAULT_POINT("claimed: done, not told");
      context.local().finish_claim(parts);
      HSGD_FAULT_POINT("claimed: told");
    }
    return context.local().claims_finished(parts);
  });
  context.local().end_claims(parts);
}

void reduce_block(Context& context, const Operation& operation, const SharedArguments& arguments,
                  const Range& block) {
  const Reduction& reduction = operation.reduction;
  const size_t offset = block.begin * reduction.element_bytes;
  const int size = context.place().local_size;
  const Store store = context.stores().into_output(operation);
  std::vector<const void*>& inputs = context.inputs();
  for (int i = 0; i < size; ++i) {
    inputs[static_cast<size_t>(i)] = arguments.in[static_cast<size_t>(i)] + offset;
  }
  const auto output = [&](int i) {
    return arguments.out[static_cast<size_t>((context.place().local_rank + i) % size)] + offset;
  };
  reduction.reduce({inputs.data(), size, output(0), size > 1 ? output(1) : nullptr, block.count(),
                    reduction.divisor, store, store});
  for (int i = 2; i < size; ++i) {
    reduction.copy(output(i), output(0), block.count() * reduction.element_bytes, store);
  }
}

// The steps for private buffers. The sums overwrite the staged input of local rank 0, so that a
// rank finds all of a step in one place.
class StagedSteps {
 public:
  StagedSteps(Context& context, const Operation& operation)
      : context_(context),
        operation_(operation),
        element_bytes_(operation.reduction.element_bytes),
        chunking_(operation.count, element_bytes_, context.sizes().node_step_bytes()) {}

  uint64_t count() const { return chunking_.steps; }

  void stage(uint64_t step) {
    LocalGroup& local = context_.local();
    const uint64_t at = context_.base() + step;
    context_.wait_until(
        [&] { return local.peers_freed(&Progress::gathered, at, context_.slots()); });
    copy(&hsgd_record::reduce, local.in_slot(local.rank(), at), in(step), step,
         context_.stores().into_ring(operation_));
    HSGD_FAULT_POINT("claimed: staged, not told");
    local.publish(&Progress::staged, at + 1, LocalGroup::Audience::kSome);
  }

  void reduce(uint64_t step) {
    LocalGroup& local = context_.local();
    const uint64_t at = context_.base() + step;
    context_.wait_until([&] { return local.peers_reached(&Progress::staged, at + 1); });
    // Some microseconds of work, so that no rank waits long for the last part.
    constexpr size_t kReadBytes = 1 << 20;
    const size_t part_bytes = std::clamp<size_t>(
        kReadBytes / static_cast<size_t>(local.size()) / kLine * kLine, 4 << 10, 32 << 10);
    const uint64_t most = part_bytes / element_bytes_;
    const uint64_t elements = chunking_.chunk(step).count();
    do_claimed(context_, (elements + most - 1) / most, [&](uint64_t part) {
      reduce_part(at, {part * most, std::min(elements, (part + 1) * most)});
    });
  }

  void gather(uint64_t step) {
    LocalGroup& local = context_.local();
    const uint64_t at = context_.base() + step;
    auto* out =
        static_cast<std::byte*>(operation_.out) + chunking_.chunk(step).begin * element_bytes_;
    copy(&hsgd_record::gather, out, local.in_slot(0, at), step,
         context_.stores().into_output(operation_));
    HSGD_FAULT_POINT("claimed: gathered, not told");
    local.publish(&Progress::gathered, at + 1);
  }

 private:
  const std::byte* in(uint64_t step) const {
    return static_cast<const std::byte*>(operation_.in) +
           chunking_.chunk(step).begin * element_bytes_;
  }

  void copy(hsgd_span hsgd_record::* level, std::byte* to, const std::byte* from, uint64_t step,
            Store store) {
    const size_t bytes = chunking_.chunk(step).count() * element_bytes_;
    at_level(context_.record(), level, [&] {
      operation_.reduction.copy(to, from, bytes, store);
      return true;
    });
    context_.intra_bytes() += bytes;
  }

  void reduce_part(uint64_t at, const Range& part) {
    LocalGroup& local = context_.local();
    std::vector<const void*>& inputs = context_.inputs();
    for (int rank = 0; rank < local.size(); ++rank) {
      inputs[static_cast<size_t>(rank)] = local.in_slot(rank, at) + part.begin * element_bytes_;
    }
    operation_.reduction.reduce(
        {inputs.data(), local.size(), local.in_slot(0, at) + part.begin * element_bytes_, nullptr,
         part.count(), operation_.reduction.divisor, Store::kOrdinary, Store::kOrdinary});
    context_.intra_bytes() += static_cast<uint64_t>(local.size()) * part.count() * element_bytes_;
  }

  Context& context_;
  const Operation& operation_;
  const size_t element_bytes_;
  const Chunking chunking_;
};

void reduce_part(Context& context, const Operation& operation, const SharedArguments& arguments,
                 const Range& part) {
  constexpr size_t kBlockBytes = kCacheBlockBytes / 2;  // several outputs are copied from one block
  const size_t size = operation.reduction.element_bytes;
  const auto ranks = static_cast<uint64_t>(context.place().local_size);
  // Two outputs are written in one pass, without blocks.
  const uint64_t stride = ranks <= 2 ? std::max<uint64_t>(1, part.count()) : kBlockBytes / size;
  for (uint64_t begin = part.begin; begin < part.end; begin += stride) {
    reduce_block(context, operation, arguments, {begin, std::min(part.end, begin + stride)});
  }
  context.intra_bytes() += 2 * ranks * part.count() * size;
}

// Reduces in place on buffers that all ranks of the node can reach; the collective is open, and all
// agree.
void reduce_in_place_claimed(Context& context, const Operation& operation,
                             const SharedArguments& arguments) {
  // Some microseconds of work, so that no rank waits long for the last part.
  constexpr size_t kClaimBytes = 128 << 10;
  const uint64_t most = kClaimBytes / operation.reduction.element_bytes;
  const uint64_t parts = (operation.count + most - 1) / most;
  do_claimed(context, parts, [&](uint64_t part) {
    reduce_part(context, operation, arguments,
                {part * most, std::min(operation.count, (part + 1) * most)});
  });
  context.finish_steps(1);
}

// Opens the collective and reduces private buffers step by step: all ranks stage their inputs,
// running ranks sum parts of the step, and all copy the result. No rank waits for the slice of a
// rank that has no core yet.
void reduce_staged_claimed(Context& context, const Operation& operation) {
  StagedSteps steps(context, operation);
  // Stages first, as ChunkPipeline::open() does.
  const bool stages_first = !context.is_open();
  if (stages_first) {
    steps.stage(0);
    open_in_private(context, operation);
  }
  context.wait_for_headers();
  if (!stages_first) steps.stage(0);
  for (uint64_t step = 0; step < steps.count(); ++step) {
    // One step ahead: when a rank gets its turn, most ranks have staged the inputs of its sums.
    if (step + 1 < steps.count()) steps.stage(step + 1);
    steps.reduce(step);
    steps.gather(step);
  }
  context.finish_steps(steps.count());
}

// --- in place, on one node ---

void reduce_in_place(Context& context, const Operation& operation,
                     const SharedArguments& arguments) {
  const Place& place = context.place();
  if (context.local().shares_cores()) return reduce_in_place_claimed(context, operation, arguments);
  run_in_place(context, [&] {
    reduce_part(context, operation, arguments,
                part_of(operation.count, place.local_size, place.local_rank,
                        operation.reduction.element_bytes));
  });
}

// `shared`: the buffers of all ranks of the node, if they are in reach.
void reduce_chunks(Context& context, const Operation& operation,
                   const std::optional<SharedArguments>& shared) {
  const WirePlan plan = context.sizes().wire_plan(operation.bytes());
  const Chunking chunking(operation.count, operation.reduction.element_bytes, plan.step_bytes);
  Stages stages = stages_of(context, operation, chunking.steps, plan.leaders);
  if (shared) {
    stages.staging = Stages::Staging::kInReach;
  } else {
    stages.store = context.stores().into_ring(operation);
  }
  AllreducePipeline(context, operation, chunking, stages, shared ? &shared->in : nullptr)
      .run(operation);
}

// Returns true if ranks claim parts of the sums instead of having fixed slices: on one node, if
// ranks take turns on cores. In several steps only many ranks do: claiming is up to a quarter
// faster with a dozen ranks, and no faster with a few.
bool shares_out_sums(const Context& context, const Operation& operation) {
  const LocalGroup& local = context.local();
  const bool one_step = operation.bytes() <= context.sizes().node_step_bytes();
  return context.one_node() && local.shares_cores() && (one_step || local.combines());
}

void run(Context& context, const Operation& operation) {
  if (is_small(context, operation)) return run_one_shot(context, operation);
  const size_t bytes = operation.bytes();
  const auto shared = shared_arguments(context, operation, bytes, bytes);
  if (shared && context.one_node()) return reduce_in_place(context, operation, *shared);
  if (shares_out_sums(context, operation)) return reduce_staged_claimed(context, operation);
  reduce_chunks(context, operation, shared);
}

void check(const Place&, const hsgd_call& call) {
  check_type(call.dtype, call.op);
  const uint64_t bytes = checked_bytes(call.count, call.dtype);
  check_buffers({call.in, bytes}, {call.out, bytes}, "the same buffer or");
}

Operation allreduce(const Context& context, const hsgd_call& call) {
  Operation operation = reduction_of(context, call);
  operation.signature =
      Signature::pack(HSGD_ALLREDUCE, call.dtype, call.op, 0, call.count, hash_label(call.label));
  operation.count = call.count;
  return operation;
}

Operation barrier(const Context& context, const hsgd_call&) {
  Operation operation;
  operation.signature = Signature::pack(HSGD_BARRIER, HSGD_UINT8, HSGD_SUM, 0, 0, 0);
  operation.reduction = {select_reduce(HSGD_UINT8, HSGD_SUM, context.isa()), context.copy(), 1,
                         1.0};
  return operation;
}

}  // namespace

const CollectiveKind kAllreduce{check, allreduce, run};
const CollectiveKind kBarrier{[](const Place&, const hsgd_call&) {}, barrier, run};

void allreduce_on_node(Context& context, const Operation& operation) {
  if (is_small(context, operation)) return run_one_shot_on_node(context, operation);
  const Chunking chunking(operation.count, operation.reduction.element_bytes,
                          context.sizes().node_step_bytes());
  Stages stages = stages_of(context, operation, chunking.steps, 0);
  stages.store = context.sizes().tuning().store;  // the store of the compared tuning
  stages.out_store = Store::kOrdinary;
  AllreducePipeline(context, operation, chunking, stages, nullptr).run_on_node(operation);
}

}  // namespace hsgd
