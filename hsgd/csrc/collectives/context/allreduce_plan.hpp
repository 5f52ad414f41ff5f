// plan_allreduce(): computes the sizes and rounds of an allreduce on a cluster that need not exist.
//
// Never communicates and never predicts times.
#ifndef HSGD_COLLECTIVES_CONTEXT_ALLREDUCE_PLAN_HPP_
#define HSGD_COLLECTIVES_CONTEXT_ALLREDUCE_PLAN_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

// Plans a float32 sum. Throws Error if the numbers describe no valid cluster.
hsgd_allreduce_plan plan_allreduce(const hsgd_options& options, int nodes, int ranks_per_node,
                                   uint64_t bytes);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_ALLREDUCE_PLAN_HPP_
