// What an allreduce would do on a cluster that is not here.
//
// Owns the putting together of sizes and rounds. Never communicates and never predicts times.
#ifndef HSGD_COLLECTIVES_CONTEXT_ALLREDUCE_PLAN_HPP_
#define HSGD_COLLECTIVES_CONTEXT_ALLREDUCE_PLAN_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

// For a float32 sum. Throws Error where the numbers are none of a cluster.
hsgd_allreduce_plan plan_allreduce(const hsgd_options& options, int nodes, int ranks_per_node,
                                   uint64_t bytes);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_ALLREDUCE_PLAN_HPP_
