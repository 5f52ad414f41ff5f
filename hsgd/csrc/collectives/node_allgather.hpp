// A large allgather between nodes.
//
// A rank stages its part of each step in the out ring of its node, whose leaders pass on what lies
// there and receive the parts of the other nodes beside it; then each rank copies all of the step.
// Each byte crosses a link once per node that needs it, and inside a node costs 2 accesses and 2
// for each rank. However many ranks there are, a step has no place for each: it takes the memory of
// an allreduce.
#ifndef HSGD_COLLECTIVES_NODE_ALLGATHER_HPP_
#define HSGD_COLLECTIVES_NODE_ALLGATHER_HPP_

#include "context/context.hpp"

namespace hsgd {

// Collective over all ranks, blocking; throws what waiting throws.
void allgather_between_nodes(Context& context, const Operation& operation);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_NODE_ALLGATHER_HPP_
