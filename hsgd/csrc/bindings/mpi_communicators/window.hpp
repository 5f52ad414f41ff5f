// hsgd_mpi_rma_create(): creates the network of a notified window between nodes, over MPI.
//
// Declared here and not in hsgd_mpi.h, because that header is for C.
#ifndef HSGD_BINDINGS_MPI_COMMUNICATORS_WINDOW_HPP_
#define HSGD_BINDINGS_MPI_COMMUNICATORS_WINDOW_HPP_

#include <cstddef>
#include <memory>

#include "hsgd_core.h"
#include "network/transport/rma.hpp"

// Sets `rma` to an MPI window over the `bytes` bytes at `base`. Collective over the ranks of
// `comm`, which was created over the MPI communicator at `mpi_comm`; blocks. Several threads may
// use the window if MPI was initialized with MPI_THREAD_MULTIPLE. Throws Error.
extern "C" HSGD_API void hsgd_mpi_rma_create(const void* mpi_comm, hsgd_comm& comm, void* base,
                                             size_t bytes, std::unique_ptr<hsgd::Rma>& rma);

#endif  // HSGD_BINDINGS_MPI_COMMUNICATORS_WINDOW_HPP_
