// Parts are claimed one by one, until all are done.
#include "collectives/claimed_allreduce.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/fault_points.hpp"
#include "collectives/chunk_pipeline.hpp"

namespace hsgd {
namespace {

// Calls work(part) for those of `parts` that this rank gets, and waits for the others.
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

// Steps of private buffers. The sums lie where local rank 0 has staged its input: a rank then finds
// all of a step in one place.
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
    // Some microseconds of work, so that nobody waits long for the last part.
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

}  // namespace

void reduce_part(Context& context, const Operation& operation, const SharedArguments& arguments,
                 const Range& part) {
  constexpr size_t kBlockBytes = kCacheBlockBytes / 2;  // several outputs are copied from one
  const size_t size = operation.reduction.element_bytes;
  const auto ranks = static_cast<uint64_t>(context.place().local_size);
  // Two outputs are written in one pass: no blocks are needed then.
  const uint64_t stride = ranks <= 2 ? std::max<uint64_t>(1, part.count()) : kBlockBytes / size;
  for (uint64_t begin = part.begin; begin < part.end; begin += stride) {
    reduce_block(context, operation, arguments, {begin, std::min(part.end, begin + stride)});
  }
  context.intra_bytes() += 2 * ranks * part.count() * size;
}

void reduce_in_place_claimed(Context& context, const Operation& operation,
                             const SharedArguments& arguments) {
  // Some microseconds of work, so that nobody waits long for the last part.
  constexpr size_t kClaimBytes = 128 << 10;
  const uint64_t most = kClaimBytes / operation.reduction.element_bytes;
  const uint64_t parts = (operation.count + most - 1) / most;
  do_claimed(context, parts, [&](uint64_t part) {
    reduce_part(context, operation, arguments,
                {part * most, std::min(operation.count, (part + 1) * most)});
  });
  context.finish_steps(1);
}

void reduce_staged_claimed(Context& context, const Operation& operation) {
  StagedSteps steps(context, operation);
  // As in ChunkPipeline::open().
  const bool stages_first = !context.is_open();
  if (stages_first) {
    steps.stage(0);
    open_in_private(context, operation);
  }
  context.wait_for_headers();
  for (uint64_t step = 0; step < steps.count(); ++step) {
    if (step > 0 || !stages_first) steps.stage(step);
    steps.reduce(step);
    steps.gather(step);
  }
  context.finish_steps(steps.count());
}

}  // namespace hsgd
