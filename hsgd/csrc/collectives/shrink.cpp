// Communicator::shrink(): a new communicator of the ranks that are left.
//
// Owns what the new one takes over from the old. The agreement on who is left is
// node/survivors.hpp's.
#include <algorithm>

#include "base/error.hpp"
#include "collectives/communicator.hpp"
#include "node/survivors.hpp"

namespace hsgd {

std::unique_ptr<Communicator> Communicator::shrink(double timeout_s) {
  check_mine();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (place_.node_count > 1) {
    throw Error(HSGD_ERR_ARGUMENT, -1,
                text("shrink: the ranks span %d nodes, between which only MPI can agree on who is "
                     "left, and it knows no deadline for that; shrink MPI's own communicator "
                     "(MPIX_Comm_shrink; mpi4py: world.Shrink()) and make a new one over it",
                     place_.node_count));
  }
  if (broken_.empty()) {
    give_up(Error(HSGD_ERR_PEER_LOST, place_.rank, text("rank %d called shrink()", place_.rank)),
            sequence_ + 1);
  }
  std::unique_ptr<Communicator> shrunk;
  Regroup(local_, timeout_s, options_.interrupted).run([&](const Regroup::Round& round) {
    shrunk.reset();
    const auto me = std::find(round.members.begin(), round.members.end(), place_.local_rank);
    Place place;
    place.rank = place.local_rank = static_cast<int>(me - round.members.begin());
    place.size = place.local_size = static_cast<int>(round.members.size());
    shrunk = std::make_unique<Communicator>(round.path, nullptr, std::move(place), nullptr,
                                            options_, round.watch);
  });
  return shrunk;
}

}  // namespace hsgd
