// Chooses between the two-level path and MPI for each collective, and runs the call.
//
// The choice depends on byte count, op and communicator alone, which are equal on all ranks; never
// on buffers, datatypes or displacements, which may differ: one rank may pass MPI_IN_PLACE, and if
// MPI requires only equal type signatures (all but reductions), one rank may use a derived datatype
// and another a plain array. So data that is not packed is packed here, on this rank alone. The
// exception is buffers in CUDA device memory, which MPI handles: in one collective all ranks must
// have such a buffer, or none.
//
// Each function returns the result of the MPI function, or nothing if MPI must do the call; both
// are counted. `Number` is int, or MPI_Count for the functions of large counts.
#ifndef HSGD_BINDINGS_MPI_INTERPOSER_DISPATCH_HPP_
#define HSGD_BINDINGS_MPI_INTERPOSER_DISPATCH_HPP_

#include <mpi.h>

#include <cstdint>
#include <optional>

#include "bindings/mpi_interposer/counters.hpp"

namespace hsgd::pmpi {

using Taken = std::optional<int>;

struct Reduction {
  const void* in;
  void* out;
  MPI_Datatype type;
  MPI_Op op;
  MPI_Comm comm;
};

// The arguments of an allgather.
struct Gathering {
  const void* in;
  MPI_Count count;
  MPI_Datatype type;
  void* out;
  MPI_Datatype out_type;
  MPI_Comm comm;
};

Taken take_allreduce(const Reduction& call, MPI_Count count);
Taken take_bcast(void* data, MPI_Count count, MPI_Datatype type, int root, MPI_Comm comm);
Taken take_barrier(MPI_Comm comm);
Taken take_allgather(const Gathering& call, MPI_Count out_count);
template <class Number, class Displacement>
Taken take_allgatherv(const Gathering& call, const Number* counts, const Displacement* places);
template <class Number>
Taken take_reduce_scatter(const Reduction& call, const Number* counts);
Taken take_reduce_scatter_block(const Reduction& call, MPI_Count count);

}  // namespace hsgd::pmpi

#endif  // HSGD_BINDINGS_MPI_INTERPOSER_DISPATCH_HPP_
