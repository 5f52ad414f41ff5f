// Queries the fault tolerance extension of MPI (ULFM).
#include "network/mpi/deaths.hpp"

#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif

#include <numeric>

#include "hsgd_mpi.h"

// Weak: the libmpi of a program may have been built without the extension.
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
#pragma weak PMPIX_Comm_get_failed
#pragma weak PMPIX_Comm_failure_ack
#endif

namespace hsgd {

std::vector<int> dead_ranks_of([[maybe_unused]] MPI_Comm comm) {
  std::vector<int> ranks;
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
  MPI_Group dead = MPI_GROUP_NULL;
  if (PMPIX_Comm_get_failed == nullptr || PMPIX_Comm_get_failed(comm, &dead) != MPI_SUCCESS)
    return ranks;
  MPI_Group all = MPI_GROUP_NULL;
  int count = 0;
  PMPI_Group_size(dead, &count);
  if (count > 0 && PMPI_Comm_group(comm, &all) == MPI_SUCCESS) {
    std::vector<int> places(static_cast<size_t>(count));
    std::iota(places.begin(), places.end(), 0);
    ranks.resize(places.size());
    PMPI_Group_translate_ranks(dead, count, places.data(), all, ranks.data());
    PMPI_Group_free(&all);
  }
  if (dead != MPI_GROUP_EMPTY) PMPI_Group_free(&dead);
#endif
  return ranks;
}

int dead_rank_of(MPI_Comm comm) {
  const std::vector<int> ranks = dead_ranks_of(comm);
  return ranks.empty() ? -1 : ranks.front();
}

void acknowledge_deaths([[maybe_unused]] MPI_Comm comm) {
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
  if (PMPIX_Comm_failure_ack != nullptr) PMPIX_Comm_failure_ack(comm);
#endif
}

}  // namespace hsgd

int hsgd_mpi_dead_rank(const void* mpi_comm) {
  return hsgd::dead_rank_of(*static_cast<const MPI_Comm*>(mpi_comm));
}
