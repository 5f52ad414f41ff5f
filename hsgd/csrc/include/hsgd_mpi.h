/* The C interface of libhsgd_mpi: communicators of the core over MPI. Loaded only if MPI is.
 *
 * MPI handles are passed as addresses, so that this header needs no mpi.h: pass `&comm` of an
 * MPI_Comm. */
#ifndef HSGD_MPI_H_
#define HSGD_MPI_H_

#include "hsgd_core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Collective over the MPI communicator, blocking, with options->timeout_s as deadline of each of
 * its steps. The MPI communicator is duplicated and not used afterwards. Destroy the result with
 * hsgd_comm_destroy (collective in this case, and before MPI_Finalize). Below
 * MPI_THREAD_SERIALIZED, call all of this in the thread that initialized MPI. Calls PMPI_* only. */
HSGD_API int hsgd_mpi_comm_create(const void* mpi_comm, const hsgd_options* options,
                                  hsgd_comm** comm, hsgd_error* err);

/* Local. Fills one line, such as "Open MPI v5.0.11, ...". Valid before MPI_Init, too. */
HSGD_API void hsgd_mpi_library_version(char* text, size_t text_bytes);

/* Finds the cached core communicator of an MPI communicator (an attribute on it). Local, but the
 * call that creates it with `options` is collective. Each call adds `worth_ns`, the time that MPI
 * would take for it; the call at which the sum reaches `price_ns` per rank creates the
 * communicator. So a communicator that is freed sooner is never set up, and one that stays costs at
 * most about twice the cheaper of the two ways.
 *
 * Returns HSGD_OK and NULL in *comm, on all ranks alike, if this communicator does not take the
 * two-level path so far: because of its price, one rank, one rank per node, an intercommunicator,
 * or because it could not be made, which rank 0 has then reported in a line. Returns an error if
 * not all ranks came. The cache owns the communicator: it is freed with the MPI communicator or
 * when MPI is finalized. For callers that replace an MPI call of the program. */
HSGD_API int hsgd_mpi_comm_cached(const void* mpi_comm, const hsgd_options* options,
                                  uint64_t worth_ns, uint64_t price_ns, hsgd_comm** comm,
                                  hsgd_error* err);

/* Local. Returns the same communicator if this was decided before; NULL if it was not, or if the
 * communicator does not take the two-level path. Valid while MPI is running. */
HSGD_API hsgd_comm* hsgd_mpi_comm_known(const void* mpi_comm);

/* Local. Returns a rank of the communicator that MPI knows to have died; -1 if MPI knows of none,
 * or has no such extension. MPI learns of deaths in its calls, if the launcher continues without
 * the dead ranks. */
HSGD_API int hsgd_mpi_dead_rank(const void* mpi_comm);

/* Local; returns at once. Makes MPI progress in this process. For a rank that waits instead of MPI,
 * in a thread that may call MPI while it is running. */
HSGD_API int hsgd_mpi_progress(void);

/* Local. Returns the sum of the counters of all cached communicators of this process, including
 * freed ones. Waits for collectives in progress. */
HSGD_API void hsgd_mpi_cached_counters(hsgd_counters* counters);

#ifdef __cplusplus
}
#endif
#endif /* HSGD_MPI_H_ */
