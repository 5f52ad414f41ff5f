// The settings of the interposer, read once, and the communicators for its calls.
//
// libhsgd_mpi caches the communicators as attributes.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_SETTINGS_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_SETTINGS_HPP_

#include <mpi.h>

#include "hsgd_core.h"

namespace hsgd::pmpi {

// Returns the settings, read at the first call while MPI is running; nullptr if it is not. A
// malformed setting ends the job.
const hsgd_options* settings();

// Finds the core's communicator, and creates it (collective) if the earlier calls have taken as
// long as the set-up does, or if `at_once`. It is nullptr, on all ranks alike, if this call of
// `bytes` stays with MPI. Returns HSGD_OK, or an error: not all ranks came.
int communicator_of(MPI_Comm comm, const hsgd_options& options, uint64_t bytes, bool at_once,
                    hsgd_comm** found, hsgd_error* err);

// Returns the communicator if it exists. Local. It exists on all ranks or on none, because the
// collectives of one communicator have one order.
hsgd_comm* known_communicator_of(MPI_Comm comm);

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_SETTINGS_HPP_
