// Makes communicators of the core over communicators of MPI.
//
// Owns the order of the steps, and who leads. Keeps nothing. Calls PMPI_* only.
#ifndef HSGD_BINDINGS_MPI_COMMUNICATORS_COMM_HPP_
#define HSGD_BINDINGS_MPI_COMMUNICATORS_COMM_HPP_

#include <mpi.h>

#include <cstdint>

#include "bindings/mpi_communicators/agreement.hpp"
#include "core/base/error.hpp"
#include "hsgd_core.h"
#include "network/mpi/handle.hpp"

namespace hsgd {

// Who wants a communicator.
enum class Wanted {
  kByName,     // the program: it duplicates its MPI communicator, as libraries do
  kBehindMpi,  // a caller that stands for an MPI call of the program, which must not notice
};

// What the same ranks measured when they made a communicator before.
struct KnownTuning {
  int64_t store = 0;           // as hsgd_options.known_store; 0: nothing is known
  int64_t oneshot_bytes = -1;  // < 0: as the options say
  int64_t chunk_bytes = -1;
  uint64_t allreduce_bytes = 0;  // 0: as oneshot_bytes
};

// Collective over an intracommunicator, blocking, each step with options.timeout_s as deadline.
// `known`: ranks may differ in it; what rank 0 knows counts.
// kBehindMpi: `comm` and its attributes stay as they are; nullptr when no two ranks share a node,
// on all ranks alike; and one step between nodes is MPI_Comm_split, which has no deadline, as the
// MPI call has none that this stands for.
hsgd_comm* create_over(MPI_Comm comm, const hsgd_options& options, Wanted wanted,
                       const KnownTuning& known = {});

// Collective. A communicator of our own with the same ranks, with that deadline.
OwnComm duplicate(MPI_Comm comm, const hsgd_options& options);

// Whether MPI calls are possible: between MPI_Init and MPI_Finalize.
bool mpi_is_running();

}  // namespace hsgd

#endif  // HSGD_BINDINGS_MPI_COMMUNICATORS_COMM_HPP_
