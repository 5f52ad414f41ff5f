// Allreduce on a node whose ranks outnumber its cores.
//
// Owns the division of the sums among the ranks that run: nobody waits for a rank that has to get a
// core first, only to have its slice.
#ifndef HSGD_COLLECTIVES_CLAIMED_ALLREDUCE_HPP_
#define HSGD_COLLECTIVES_CLAIMED_ALLREDUCE_HPP_

#include "collectives/zero_copy.hpp"
#include "context/context.hpp"

namespace hsgd {

// Of private buffers: step by step all ranks stage their inputs, whoever runs sums parts of the
// step, and all copy the result. Opens the collective.
void reduce_staged_claimed(Context& context, const Operation& operation);

// Of buffers that all ranks of the node can reach; the collective is open, and all agree.
void reduce_in_place_claimed(Context& context, const Operation& operation,
                             const SharedArguments& arguments);

// One part of the latter: sums `part` of all inputs into all outputs.
void reduce_part(Context& context, const Operation& operation, const SharedArguments& arguments,
                 const Range& part);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CLAIMED_ALLREDUCE_HPP_
