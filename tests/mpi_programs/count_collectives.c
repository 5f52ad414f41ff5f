/* Counts MPI's collective calls of a process, under either of their names: LD_PRELOAD it.
 *
 * Knows nothing of hsgd, which calls PMPI_* directly: so both names are counted, and passed on to
 * the library that comes next. Arguments travel as up to twelve words, which is what all of these
 * functions take on the machines that the tests run on (x86-64 and AArch64 Linux).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

static _Atomic long counted;

long collectives_counted(void) { return counted; }

typedef uintptr_t W;
typedef int (*Call)(W, W, W, W, W, W, W, W, W, W, W, W);

#define ONE(name)                                                        \
  int name(W a, W b, W c, W d, W e, W f, W g, W h, W i, W j, W k, W l) { \
    static Call next;                                                    \
    if (next == NULL) *(void**)&next = dlsym(RTLD_NEXT, #name);          \
    if (next == NULL) abort();                                           \
    ++counted;                                                           \
    return next(a, b, c, d, e, f, g, h, i, j, k, l);                     \
  }
#define BOTH(name) ONE(MPI_##name) ONE(PMPI_##name)
#define IT(name) BOTH(I##name)

BOTH(Barrier);
BOTH(Bcast);
BOTH(Reduce);
BOTH(Allreduce);
BOTH(Gather);
BOTH(Gatherv);
BOTH(Scatter);
BOTH(Scatterv);
BOTH(Allgather);
BOTH(Allgatherv);
BOTH(Alltoall);
BOTH(Alltoallv);
BOTH(Alltoallw);
BOTH(Reduce_scatter);
BOTH(Reduce_scatter_block);
BOTH(Scan);
BOTH(Exscan);
BOTH(Win_fence);
IT(barrier);
IT(bcast);
IT(reduce);
IT(allreduce);
IT(gather);
IT(gatherv);
IT(scatter);
IT(scatterv);
IT(allgather);
IT(allgatherv);
IT(alltoall);
IT(alltoallv);
IT(alltoallw);
IT(reduce_scatter);
IT(reduce_scatter_block);
IT(scan);
IT(exscan);
