// Reductions by ops that the program made: the core has no kernel for them, but gathers what MPI's
// own MPI_Reduce_local then combines.
//
// Every rank gets the inputs of all and folds them from the last to the first, so that operands
// stay in rank order: for ops that do not commute as well, and with the same bits on all ranks.
// That costs each rank the work of all, which pays off while messages are small.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_USER_OP_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_USER_OP_HPP_

#include <mpi.h>

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd::pmpi {

// Neither predefined nor MPI_OP_NULL.
bool is_user_op(MPI_Op op);

// An allreduce of `count` elements on the core's communicator, or what it or MPI_Reduce_local said.
// `in` may be MPI_IN_PLACE. Throws std::bad_alloc, and std::runtime_error with MPI's words.
int allreduce_by_user_op(hsgd_comm* comm, const void* in, void* out, uint64_t count,
                         MPI_Datatype type, MPI_Op op, hsgd_error* error);

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_USER_OP_HPP_
