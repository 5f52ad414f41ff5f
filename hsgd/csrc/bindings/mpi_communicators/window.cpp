// hsgd_mpi_rma_create(): creates an MPI window on a duplicate of the program's communicator.
#include "bindings/mpi_communicators/window.hpp"

#include <mpi.h>

#include "bindings/c/handles.hpp"
#include "bindings/mpi_communicators/comm.hpp"
#include "network/mpi/rma.hpp"

void hsgd_mpi_rma_create(const void* mpi_comm, hsgd_comm& comm, void* base, size_t bytes,
                         std::unique_ptr<hsgd::Rma>& rma) {
  const MPI_Comm ranks = *static_cast<const MPI_Comm*>(mpi_comm);
  rma = hsgd::make_mpi_rma(hsgd::duplicate(ranks, comm.communicator->options()), base, bytes);
}
