// The functions of the interposer's engine: MPI's names with the prefix hsgd_.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_MPI_C_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_MPI_C_HPP_

#include <mpi.h>

#include "hsgd_core.h"

extern "C" {

HSGD_API decltype(MPI_Allreduce) hsgd_MPI_Allreduce;
HSGD_API decltype(MPI_Bcast) hsgd_MPI_Bcast;
HSGD_API decltype(MPI_Barrier) hsgd_MPI_Barrier;
HSGD_API decltype(MPI_Allgather) hsgd_MPI_Allgather;
HSGD_API decltype(MPI_Allgatherv) hsgd_MPI_Allgatherv;
HSGD_API decltype(MPI_Reduce_scatter) hsgd_MPI_Reduce_scatter;
HSGD_API decltype(MPI_Reduce_scatter_block) hsgd_MPI_Reduce_scatter_block;

}  // extern "C"

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_MPI_C_HPP_
