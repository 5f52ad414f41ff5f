/* Times calls through MPI_* and through PMPI_* in turn, in one process: with the interposer
 * preloaded the difference is what it costs or saves. One line per case on rank 0.
 *
 *   pairs self|world ROUNDS BATCH_S BYTES...
 *
 * Both give the same result, or the program ends. A time is that of one call, the mean over a batch
 * that begins with a barrier, the largest of the ranks; medians over the rounds.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kBuffers = 3, kMostRounds = 200, kMostRanks = 256 };

static int rank, size;
static MPI_Comm comm;
static float *ins[kBuffers], *outs[kBuffers];
static int counts[kMostRanks], places[kMostRanks], count; /* elements of a rank's larger buffer */
static MPI_Op user_op;

static void add(void* in, void* in_out, int* length, MPI_Datatype* type) {
  (void)type;
  for (int i = 0; i < *length; ++i) ((float*)in_out)[i] += ((float*)in)[i];
}

#define BOTH(name, ...)                                \
  static void name##_mpi(int k) { MPI_##__VA_ARGS__; } \
  static void name##_pmpi(int k) { PMPI_##__VA_ARGS__; }

BOTH(allreduce, Allreduce(ins[k % 3], outs[k % 3], count, MPI_FLOAT, MPI_SUM, comm))
BOTH(allreduce_user, Allreduce(ins[k % 3], outs[k % 3], count, MPI_FLOAT, user_op, comm))
BOTH(allreduce_band, Allreduce(ins[k % 3], outs[k % 3], count, MPI_INT, MPI_BAND, comm))
BOTH(bcast, Bcast(outs[k % 3], count, MPI_FLOAT, k % size, comm))
BOTH(allgather,
     Allgather(ins[k % 3], count / size, MPI_FLOAT, outs[k % 3], count / size, MPI_FLOAT, comm))
BOTH(allgatherv,
     Allgatherv(ins[k % 3], counts[rank], MPI_FLOAT, outs[k % 3], counts, places, MPI_FLOAT, comm))
BOTH(reduce_scatter, Reduce_scatter(ins[k % 3], outs[k % 3], counts, MPI_FLOAT, MPI_SUM, comm))
BOTH(reduce_scatter_block,
     Reduce_scatter_block(ins[k % 3], outs[k % 3], count / size, MPI_FLOAT, MPI_SUM, comm))
BOTH(reduce_scatter_user, Reduce_scatter(ins[k % 3], outs[k % 3], counts, MPI_FLOAT, user_op, comm))
static void barrier_mpi(int k) { (void)k, MPI_Barrier(comm); }
static void barrier_pmpi(int k) { (void)k, PMPI_Barrier(comm); }

typedef void (*call)(int);

static double batch(call make, int calls) {
  double mine, all;
  PMPI_Barrier(comm);
  const double start = MPI_Wtime();
  for (int k = 0; k < calls; ++k) make(k);
  mine = (MPI_Wtime() - start) / calls;
  PMPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MAX, comm);
  return all;
}

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median(double* values, int n) {
  qsort(values, (size_t)n, sizeof *values, ascending);
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* Both ways give the same, whatever was there before. */
static void verify(const char* name, size_t bytes, call mpi, call pmpi) {
  char* kept = malloc(bytes + 64);
  for (int way = 0; way < 2; ++way) {
    for (size_t i = 0; i < bytes / sizeof(float); ++i) outs[0][i] = (float)(rank + (int)(i % 5));
    if (way == 0) mpi(0), memcpy(kept, outs[0], bytes);
  }
  pmpi(0);
  if (memcmp(kept, outs[0], bytes) != 0) {
    fprintf(stderr, "rank %d: %s of %zu bytes: MPI and PMPI differ\n", rank, name, bytes);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  free(kept);
}

static void compare(const char* name, size_t bytes, call mpi, call pmpi, int rounds,
                    double batch_s) {
  static double times[2][kMostRounds];
  verify(name, bytes, mpi, pmpi);
  batch(mpi, 3), batch(pmpi, 3);
  double once = batch(pmpi, 10) + batch(mpi, 10);
  int calls = (int)(2 * batch_s / once);
  calls = calls < 2 ? 2 : calls > 100000 ? 100000 : calls;
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < 2; ++i) {
      const int which = (i + round) % 2;
      times[which][round] = batch(which ? pmpi : mpi, calls);
    }
  }
  if (rank == 0) {
    const double mpi_ns = 1e9 * median(times[0], rounds), pmpi_ns = 1e9 * median(times[1], rounds);
    printf("{\"collective\": \"%s\", \"bytes\": %zu, \"mpi_ns\": %.2f, \"pmpi_ns\": %.2f}\n", name,
           bytes, mpi_ns, pmpi_ns);
    fflush(stdout);
  }
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc < 5) return 2;
  comm = strcmp(argv[1], "self") == 0 ? MPI_COMM_SELF : MPI_COMM_WORLD;
  const int rounds = atoi(argv[2]);
  const double batch_s = atof(argv[3]);
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  if (rounds < 1 || rounds > kMostRounds || size > kMostRanks) return 2;
  MPI_Op_create(add, 1, &user_op);
  for (int arg = 4; arg < argc; ++arg) {
    const size_t bytes = strtoul(argv[arg], NULL, 10);
    count = (int)(bytes / sizeof(float));
    for (int i = 0; i < size; ++i) counts[i] = count / size, places[i] = i * (count / size);
    for (int i = 0; i < kBuffers; ++i) {
      ins[i] = malloc(bytes + 64), outs[i] = malloc(bytes + 64);
      memset(outs[i], 0, bytes + 64);
      for (int k = 0; k < count; ++k) ins[i][k] = (float)(rank + k % 7);
    }
#define COMPARE(name) compare(#name, bytes, name##_mpi, name##_pmpi, rounds, batch_s)
    COMPARE(allreduce), COMPARE(allreduce_user), COMPARE(allreduce_band), COMPARE(bcast);
    COMPARE(allgather), COMPARE(allgatherv), COMPARE(reduce_scatter);
    COMPARE(reduce_scatter_block), COMPARE(reduce_scatter_user), COMPARE(barrier);
    for (int i = 0; i < kBuffers; ++i) free(ins[i]), free(outs[i]);
  }
  MPI_Op_free(&user_op);
  MPI_Finalize();
  return 0;
}
