// Communicator::shrink(): creates a communicator of the surviving ranks.
//
// Holds only what the new communicator takes from the old. node/segments/survivors.hpp agrees on
// the survivors.
#include <algorithm>
#include <vector>

#include "collectives/queue/communicator.hpp"
#include "core/base/error.hpp"
#include "node/segments/survivors.hpp"

namespace hsgd {

std::unique_ptr<Communicator> Communicator::shrink(double timeout_s) {
  check_mine();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!context_.one_node()) {
    throw_invalid(
        "shrink: the ranks span %d nodes, and shrink() works within one node only; "
        "shrink the MPI communicator (MPIX_Comm_shrink; mpi4py: world.Shrink()) and "
        "make a new communicator over it",
        context_.place().node_count);
  }
  if (!broken_) {
    const int rank = context_.place().name();
    give_up(Error(HSGD_ERR_PEER_LOST, rank, text("rank %d called shrink()", rank)),
            context_.sequence() + 1);
  }
  std::unique_ptr<Communicator> shrunk;
  const bool keeps_names = options().rank_names != nullptr;
  Regroup group(context_.local(), timeout_s, options().interrupted, keeps_names);
  group.run([&](const Regroup::Round& round) {
    shrunk.reset();
    const auto me =
        std::find(round.members.begin(), round.members.end(), context_.place().local_rank);
    Place place;
    place.rank = place.local_rank = static_cast<int>(me - round.members.begin());
    place.size = place.local_size = static_cast<int>(round.members.size());
    std::vector<int32_t> names;
    for (const int member : round.members) names.push_back(context_.place().names.of(member));
    hsgd_options same = options();
    if (keeps_names) same.rank_names = names.data();
    shrunk = std::make_unique<Communicator>(round.path, nullptr, std::move(place), nullptr, same,
                                            round.watch);
  });
  return shrunk;
}

}  // namespace hsgd
