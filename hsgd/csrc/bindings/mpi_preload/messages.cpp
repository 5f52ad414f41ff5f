// Records and passes on MPI's functions that start something which continues after they return.
//
// Also blocking sends, which return while MPI still holds the data. They need the engine's flag,
// not the engine: a program without collectives never loads it.
#include "bindings/mpi_preload/messages.hpp"

#include <mpi.h>  // for its version

#include "bindings/mpi_preload/engine.hpp"
#include "bindings/mpi_preload/forward.hpp"

namespace hsgd::preload {

std::atomic<bool> messages_noted{false};

// Sets the flag and finds the function. The flag is never cleared, so it is enough that the first
// call of each function sets it.
static void* note_and_find(const char* name) {
  messages_noted.store(true, std::memory_order_relaxed);
  return of_mpi(name);
}

}  // namespace hsgd::preload

#define HSGD_STARTS(name, count) HSGD_FORWARD(name, count, hsgd::preload::note_and_find("P" #name))
#if MPI_VERSION >= 4
#define HSGD_STARTS_BOTH(name, count) HSGD_STARTS(name, count) HSGD_STARTS(name##_c, count)
#else
#define HSGD_STARTS_BOTH(name, count) HSGD_STARTS(name, count)
#endif

HSGD_STARTS_BOTH(MPI_Send, 6)
HSGD_STARTS_BOTH(MPI_Bsend, 6)
HSGD_STARTS_BOTH(MPI_Ssend, 6)
HSGD_STARTS_BOTH(MPI_Rsend, 6)
HSGD_STARTS_BOTH(MPI_Sendrecv, 12)
HSGD_STARTS_BOTH(MPI_Sendrecv_replace, 9)
HSGD_STARTS_BOTH(MPI_Isend, 7)
HSGD_STARTS_BOTH(MPI_Ibsend, 7)
HSGD_STARTS_BOTH(MPI_Issend, 7)
HSGD_STARTS_BOTH(MPI_Irsend, 7)
HSGD_STARTS_BOTH(MPI_Irecv, 7)
HSGD_STARTS_BOTH(MPI_Imrecv, 5)
HSGD_STARTS_BOTH(MPI_Isendrecv, 12)
HSGD_STARTS_BOTH(MPI_Isendrecv_replace, 9)
HSGD_STARTS(MPI_Start, 1)  // all persistent ones, collectives too
HSGD_STARTS(MPI_Startall, 2)

HSGD_STARTS(MPI_Ibarrier, 2)
HSGD_STARTS_BOTH(MPI_Ibcast, 6)
HSGD_STARTS_BOTH(MPI_Iallreduce, 7)
HSGD_STARTS_BOTH(MPI_Ireduce, 8)
HSGD_STARTS_BOTH(MPI_Ireduce_scatter, 7)
HSGD_STARTS_BOTH(MPI_Ireduce_scatter_block, 7)
HSGD_STARTS_BOTH(MPI_Iscan, 7)
HSGD_STARTS_BOTH(MPI_Iexscan, 7)
HSGD_STARTS_BOTH(MPI_Iallgather, 8)
HSGD_STARTS_BOTH(MPI_Iallgatherv, 9)
HSGD_STARTS_BOTH(MPI_Igather, 9)
HSGD_STARTS_BOTH(MPI_Igatherv, 10)
HSGD_STARTS_BOTH(MPI_Iscatter, 9)
HSGD_STARTS_BOTH(MPI_Iscatterv, 10)
HSGD_STARTS_BOTH(MPI_Ialltoall, 8)
HSGD_STARTS_BOTH(MPI_Ialltoallv, 10)
HSGD_STARTS_BOTH(MPI_Ialltoallw, 10)
HSGD_STARTS_BOTH(MPI_Ineighbor_allgather, 8)
HSGD_STARTS_BOTH(MPI_Ineighbor_allgatherv, 9)
HSGD_STARTS_BOTH(MPI_Ineighbor_alltoall, 8)
HSGD_STARTS_BOTH(MPI_Ineighbor_alltoallv, 10)
HSGD_STARTS_BOTH(MPI_Ineighbor_alltoallw, 10)
HSGD_STARTS(MPI_Comm_idup, 3)
HSGD_STARTS(MPI_Comm_idup_with_info, 4)

HSGD_STARTS_BOTH(MPI_Win_create, 6)
HSGD_STARTS_BOTH(MPI_Win_allocate, 6)
HSGD_STARTS_BOTH(MPI_Win_allocate_shared, 6)
HSGD_STARTS(MPI_Win_create_dynamic, 3)
