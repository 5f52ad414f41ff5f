// The collectives: each is a kind, in a file of its own, that all ranks call alike.
//
// Each checks its arguments, says what is to be done, and chooses between its forms by size and by
// where the arguments lie (one-shot, in place, chunk pipeline), the same on all ranks.
#ifndef HSGD_COLLECTIVES_KINDS_COLLECTIVES_HPP_
#define HSGD_COLLECTIVES_KINDS_COLLECTIVES_HPP_

#include "collectives/context/context.hpp"

namespace hsgd {

struct CollectiveKind {
  // Local. Throws HSGD_ERR_ARGUMENT.
  void (*check)(const Place& place, const hsgd_call& call);
  // Local. The call outlives it.
  Operation (*operation)(const Context& context, const hsgd_call& call);
  // Collective over all ranks of the context, of which there are at least two; blocking. Throws
  // what waiting throws (collectives/context/context.hpp), and MismatchError when ranks called
  // different things, before any data has moved.
  void (*run)(Context& context, const Operation& operation);
};

extern const CollectiveKind kAllreduce;
extern const CollectiveKind kBroadcast;
extern const CollectiveKind kBarrier;
extern const CollectiveKind kReduceScatter;
extern const CollectiveKind kAllgather;
extern const CollectiveKind kAlltoall;

// In the order of hsgd_kind. nullptr: not one by itself, but made of others
// (collectives/queue/call_table.cpp), or none at all.
inline const CollectiveKind* kind_of(hsgd_kind kind) {
  static constexpr const CollectiveKind* kKinds[] = {
      &kAllreduce, &kBroadcast, &kBarrier, &kReduceScatter, &kAllgather, &kAlltoall,
  };
  constexpr size_t kCount = sizeof kKinds / sizeof *kKinds;
  static_assert(kCount == HSGD_ALLTOALL + 1, "those that are made of others come after all");
  return static_cast<size_t>(kind) < kCount ? kKinds[kind] : nullptr;
}

// An allreduce of the ranks of this node alone, with the tuning at hand; for measuring.
void allreduce_on_node(Context& context, const Operation& operation);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_COLLECTIVES_HPP_
