// The choice between the two-level path and MPI, for each collective, and the way there.
//
// The choice depends on byte count, op and communicator alone, which are equal on all ranks; never
// on buffers, datatypes or displacements, which may differ: one rank may pass MPI_IN_PLACE, and
// where MPI asks for equal type signatures only (all but reductions), one may describe with a
// derived datatype what another has as a plain array. So data that does not lie packed is packed
// here, by this rank alone. The exception are buffers in a CUDA device's memory, which stay with
// MPI: in one collective all ranks must have such a buffer, or none.
//
// Each function returns what the MPI function shall return, or nothing when MPI shall do it; both
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

// What an allgather sends, and where it puts what it gets.
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
