// Sums and copies from cells.
#include "collectives/one_shot.hpp"

#include <cstring>

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

// What local rank 0 sends to the other nodes; sums lie in `result`.
Outgoing collect(Context& context, const Operation& operation, int root_node, std::byte* result) {
  const size_t bytes = operation.bytes();
  if (bytes == 0) return {};
  if (root_node < 0) {
    reduce_payloads(context, operation, {0, operation.count}, result, 1.0);
    return {result, bytes, {}};
  }
  if (root_node != context.place().node_rank) return {};
  const int root = context.local_rank_of(operation.root);
  return {context.local().payload(root, context.sequence(), bytes), bytes, {}};
}

void combine(Context& context, const Operation& operation, int root_node, std::byte* result) {
  if (operation.bytes() == 0) return;
  const HeaderExchange& headers = context.links().headers();
  if (root_node >= 0) {
    std::memcpy(result, headers.payload(root_node), operation.bytes());
    return;
  }
  const int nodes = context.place().node_count;
  for (int node = 0; node < nodes; ++node) {
    context.inputs()[static_cast<size_t>(node)] = headers.payload(node);
  }
  operation.reduction.reduce({context.inputs().data(), nodes, result, nullptr, operation.count,
                              operation.reduction.divisor, Store::kOrdinary, Store::kOrdinary});
}

void run_between_nodes(Context& context, const Operation& operation) {
  const bool broadcasts = operation.root >= 0;
  const bool is_root = operation.root == context.place().rank;
  const size_t bytes = operation.bytes();
  context.open(operation, !broadcasts || is_root ? operation.in : nullptr, bytes);
  if (context.place().local_rank == 0) {
    const int root_node = broadcasts ? context.node_of(operation.root) : -1;
    std::byte* result = context.local().result_payload(context.sequence(), bytes);
    context.lead([&] { return collect(context, operation, root_node, result); },
                 [&] { combine(context, operation, root_node, result); });
  }
  context.wait_for_result();
  if (operation.count == 0 || is_root) return;
  const size_t size = operation.reduction.element_bytes;
  const Range part = operation.wanted();
  std::memcpy(operation.out,
              context.local().result_payload(context.sequence(), bytes) + part.begin * size,
              part.count() * size);
  context.intra_bytes() += part.count() * size;
}

}  // namespace

bool is_small(const Context& context, const Operation& operation) {
  return operation.count == 0 || operation.bytes() <= context.sizes().oneshot_bytes();
}

void run_one_shot_on_node(Context& context, const Operation& operation) {
  const bool broadcasts = operation.root >= 0;
  const bool sends = !broadcasts || operation.root == context.place().rank;
  const size_t bytes = operation.bytes();
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
