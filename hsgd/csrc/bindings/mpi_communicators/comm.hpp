// create_over(): creates core communicators over MPI communicators.
//
// Defines the order of the steps, and the leaders. Keeps no state. Calls PMPI_* only.
#ifndef HSGD_BINDINGS_MPI_COMMUNICATORS_COMM_HPP_
#define HSGD_BINDINGS_MPI_COMMUNICATORS_COMM_HPP_

#include <mpi.h>

#include <cstdint>

#include "bindings/mpi_communicators/agreement.hpp"
#include "core/base/error.hpp"
#include "hsgd_core.h"
#include "network/mpi/handle.hpp"

namespace hsgd {

// The caller that wants a communicator.
enum class Wanted {
  kByName,     // the program by name: MPI's communicator is duplicated, as libraries do
  kBehindMpi,  // a caller that replaces an MPI call; the program must not notice
};

// The measurements of the same ranks from an earlier communicator.
struct KnownTuning {
  int64_t store = 0;           // as hsgd_options.known_store; 0: nothing is known
  int64_t oneshot_bytes = -1;  // < 0: as the options say
  int64_t chunk_bytes = -1;
  uint64_t allreduce_bytes = 0;  // 0: as oneshot_bytes
};

// Creates a communicator; collective over an intracommunicator; blocks; each step has
// options.timeout_s as deadline. `known` may differ between ranks; the value of rank 0 counts.
// kBehindMpi: `comm` and its attributes do not change; returns nullptr on all ranks if no two ranks
// share a node; and one step between nodes is MPI_Comm_split, which has no deadline, like the
// replaced MPI call.
hsgd_comm* create_over(MPI_Comm comm, const hsgd_options& options, Wanted wanted,
                       const KnownTuning& known = {});

// Returns a new communicator with the same ranks; collective, with the same deadline.
OwnComm duplicate(MPI_Comm comm, const hsgd_options& options);

// Returns true if MPI calls are possible: between MPI_Init and MPI_Finalize.
bool mpi_is_running();

}  // namespace hsgd

#endif  // HSGD_BINDINGS_MPI_COMMUNICATORS_COMM_HPP_
