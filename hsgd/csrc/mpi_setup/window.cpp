// A window of MPI's on a duplicate of the program's communicator.
#include "mpi_setup/window.hpp"

#include <mpi.h>

#include "capi/handles.hpp"
#include "mpi/rma.hpp"
#include "mpi_setup/comm.hpp"

hsgd::Rma* hsgd_mpi_rma_create(const void* mpi_comm, hsgd_comm* comm, void* base, size_t bytes) {
  const MPI_Comm ranks = *static_cast<const MPI_Comm*>(mpi_comm);
  return hsgd::make_mpi_rma(hsgd::duplicate(ranks, comm->communicator->options()), base, bytes)
      .release();
}
