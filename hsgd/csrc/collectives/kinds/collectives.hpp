// CollectiveKind: the collectives, each defined in its own file.
//
// Each checks its arguments, describes the operation, and chooses its form (one-shot, in place,
// chunk pipeline) by size and by the memory of the arguments; the choice is the same on all ranks.
#ifndef HSGD_COLLECTIVES_KINDS_COLLECTIVES_HPP_
#define HSGD_COLLECTIVES_KINDS_COLLECTIVES_HPP_

#include "collectives/context/context.hpp"

namespace hsgd {

struct CollectiveKind {
  // Checks the call on this rank alone. Throws HSGD_ERR_ARGUMENT.
  void (*check)(const Place& place, const hsgd_call& call);
  // Returns the operation of a call, on this rank alone. The call outlives it.
  Operation (*operation)(const Context& context, const hsgd_call& call);
  // Runs the operation with all ranks of the context, at least two; blocks. Throws the errors of
  // waiting (collectives/context/context.hpp), and MismatchError if ranks called different things,
  // before any data has moved.
  void (*run)(Context& context, const Operation& operation);
};

extern const CollectiveKind kAllreduce;
extern const CollectiveKind kBroadcast;
extern const CollectiveKind kBarrier;
extern const CollectiveKind kReduceScatter;
extern const CollectiveKind kAllgather;
extern const CollectiveKind kAlltoall;

// Returns a kind; the table is in the order of hsgd_kind. nullptr: a kind made of two collectives
// (collectives/queue/call_table.cpp), or an unknown one.
inline const CollectiveKind* kind_of(hsgd_kind kind) {
  static constexpr const CollectiveKind* kKinds[] = {
      &kAllreduce, &kBroadcast, &kBarrier, &kReduceScatter, &kAllgather, &kAlltoall,
  };
  constexpr size_t kCount = sizeof kKinds / sizeof *kKinds;
  static_assert(kCount == HSGD_ALLTOALL + 1, "those that are made of others come after all");
  return static_cast<size_t>(kind) < kCount ? kKinds[kind] : nullptr;
}

// Runs an allreduce of this node's ranks alone with the current tuning; for measuring.
void allreduce_on_node(Context& context, const Operation& operation);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_COLLECTIVES_HPP_
