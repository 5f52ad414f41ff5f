// Which ranks MPI knows to have died: where the launcher was asked to go on without them, as by
// mpirun --with-ft ulfm. Local; keeps nothing. Calls PMPI_* only.
#ifndef HSGD_NETWORK_MPI_DEATHS_HPP_
#define HSGD_NETWORK_MPI_DEATHS_HPP_

#include <mpi.h>

#include <vector>

namespace hsgd {

// Those that died, in the numbering of `comm` and in no order of time; none: MPI knows of none, or
// has no word for it. MPI learns of deaths in its calls.
std::vector<int> dead_ranks_of(MPI_Comm comm);
int dead_rank_of(MPI_Comm comm);  // one of them; -1: none

// Receives from any source go on after the deaths that are known by now.
void acknowledge_deaths(MPI_Comm comm);

}  // namespace hsgd

#endif  // HSGD_NETWORK_MPI_DEATHS_HPP_
