// What the extension for fault tolerance (ULFM) knows.
#include "mpi/deaths.hpp"

#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif

#include "hsgd_mpi.h"

// Weak: the libmpi that a program runs may have been built without the extension.
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
#pragma weak PMPIX_Comm_get_failed
#endif

namespace hsgd {

int dead_rank_of([[maybe_unused]] MPI_Comm comm) {
  int rank = -1;
#ifdef OMPI_HAVE_MPI_EXT_FTMPI
  MPI_Group dead = MPI_GROUP_NULL;
  if (PMPIX_Comm_get_failed == nullptr || PMPIX_Comm_get_failed(comm, &dead) != MPI_SUCCESS)
    return -1;
  MPI_Group all = MPI_GROUP_NULL;
  int count = 0;
  const int first = 0;
  PMPI_Group_size(dead, &count);
  if (count > 0 && PMPI_Comm_group(comm, &all) == MPI_SUCCESS) {
    PMPI_Group_translate_ranks(dead, 1, &first, all, &rank);
    PMPI_Group_free(&all);
  }
  if (dead != MPI_GROUP_EMPTY) PMPI_Group_free(&dead);
#endif
  return rank;
}

}  // namespace hsgd

int hsgd_mpi_dead_rank(const void* mpi_comm) {
  return hsgd::dead_rank_of(*static_cast<const MPI_Comm*>(mpi_comm));
}
