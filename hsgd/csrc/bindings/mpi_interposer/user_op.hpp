// allreduce_by_user_op(): reduces with an op of the program: the core has no kernel for it, so it
// gathers the inputs, and MPI_Reduce_local combines them.
//
// Every rank gets the inputs of all and folds them from the last to the first, so that operands
// stay in rank order: also for ops that do not commute, and with the same bits on all ranks. Each
// rank does the work of all, which pays off only for small messages.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_USER_OP_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_USER_OP_HPP_

#include <mpi.h>

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd::pmpi {

// Returns true if the op is neither predefined nor MPI_OP_NULL.
bool is_user_op(MPI_Op op);

// Runs an allreduce of `count` elements on the core's communicator. Returns its status or that of
// MPI_Reduce_local. `in` may be MPI_IN_PLACE. Throws std::bad_alloc, and std::runtime_error with
// MPI's message.
int allreduce_by_user_op(hsgd_comm* comm, const void* in, void* out, uint64_t count,
                         MPI_Datatype type, MPI_Op op, hsgd_error* error);

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_USER_OP_HPP_
