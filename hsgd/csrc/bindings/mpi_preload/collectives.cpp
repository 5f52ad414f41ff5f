// The library for LD_PRELOAD: defines MPI's collectives under their names, and queries of the
// engine.
//
// For Fortran with Open MPI (see bindings/mpi_interposer/mpi_fortran.cpp) each subroutine has the
// four names that compilers make of its name, and the name in the module `mpi_f08`.
#include <mpi.h>  // for its version

#include "bindings/mpi_preload/engine.hpp"
#include "bindings/mpi_preload/forward.hpp"

using hsgd::preload::of_engine;

#define HSGD_COLLECTIVE(name, count) HSGD_FORWARD(name, count, of_engine("hsgd_" #name, "P" #name))

HSGD_COLLECTIVE(MPI_Allreduce, 6)
HSGD_COLLECTIVE(MPI_Bcast, 5)
HSGD_COLLECTIVE(MPI_Barrier, 1)
HSGD_COLLECTIVE(MPI_Allgather, 7)
HSGD_COLLECTIVE(MPI_Allgatherv, 8)
HSGD_COLLECTIVE(MPI_Reduce_scatter, 6)
HSGD_COLLECTIVE(MPI_Reduce_scatter_block, 6)

#if MPI_VERSION >= 4
HSGD_COLLECTIVE(MPI_Allreduce_c, 6)
HSGD_COLLECTIVE(MPI_Bcast_c, 5)
HSGD_COLLECTIVE(MPI_Allgather_c, 7)
HSGD_COLLECTIVE(MPI_Allgatherv_c, 8)
HSGD_COLLECTIVE(MPI_Reduce_scatter_c, 6)
HSGD_COLLECTIVE(MPI_Reduce_scatter_block_c, 6)
#endif

#ifdef OPEN_MPI
// One argument more than in C, for ierror.
#define HSGD_SUBROUTINE(lower, UPPER, count)                                       \
  HSGD_FORWARD(lower##_, count, of_engine("hsgd_" #lower, "p" #lower "_"))         \
  HSGD_FORWARD(lower, count, of_engine("hsgd_" #lower, "p" #lower))                \
  HSGD_FORWARD(lower##__, count, of_engine("hsgd_" #lower, "p" #lower "__"))       \
  HSGD_FORWARD(lower##_f08_, count, of_engine("hsgd_" #lower, "p" #lower "_f08_")) \
  HSGD_FORWARD(UPPER, count, of_engine("hsgd_" #lower, "P" #UPPER))

HSGD_SUBROUTINE(mpi_allreduce, MPI_ALLREDUCE, 7)
HSGD_SUBROUTINE(mpi_bcast, MPI_BCAST, 6)
HSGD_SUBROUTINE(mpi_barrier, MPI_BARRIER, 2)
HSGD_SUBROUTINE(mpi_allgather, MPI_ALLGATHER, 8)
HSGD_SUBROUTINE(mpi_allgatherv, MPI_ALLGATHERV, 9)
HSGD_SUBROUTINE(mpi_reduce_scatter, MPI_REDUCE_SCATTER, 7)
HSGD_SUBROUTINE(mpi_reduce_scatter_block, MPI_REDUCE_SCATTER_BLOCK, 7)
#endif

extern "C" {

// Returns nullptr if calls of this process can take the two-level path, else the reason in one
// line; for self-checks. Loads the engine as the first collective would.
HSGD_API const char* hsgd_interposer_failure(void) { return hsgd::preload::engine_failure(); }

// Returns the counters of the two-level path in this process so far; waits for running collectives.
HSGD_API void hsgd_interposer_counters(hsgd_counters* counters) {
  void* const engine = hsgd::preload::loaded_engine();
  *counters = hsgd_counters{};
  if (engine == nullptr) return;
  reinterpret_cast<void (*)(hsgd_counters*)>(of_engine("hsgd_pmpi_counters", ""))(counters);
}

// Returns how many calls passed through to MPI in this process so far, if the engine is loaded.
HSGD_API uint64_t hsgd_interposer_passed(void) {
  if (hsgd::preload::loaded_engine() == nullptr) return 0;
  return reinterpret_cast<uint64_t (*)()>(of_engine("hsgd_pmpi_passed", ""))();
}

// Returns the name of the `index`th collective of the interposer, from 0, and the calls and bytes
// of it that took the two-level path and that passed through. Returns nullptr beyond the last, and
// if the engine cannot be loaded; loads it.
HSGD_API const char* hsgd_interposer_collective(int index, uint64_t numbers[4]) {
  if (hsgd::preload::engine_failure() != nullptr) return nullptr;
  return reinterpret_cast<const char* (*)(int, uint64_t*)>(of_engine("hsgd_pmpi_collective", ""))(
      index, numbers);
}

}  // extern "C"
