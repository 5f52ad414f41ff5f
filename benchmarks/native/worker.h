/* What a rank of the C job offers to its candidates, and what it wants of them.
 *
 * Owns the types only. Protocol, buffers, timing and checks are in worker.c; each candidate is a
 * Contender in a file of its own: mpi.c, hsgd.c, deepspeed.c, oneccl.c, and limits.c.
 */
#ifndef BENCHMARKS_NATIVE_WORKER_H_
#define BENCHMARKS_NATIVE_WORKER_H_

#include <mpi.h>
#include <stddef.h>
#include <stdio.h>

enum { kMaxBuffers = 16 };

typedef enum Collective {
  kAllreduce,
  kBroadcast,
  kAllgather,
  kReduceScatter,
  kAlltoall,
  kBarrier,
  kCollectives /* how many */
} Collective;

/* Pairs of buffers for one case. */
typedef struct Buffers {
  Collective collective;
  size_t bytes; /* as ordered */
  int pairs;
  int serial; /* differs whenever the addresses do */
  float* in[kMaxBuffers];
  float* out[kMaxBuffers];
  size_t count_in, count_out; /* floats per buffer */
} Buffers;

/* One rank. Contenders read it, and write `why` when they fail; the rest is worker.c's. */
typedef struct Bench {
  MPI_Comm world;
  int rank, size;
  Buffers use; /* of the case that is measured */
  char why[1024];
} Bench;

typedef struct Contender {
  const char* name;
  unsigned collectives; /* bits, 1 << Collective */
  int in_place;         /* allreduce works on `in`, which is filled again before each batch */
  int unchecked;        /* moves bytes without a result */
  /* Collective; `word` is "" or what the parent has to say. May write facts, as one JSON object
   * without its braces. Returns 0, or fills b->why. */
  int (*start)(Bench* b, const char* word, FILE* facts);
  /* One call on pair k of b->use. Returns 0, or fills b->why. */
  int (*call)(Bench* b, int k);
  /* Largest relative error of its sums, or NULL where they must be exact. */
  double (*tolerance)(void);
  void (*stop)(Bench* b); /* collective; NULL where nothing is held */
  /* A kind of memory of its own, or NULL: collective, returns NULL after filling b->why. */
  void* (*allocate)(Bench* b, size_t count);
  void (*free)(void* memory); /* local */
} Contender;

extern const Contender kMpi, kHsgd, kHsgdArena, kDeepSpeed, kOneCcl, kLine, kStaged, kStagedPast,
    kArena, kArenaPast, kLink;

/* GB/s at which rank 1 reads what rank 0 has just written, and what lies in memory. Where the first
 * is far below the second, the cores share no last-level cache. Both 0 where rank 1 is not on the
 * node of rank 0. Collective. */
void probe_machine(const Bench* b, double* fresh, double* memory);

/* Page-aligned memory of this rank; ends the job where there is none. */
void* bench_allocate(size_t bytes);

#endif /* BENCHMARKS_NATIVE_WORKER_H_ */
