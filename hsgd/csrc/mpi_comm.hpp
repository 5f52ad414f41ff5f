// Makes communicators of the core over communicators of MPI.
//
// Owns the questions "which ranks share a node" and "who leads", and the agreement of all ranks on
// the outcome. Keeps nothing. Calls PMPI_* only.
#ifndef HSGD_MPI_COMM_HPP_
#define HSGD_MPI_COMM_HPP_

#include <mpi.h>

#include "error.hpp"
#include "hsgd_core.h"
#include "mpi_handle.hpp"

namespace hsgd {

// A failure that every rank of the communicator knows of: all may go on without what failed.
class AgreedError final : public Error {
 public:
  using Error::Error;
};

// Collective over an intracommunicator, blocking; `comm` and its attributes stay as they are.
// nullptr when `only_if_shared` and no two ranks share a node, on all ranks alike.
hsgd_comm* create_over(MPI_Comm comm, const hsgd_options& options, bool only_if_shared);

// A communicator of our own with the same ranks. Not MPI_Comm_dup: that would call the copy
// functions of the program's attributes.
OwnComm same_ranks(MPI_Comm comm);

// Whether MPI calls are possible: between MPI_Init and MPI_Finalize.
bool mpi_is_running();

}  // namespace hsgd

#endif  // HSGD_MPI_COMM_HPP_
