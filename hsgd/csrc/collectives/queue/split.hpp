// split(): creates communicators of some ranks of a communicator, with its own collectives.
//
// One node only: between nodes the MPI communicator is split instead. No rank waits for one that
// cannot take part: the ranks exchange their readiness before they meet.
#ifndef HSGD_COLLECTIVES_QUEUE_SPLIT_HPP_
#define HSGD_COLLECTIVES_QUEUE_SPLIT_HPP_

#include <memory>

#include "collectives/queue/communicator.hpp"

namespace hsgd {

// Splits `whole`; all its ranks must call it; blocks. Ranks of one color form a communicator,
// ordered by key, then by rank. Returns nullptr for a negative color. `rank_names`: of the part's
// ranks, as in hsgd_options.
std::unique_ptr<Communicator> split(Communicator& whole, int color, int key,
                                    const int32_t* rank_names);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_QUEUE_SPLIT_HPP_
