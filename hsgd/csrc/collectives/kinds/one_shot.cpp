// run_one_shot(): sums and copies from cells.
#include "collectives/kinds/one_shot.hpp"

#include <cstring>
#include <vector>

namespace hsgd {
namespace {

void reduce_payloads(Context& context, const Operation& operation, const Range& part, void* out,
                     double divisor) {
  const size_t size = operation.reduction.element_bytes;
  const int ranks = context.place().local_size;
  for (int rank = 0; rank < ranks; ++rank) {
    const void* payload =
        rank == context.place().local_rank
            ? operation.in
            : context.local().payload(rank, context.sequence(), operation.bytes());
    context.inputs()[static_cast<size_t>(rank)] =
        static_cast<const std::byte*>(payload) + part.begin * size;
  }
  at_level(context.record(), &hsgd_record::reduce, [&] {
    operation.reduction.reduce({context.inputs().data(), ranks, out, nullptr, part.count(), divisor,
                                Store::kOrdinary, Store::kOrdinary});
    return true;
  });
  context.intra_bytes() += static_cast<uint64_t>(ranks) * part.count() * size;
}

void copy_result(Context& context, const Operation& operation) {
  const size_t size = operation.reduction.element_bytes;
  const Range part = operation.wanted();
  const std::byte* result =
      context.local().result_payload(context.sequence(), operation.bytes()) + part.begin * size;
  std::memcpy(operation.out, result, part.count() * size);
  context.intra_bytes() += part.count() * size;
}

// Copies the payload of the one node that has it.
size_t pick(const std::vector<Payload>& parts, std::byte* out, bool) {
  for (const Payload& part : parts) {
    if (part.bytes == 0) continue;
    std::memcpy(out, part.data, part.bytes);
    return part.bytes;
  }
  return 0;
}

// Sums groups of nodes in order. 16-bit floats stay float32 until all nodes are in the sum, unless
// that takes one step.
class NodeSums {
 public:
  NodeSums(const Context& context, const Operation& operation)
      : operation_(operation),
        reduction_(operation.reduction),
        widens_(reduction_.widening.active() && !context.rounds().is_direct()) {}

  Payload of_node(const std::byte* sums) {
    if (!widens_) return {sums, operation_.bytes()};
    wide_.resize(operation_.count);
    reduction_.widening.conversion.widen(wide_.data(), sums, operation_.count);
    return {reinterpret_cast<const std::byte*>(wide_.data()), operation_.count * sizeof(float)};
  }

  size_t add(const std::vector<Payload>& parts, std::byte* out, bool is_last) {
    std::vector<const void*> inputs;
    for (const Payload& part : parts) inputs.push_back(part.data);
    const bool narrows = widens_ && is_last;
    const ReduceFn reduce = widens_ ? reduction_.widening.reduce : reduction_.reduce;
    reduce({inputs.data(), static_cast<int>(inputs.size()),
            narrows ? reinterpret_cast<std::byte*>(wide_.data()) : out, nullptr, operation_.count,
            is_last ? reduction_.divisor : 1.0, Store::kOrdinary, Store::kOrdinary});
    if (narrows) reduction_.widening.conversion.narrow(out, wide_.data(), operation_.count);
    return widens_ && !is_last ? operation_.count * sizeof(float) : operation_.bytes();
  }

 private:
  const Operation& operation_;
  const Reduction& reduction_;
  const bool widens_;
  std::vector<float> wide_;
};

Outgoing collect_sums(Context& context, const Operation& operation, NodeSums* sums,
                      std::byte* result) {
  if (operation.bytes() == 0) return {};
  reduce_payloads(context, operation, {0, operation.count}, result, 1.0);
  return {sums->of_node(result),
          [sums](const auto& parts, std::byte* out, bool is_last) {
            return sums->add(parts, out, is_last);
          },
          result,
          {}};
}

Outgoing collect_root(Context& context, const Operation& operation, std::byte* result) {
  if (operation.bytes() == 0) return {};
  const int root = context.local_rank_of(operation.root);
  if (root < 0) return {{}, pick, result, {}};
  const size_t bytes = operation.bytes();
  return {{context.local().payload(root, context.sequence(), bytes), bytes}, pick, result, {}};
}

void run_between_nodes(Context& context, const Operation& operation) {
  const bool broadcasts = operation.root >= 0;
  const bool is_root = operation.root == context.place().rank;
  const size_t bytes = operation.bytes();
  context.open(operation, !broadcasts || is_root ? operation.in : nullptr, bytes);
  if (context.place().leads(1)) {
    NodeSums sums(context, operation);
    std::byte* result = context.local().result_payload(context.sequence(), bytes);
    context.lead([&] {
      return broadcasts ? collect_root(context, operation, result)
                        : collect_sums(context, operation, &sums, result);
    });
  }
  context.wait_for_result();
  if (operation.count > 0 && !is_root) copy_result(context, operation);
}

// Runs the form in which the last rank to open the collective sums for all, so that only this rank
// reads all payloads.
void run_combined(Context& context, const Operation& operation) {
  const size_t bytes = operation.bytes();
  std::byte* result = context.local().result_payload(context.sequence(), bytes);
  context.open(operation, operation.in, bytes, [&] {
    reduce_payloads(context, operation, {0, operation.count}, result, operation.reduction.divisor);
  });
  context.wait_for_headers();
  copy_result(context, operation);
}

// Returns true if one rank sums for all of a large node. If each rank has a core, it sums its own
// slice of a reduce_scatter sooner (benchmarks/simulation/cache_lines.py).
bool one_rank_sums(const Context& context, const Operation& operation) {
  const LocalGroup& local = context.local();
  const bool all_want_all = operation.signature.kind() == HSGD_ALLREDUCE;
  return local.combines() && operation.count > 0 && (all_want_all || local.shares_cores());
}

}  // namespace

bool is_small(const Context& context, const Operation& operation) {
  const StepSizes& sizes = context.sizes();
  const size_t most = operation.signature.kind() == HSGD_ALLREDUCE ? sizes.allreduce_oneshot_bytes()
                                                                   : sizes.oneshot_bytes();
  return operation.count == 0 || operation.bytes() <= most;
}

void run_one_shot_on_node(Context& context, const Operation& operation) {
  const bool broadcasts = operation.root >= 0;
  const bool sends = !broadcasts || operation.root == context.place().rank;
  const size_t bytes = operation.bytes();
  if (!broadcasts && one_rank_sums(context, operation)) return run_combined(context, operation);
  context.open(operation, sends ? operation.in : nullptr, bytes);
  context.wait_for_headers();
  if (operation.count == 0) return;
  if (!broadcasts) {
    reduce_payloads(context, operation, operation.wanted(), operation.out,
                    operation.reduction.divisor);
  } else if (!sends) {
    const int root = context.local_rank_of(operation.root);
    std::memcpy(operation.out, context.local().payload(root, context.sequence(), bytes), bytes);
    context.intra_bytes() += bytes;
  }
}

void run_one_shot(Context& context, const Operation& operation) {
  context.one_node() ? run_one_shot_on_node(context, operation)
                     : run_between_nodes(context, operation);
}

}  // namespace hsgd
