// Ranks that MPI knows to have died, if the launcher was told to continue without them, as with
// mpirun --with-ft ulfm. Local; keeps no state. Calls PMPI_* only.
#ifndef HSGD_NETWORK_MPI_DEATHS_HPP_
#define HSGD_NETWORK_MPI_DEATHS_HPP_

#include <mpi.h>

#include <vector>

namespace hsgd {

// Returns the dead ranks, in the numbering of `comm` and in any order; empty if MPI knows of none
// or has no such extension. MPI learns of deaths in its calls.
std::vector<int> dead_ranks_of(MPI_Comm comm);
int dead_rank_of(MPI_Comm comm);  // returns one of them; -1: none

// Lets receives from any source continue after the deaths that are known by now.
void acknowledge_deaths(MPI_Comm comm);

}  // namespace hsgd

#endif  // HSGD_NETWORK_MPI_DEATHS_HPP_
