// run_one_shot(): moves small payloads with one synchronization; each rank's payload travels beside
// its header.
//
// Serves allreduce, broadcast, barrier and reduce_scatter. Inside a node each rank reads all cells;
// between nodes the first leader sends its node's payload together with the headers.
#ifndef HSGD_COLLECTIVES_KINDS_ONE_SHOT_HPP_
#define HSGD_COLLECTIVES_KINDS_ONE_SHOT_HPP_

#include "collectives/context/context.hpp"

namespace hsgd {

bool is_small(const Context& context, const Operation& operation);
void run_one_shot(Context& context, const Operation& operation);
// Runs the same over the ranks of this node only.
void run_one_shot_on_node(Context& context, const Operation& operation);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_ONE_SHOT_HPP_
