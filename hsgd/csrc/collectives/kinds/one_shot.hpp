// Small payloads: one synchronization, in which each rank's payload travels beside its header.
//
// Owns the form of allreduce, broadcast, barrier and reduce_scatter that takes the whole payload at
// once. Inside a node everybody reads everybody's cell; between nodes the first leader sends what
// its node has together with the headers.
#ifndef HSGD_COLLECTIVES_KINDS_ONE_SHOT_HPP_
#define HSGD_COLLECTIVES_KINDS_ONE_SHOT_HPP_

#include "collectives/context/context.hpp"

namespace hsgd {

bool is_small(const Context& context, const Operation& operation);
void run_one_shot(Context& context, const Operation& operation);
// The same over the ranks of this node, whatever others there are.
void run_one_shot_on_node(Context& context, const Operation& operation);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_ONE_SHOT_HPP_
