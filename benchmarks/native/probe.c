/* The state of the machine: whether two cores share a last-level cache. Owns nothing. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "worker.h"

enum { kProbeBytes = 256 << 10, kProbeRepeats = 9, kProbeBlocks = 128 };

/* Moves this thread to the core number `index` of those in `all`. */
static void stay_on(const cpu_set_t* all, int index) {
  for (int core = 0; core < CPU_SETSIZE; core++) {
    if (!CPU_ISSET(core, all) || index-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
}

static uint64_t read_all(const uint64_t* data) {
  uint64_t sum = 0;
  for (size_t i = 0; i < kProbeBytes / sizeof *data; i++) sum += data[i];
  return sum;
}

void probe_machine(const Bench* b, double* fresh, double* memory) {
  double found[2] = {0, 0};
  MPI_Comm node;
  int members, lowest = b->rank;
  MPI_Comm_split_type(b->world, MPI_COMM_TYPE_SHARED, b->rank, MPI_INFO_NULL, &node);
  MPI_Comm_size(node, &members);
  MPI_Bcast(&lowest, 1, MPI_INT, 0, node);
  if (lowest == 0 && members > 1) {
    MPI_Win window;
    MPI_Aint bytes;
    int unit, local;
    uint64_t *mine, *shared, sum = 0;
    uint64_t* cold = bench_allocate((size_t)kProbeBytes * kProbeBlocks);
    cpu_set_t before;
    MPI_Comm_rank(node, &local);
    sched_getaffinity(0, sizeof before, &before);
    if (local < 2) stay_on(&before, local); /* or both might run on one core */
    MPI_Win_allocate_shared(local == 0 ? kProbeBytes : 0, 1, MPI_INFO_NULL, node, &mine, &window);
    MPI_Win_shared_query(window, 0, &bytes, &unit, &shared);
    if (local == 1) memset(cold, 1, (size_t)kProbeBytes * kProbeBlocks);
    for (int i = 0; i < kProbeRepeats; i++) {
      if (local == 0) memset(shared, i, kProbeBytes);
      MPI_Barrier(node);
      if (local == 1) {
        const double t0 = MPI_Wtime();
        sum += read_all(shared);
        const double t1 = MPI_Wtime();
        sum += read_all(cold + (size_t)i * (kProbeBytes / sizeof *cold));
        const double t2 = MPI_Wtime();
        const double rates[2] = {kProbeBytes / (t1 - t0) * 1e-9, kProbeBytes / (t2 - t1) * 1e-9};
        for (int k = 0; k < 2; k++) found[k] = rates[k] > found[k] ? rates[k] : found[k];
      }
      MPI_Barrier(node);
    }
    __asm__ volatile("" ::"r"(sum));
    sched_setaffinity(0, sizeof before, &before);
    MPI_Win_free(&window);
    free(cold);
  }
  MPI_Comm_free(&node);
  MPI_Allreduce(MPI_IN_PLACE, found, 2, MPI_DOUBLE, MPI_MAX, b->world);
  *fresh = found[0];
  *memory = found[1];
}
