// Work where the data lies, and the allreduce.
#include "collectives/zero_copy.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "base/fault_points.hpp"

namespace hsgd {
namespace {

// Small enough that the outputs of a block are still in the nearest cache when they are copied.
constexpr size_t kBlockBytes = 8 << 10;
// What a rank claims at once: some microseconds of work, so that nobody waits long for the last.
constexpr size_t kClaimBytes = 128 << 10;

}  // namespace

// Others read this rank's input, and may write its output, until they are through as well.
Step DirectWork::step() {
  if (work_) {
    at_level(context_.record, &hsgd_record::reduce, [&] {
      std::exchange(work_, nullptr)();
      return true;
    });
    HSGD_FAULT_POINT("in place: done, not told");
    context_.local.publish(&Progress::gathered, context_.base + 1);
    HSGD_FAULT_POINT("in place: done");
    return Step::kProgress;
  }
  return context_.local.peers_reached(&Progress::gathered, context_.base + 1) ? Step::kDone
                                                                              : Step::kIdle;
}

DirectAllreduce::DirectAllreduce(const PipelineContext& context, const SharedArguments& arguments,
                                 uint64_t count, const Reduction& reduction, bool claims)
    : context_(context),
      arguments_(arguments),
      count_(count),
      reduction_(reduction),
      claims_(claims),
      own_slice_(context,
                 [this] {
                   reduce(part_of(count_, context_.local.size(), context_.local.rank(),
                                  reduction_.element_bytes));
                 }),
      inputs_(arguments.in.size()) {}

Step DirectAllreduce::step() { return claims_ ? claim_parts() : own_slice_.step(); }

Step DirectAllreduce::claim_parts() {
  const uint64_t most = kClaimBytes / reduction_.element_bytes;
  const uint64_t parts = (count_ + most - 1) / most;
  while (const std::optional<uint64_t> part = context_.local.claim(parts)) {
    at_level(context_.record, &hsgd_record::reduce, [&] {
      reduce({*part * most, std::min(count_, (*part + 1) * most)});
      return true;
    });
    HSGD_FAULT_POINT("in place: claimed, not told");
    context_.local.finish_claim(parts);
    HSGD_FAULT_POINT("in place: claim told");
  }
  if (!context_.local.claims_finished(parts)) return Step::kIdle;
  context_.local.end_claims(parts);
  return Step::kDone;
}

void DirectAllreduce::reduce(const Range& part) {
  const uint64_t block = kBlockBytes / reduction_.element_bytes;
  // Two outputs are written in one pass: no blocks are needed then.
  const uint64_t stride = context_.local.size() <= 2 ? std::max<uint64_t>(1, part.count()) : block;
  for (uint64_t begin = part.begin; begin < part.end; begin += stride) {
    reduce_block({begin, std::min(part.end, begin + stride)});
  }
  *context_.intra_bytes +=
      2 * static_cast<uint64_t>(context_.local.size()) * part.count() * reduction_.element_bytes;
}

void DirectAllreduce::reduce_block(const Range& block) {
  const size_t offset = block.begin * reduction_.element_bytes;
  const size_t bytes = block.count() * reduction_.element_bytes;
  const int size = context_.local.size();
  const int rank = context_.local.rank();
  for (int i = 0; i < size; ++i) {
    inputs_[static_cast<size_t>(i)] = arguments_.in[static_cast<size_t>(i)] + offset;
  }
  const auto output = [&](int i) {
    return arguments_.out[static_cast<size_t>((rank + i) % size)] + offset;
  };
  reduction_.reduce({inputs_.data(), size, output(0), size > 1 ? output(1) : nullptr, block.count(),
                     reduction_.divisor, context_.out_store, context_.out_store});
  for (int i = 2; i < size; ++i) {
    reduction_.copy(output(i), output(0), bytes, context_.out_store);
  }
}

}  // namespace hsgd
