/* The C interface of libhsgd_mpi: communicators of the core over MPI. Loaded only where MPI is.
 *
 * MPI handles travel as addresses, so that this header needs no mpi.h: pass `&comm` of an MPI_Comm.
 */
#ifndef HSGD_MPI_H_
#define HSGD_MPI_H_

#include "hsgd_core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Collective over the MPI communicator, blocking, with options->timeout_s as deadline of each of
 * its steps. The communicator itself, which is duplicated, is not used afterwards; destroy the
 * result with hsgd_comm_destroy (collective then, and before MPI_Finalize). Below
 * MPI_THREAD_SERIALIZED all of this in the thread that initialized MPI. Calls PMPI_* only. */
HSGD_API int hsgd_mpi_comm_create(const void* mpi_comm, const hsgd_options* options,
                                  hsgd_comm** comm, hsgd_error* err);

/* Local. One line, such as "Open MPI v5.0.11, ...". Valid before MPI_Init too. */
HSGD_API void hsgd_mpi_library_version(char* text, size_t text_bytes);

/* The cached core communicator of an MPI communicator (an attribute on it): local, but collective
 * at the call that creates it with `options`. Each call is worth `worth_ns`, what MPI would take
 * for it, and that which brings the sum to `price_ns` per rank creates it: a communicator that goes
 * sooner is never set up, and one that stays costs at most about twice what either way alone would.
 * NULL in *comm with HSGD_OK: this communicator does not take the two-level path so far (its price,
 * one rank, one rank per node, an intercommunicator, or it could not be made, which rank 0 has said
 * in a line then), on all ranks alike. An error: not all ranks came. The cache owns it: it goes
 * when the MPI communicator is freed or MPI is finalized. For callers that stand for an MPI call of
 * the program. */
HSGD_API int hsgd_mpi_comm_cached(const void* mpi_comm, const hsgd_options* options,
                                  uint64_t worth_ns, uint64_t price_ns, hsgd_comm** comm,
                                  hsgd_error* err);

/* Local: the same when it was decided before; NULL when it was not, or when the communicator does
 * not take the two-level path. Valid while MPI is running. */
HSGD_API hsgd_comm* hsgd_mpi_comm_known(const void* mpi_comm);

/* Local. A rank of the communicator that MPI knows to have died; -1: it knows of none, or has no
 * word for it. MPI learns of deaths in its calls, where the launcher goes on without the dead. */
HSGD_API int hsgd_mpi_dead_rank(const void* mpi_comm);

/* Local, returns at once: MPI goes on with what is under way in this process. For a rank that waits
 * where MPI would, in a thread that may call MPI while it is running. */
HSGD_API int hsgd_mpi_progress(void);

/* Local. Sum of the counters of all cached communicators of this process, freed ones included.
 * Waits for collectives that are under way. */
HSGD_API void hsgd_mpi_cached_counters(hsgd_counters* counters);

#ifdef __cplusplus
}
#endif
#endif /* HSGD_MPI_H_ */
