// Communicators of some ranks of a communicator, made with its own collectives.
//
// Owns the agreement on who belongs together and where they meet. One node only: between nodes the
// MPI communicator is split instead. Never leaves a rank waiting for one that could not take part:
// the ranks tell one another before they meet.
#ifndef HSGD_COLLECTIVES_QUEUE_SPLIT_HPP_
#define HSGD_COLLECTIVES_QUEUE_SPLIT_HPP_

#include <memory>

#include "collectives/queue/communicator.hpp"

namespace hsgd {

// Collective over `whole`, blocking. Ranks of one color form a communicator, by key, then by rank;
// nullptr for a negative color.
std::unique_ptr<Communicator> split(Communicator& whole, int color, int key);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_QUEUE_SPLIT_HPP_
