// Which ranks MPI knows to have died: where the launcher was asked to go on without them, as by
// mpirun --with-ft ulfm. Local; keeps nothing. Calls PMPI_* only.
#ifndef HSGD_MPI_DEATHS_HPP_
#define HSGD_MPI_DEATHS_HPP_

#include <mpi.h>

namespace hsgd {

// One that died, in the numbering of `comm`; -1: MPI knows of none, or has no word for it. MPI
// learns of deaths in its calls.
int dead_rank_of(MPI_Comm comm);

}  // namespace hsgd

#endif  // HSGD_MPI_DEATHS_HPP_
