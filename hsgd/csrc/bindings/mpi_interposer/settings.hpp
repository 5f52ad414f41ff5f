// What the interposer was told at start-up, and the communicators that it takes calls on.
//
// Owns the settings, read once; communicators are cached by libhsgd_mpi as attributes.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_SETTINGS_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_SETTINGS_HPP_

#include <mpi.h>

#include "hsgd_core.h"

namespace hsgd::pmpi {

// Read at the first call while MPI is running; nullptr when it is not. A malformed setting ends the
// job.
const hsgd_options* settings();

// The core's communicator, made when the calls that asked before have taken as long as that does,
// or `at_once` (collective then); nullptr when this call of `bytes` stays with MPI, on all ranks
// alike. HSGD_OK, or an error: not all ranks came.
int communicator_of(MPI_Comm comm, const hsgd_options& options, uint64_t bytes, bool at_once,
                    hsgd_comm** found, hsgd_error* err);

// Local: the same if it is there already. That is so on all ranks or on none, because collectives
// of one communicator have one order.
hsgd_comm* known_communicator_of(MPI_Comm comm);

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_SETTINGS_HPP_
