// The interposer's engine: MPI's functions as C programs call them.
//
// A call takes the two-level path or passes through to PMPI; bindings/mpi_interposer/dispatch.cpp
// chooses. The names are MPI's with the prefix hsgd_; programs call
// bindings/mpi_preload/collectives.cpp, which finds them by name. Those for Fortran are in
// bindings/mpi_interposer/mpi_fortran.cpp.
#include "bindings/mpi_interposer/mpi_c.hpp"

#include <mpi.h>

#include "bindings/mpi_interposer/dispatch.hpp"
#include "bindings/mpi_interposer/settings.hpp"
#include "hsgd_core.h"
#include "hsgd_mpi.h"

// Weak: a build for MPI 4 also serves a libmpi of the same ABI that has only MPI 3, such as Cray
// MPICH 8 and MVAPICH 2. Programs of such an MPI do not call them.
#if MPI_VERSION >= 4
#pragma weak PMPI_Allreduce_c
#pragma weak PMPI_Bcast_c
#pragma weak PMPI_Allgather_c
#pragma weak PMPI_Allgatherv_c
#pragma weak PMPI_Reduce_scatter_c
#pragma weak PMPI_Reduce_scatter_block_c
#endif

using namespace hsgd::pmpi;

extern "C" {

HSGD_API int hsgd_MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op,
                                MPI_Comm comm) {
  if (const Taken status = take_allreduce({in, out, type, op, comm}, count)) return *status;
  return PMPI_Allreduce(in, out, count, type, op, comm);
}

HSGD_API int hsgd_MPI_Bcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
  if (const Taken status = take_bcast(data, count, type, root, comm)) return *status;
  return PMPI_Bcast(data, count, type, root, comm);
}

HSGD_API int hsgd_MPI_Barrier(MPI_Comm comm) {
  if (const Taken status = take_barrier(comm)) return *status;
  return PMPI_Barrier(comm);
}

HSGD_API int hsgd_MPI_Allgather(const void* in, int count, MPI_Datatype type, void* out,
                                int out_count, MPI_Datatype out_type, MPI_Comm comm) {
  if (const Taken status = take_allgather({in, count, type, out, out_type, comm}, out_count))
    return *status;
  return PMPI_Allgather(in, count, type, out, out_count, out_type, comm);
}

HSGD_API int hsgd_MPI_Allgatherv(const void* in, int count, MPI_Datatype type, void* out,
                                 const int out_counts[], const int places[], MPI_Datatype out_type,
                                 MPI_Comm comm) {
  const Gathering call{in, count, type, out, out_type, comm};
  if (const Taken status = take_allgatherv(call, out_counts, places)) return *status;
  return PMPI_Allgatherv(in, count, type, out, out_counts, places, out_type, comm);
}

HSGD_API int hsgd_MPI_Reduce_scatter(const void* in, void* out, const int counts[],
                                     MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  if (const Taken status = take_reduce_scatter({in, out, type, op, comm}, counts)) return *status;
  return PMPI_Reduce_scatter(in, out, counts, type, op, comm);
}

HSGD_API int hsgd_MPI_Reduce_scatter_block(const void* in, void* out, int count, MPI_Datatype type,
                                           MPI_Op op, MPI_Comm comm) {
  if (const Taken status = take_reduce_scatter_block({in, out, type, op, comm}, count))
    return *status;
  return PMPI_Reduce_scatter_block(in, out, count, type, op, comm);
}

#if MPI_VERSION >= 4
HSGD_API int hsgd_MPI_Allreduce_c(const void* in, void* out, MPI_Count count, MPI_Datatype type,
                                  MPI_Op op, MPI_Comm comm) {
  if (const Taken status = take_allreduce({in, out, type, op, comm}, count)) return *status;
  if (PMPI_Allreduce_c == nullptr) return MPI_ERR_UNSUPPORTED_OPERATION;
  return PMPI_Allreduce_c(in, out, count, type, op, comm);
}

HSGD_API int hsgd_MPI_Bcast_c(void* data, MPI_Count count, MPI_Datatype type, int root,
                              MPI_Comm comm) {
  if (const Taken status = take_bcast(data, count, type, root, comm)) return *status;
  if (PMPI_Bcast_c == nullptr) return MPI_ERR_UNSUPPORTED_OPERATION;
  return PMPI_Bcast_c(data, count, type, root, comm);
}

HSGD_API int hsgd_MPI_Allgather_c(const void* in, MPI_Count count, MPI_Datatype type, void* out,
                                  MPI_Count out_count, MPI_Datatype out_type, MPI_Comm comm) {
  if (const Taken status = take_allgather({in, count, type, out, out_type, comm}, out_count))
    return *status;
  if (PMPI_Allgather_c == nullptr) return MPI_ERR_UNSUPPORTED_OPERATION;
  return PMPI_Allgather_c(in, count, type, out, out_count, out_type, comm);
}

HSGD_API int hsgd_MPI_Allgatherv_c(const void* in, MPI_Count count, MPI_Datatype type, void* out,
                                   const MPI_Count out_counts[], const MPI_Aint places[],
                                   MPI_Datatype out_type, MPI_Comm comm) {
  const Gathering call{in, count, type, out, out_type, comm};
  if (const Taken status = take_allgatherv(call, out_counts, places)) return *status;
  if (PMPI_Allgatherv_c == nullptr) return MPI_ERR_UNSUPPORTED_OPERATION;
  return PMPI_Allgatherv_c(in, count, type, out, out_counts, places, out_type, comm);
}

HSGD_API int hsgd_MPI_Reduce_scatter_c(const void* in, void* out, const MPI_Count counts[],
                                       MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  if (const Taken status = take_reduce_scatter({in, out, type, op, comm}, counts)) return *status;
  if (PMPI_Reduce_scatter_c == nullptr) return MPI_ERR_UNSUPPORTED_OPERATION;
  return PMPI_Reduce_scatter_c(in, out, counts, type, op, comm);
}

HSGD_API int hsgd_MPI_Reduce_scatter_block_c(const void* in, void* out, MPI_Count count,
                                             MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  if (const Taken status = take_reduce_scatter_block({in, out, type, op, comm}, count))
    return *status;
  if (PMPI_Reduce_scatter_block_c == nullptr) return MPI_ERR_UNSUPPORTED_OPERATION;
  return PMPI_Reduce_scatter_block_c(in, out, count, type, op, comm);
}
#endif

// Implement the functions of the same names with hsgd_interposer_.
HSGD_API void hsgd_pmpi_counters(hsgd_counters* counters) {
  *counters = hsgd_counters{};
  if (settings() != nullptr) hsgd_mpi_cached_counters(counters);
}

HSGD_API uint64_t hsgd_pmpi_passed(void) { return counts_of_all().passed_calls; }

HSGD_API const char* hsgd_pmpi_collective(int index, uint64_t numbers[4]) {
  if (index < 0 || index >= static_cast<int>(Collective::kCount)) return nullptr;
  const Counts counts = counts_of(static_cast<Collective>(index));
  numbers[0] = counts.taken_calls;
  numbers[1] = counts.taken_bytes;
  numbers[2] = counts.passed_calls;
  numbers[3] = counts.passed_bytes;
  return name_of(static_cast<Collective>(index));
}

}  // extern "C"
