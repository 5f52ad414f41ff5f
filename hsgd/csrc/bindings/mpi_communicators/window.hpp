// The network of a notified window between nodes, over MPI.
//
// Owns the name by which the library is asked for it, as hsgd_mpi.h does for all else: that header
// is for C.
#ifndef HSGD_BINDINGS_MPI_COMMUNICATORS_WINDOW_HPP_
#define HSGD_BINDINGS_MPI_COMMUNICATORS_WINDOW_HPP_

#include <cstddef>
#include <memory>

#include "hsgd_core.h"
#include "network/transport/rma.hpp"

// Collective over the ranks of `comm`, which was made over the MPI communicator at `mpi_comm`,
// blocking: `rma` becomes a window of MPI's over the `bytes` bytes at `base`. Several threads may
// use it where MPI was initialized with MPI_THREAD_MULTIPLE. Throws Error.
extern "C" HSGD_API void hsgd_mpi_rma_create(const void* mpi_comm, hsgd_comm& comm, void* base,
                                             size_t bytes, std::unique_ptr<hsgd::Rma>& rma);

#endif  // HSGD_BINDINGS_MPI_COMMUNICATORS_WINDOW_HPP_
