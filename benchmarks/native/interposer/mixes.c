/* Programs that mix collectives which the interposer takes with what goes on beside them: messages,
 * windows, non-blocking collectives, short-lived communicators, pauses. Each mix is made through
 * MPI_* and through PMPI_* in turn, in one process. One line per mix on rank 0.
 *
 *   mixes ROUNDS
 *
 * Results are checked in every round. A time is that of one round, the largest of the ranks;
 * medians over the rounds.
 */
#define _GNU_SOURCE
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kMostRounds = 400, kCount = 4096, kMessage = 16 << 20, kSmall = 512, kPuts = 200 };

static int rank, size, right, left;
static MPI_Comm world;
static float ones[kCount], sums[kCount];
static char *out, *in;
static MPI_Win window;

/* All MPI calls of a mix go through one of two tables. */
typedef struct {
  int (*allreduce)(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm);
  int (*bcast)(void*, int, MPI_Datatype, int, MPI_Comm);
  int (*isend)(const void*, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request*);
  int (*irecv)(void*, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request*);
  int (*iallreduce)(const void*, void*, int, MPI_Datatype, MPI_Op, MPI_Comm, MPI_Request*);
} calls;

static const calls kMpi = {MPI_Allreduce, MPI_Bcast, MPI_Isend, MPI_Irecv, MPI_Iallreduce};
static const calls kPmpi = {PMPI_Allreduce, PMPI_Bcast, PMPI_Isend, PMPI_Irecv, PMPI_Iallreduce};

static void check(int good, const char* what) {
  if (good) return;
  fprintf(stderr, "rank %d: %s: wrong result\n", rank, what);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

static void reduce(const calls* mpi, int count, MPI_Comm comm) {
  mpi->allreduce(ones, sums, count, MPI_FLOAT, MPI_SUM, comm);
  check(sums[count - 1] == (float)size, "allreduce");
}

/* A large message around the ring, under way during an allreduce. */
static void messages(const calls* mpi) {
  MPI_Request requests[2];
  memset(in, 0, 64);
  mpi->irecv(in, kMessage, MPI_CHAR, left, 1, world, &requests[0]);
  mpi->isend(out, kMessage, MPI_CHAR, right, 1, world, &requests[1]);
  reduce(mpi, kCount, world);
  MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
  check(in[0] == 1 && in[kMessage - 1] == 1, "messages");
}

/* The others receive before they come to the allreduce in which rank 0 waits. */
static void late_receivers(const calls* mpi) {
  MPI_Request request = MPI_REQUEST_NULL;
  if (rank == 0) mpi->isend(out, kMessage, MPI_CHAR, 1, 2, world, &request);
  if (rank == 1) MPI_Recv(in, kMessage, MPI_CHAR, 0, 2, world, MPI_STATUS_IGNORE);
  reduce(mpi, kCount, world);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
}

/* The last rank puts into a window of rank 0, which waits in an allreduce. */
static void puts_into_window(const calls* mpi) {
  if (rank == size - 1) {
    MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, window);
    for (int i = 0; i < kPuts; ++i)
      MPI_Put(out, 1024, MPI_CHAR, 0, i * 1024, 1024, MPI_CHAR, window);
    MPI_Win_unlock(0, window);
  }
  reduce(mpi, kCount, world);
}

static void nonblocking(const calls* mpi) {
  static float more[kCount];
  MPI_Request request;
  mpi->iallreduce(ones, more, kCount, MPI_FLOAT, MPI_SUM, world, &request);
  for (int i = 0; i < 4; ++i) reduce(mpi, kCount, world);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  check(more[kCount - 1] == (float)size, "iallreduce");
}

static void short_lived(const calls* mpi) {
  MPI_Comm comm;
  MPI_Comm_dup(world, &comm);
  reduce(mpi, kSmall, comm);
  mpi->bcast(sums, kSmall, MPI_FLOAT, 0, comm);
  MPI_Comm_free(&comm);
}

/* Ranks come late in turn. */
static void pauses(const calls* mpi) {
  static int turn;
  if (turn++ / 2 % size == rank) usleep(5000);
  reduce(mpi, kCount, world);
}

/* Many small messages, and collectives of all sizes between them. */
static void halo(const calls* mpi) {
  MPI_Request requests[2];
  for (int i = 0; i < 10; ++i) {
    mpi->irecv(in, 2048, MPI_CHAR, left, 3, world, &requests[0]);
    mpi->isend(out, 2048, MPI_CHAR, right, 3, world, &requests[1]);
    reduce(mpi, kSmall << (i % 4), world);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
  }
}

static double once(void (*mix)(const calls*), const calls* mpi) {
  double mine, all;
  PMPI_Barrier(world);
  const double start = MPI_Wtime();
  mix(mpi);
  mine = MPI_Wtime() - start;
  PMPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MAX, world);
  return all;
}

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void compare(const char* name, void (*mix)(const calls*), int rounds) {
  static double times[2][kMostRounds];
  for (int i = 0; i < 3; ++i) once(mix, &kMpi), once(mix, &kPmpi);
  for (int round = 0; round < rounds; ++round) {
    for (int i = 0; i < 2; ++i) {
      const int which = (i + round) % 2;
      times[which][round] = once(mix, which ? &kPmpi : &kMpi);
    }
  }
  for (int i = 0; i < 2; ++i) qsort(times[i], (size_t)rounds, sizeof(double), ascending);
  if (rank != 0) return;
  printf("{\"mix\": \"%s\", \"mpi_us\": %.2f, \"pmpi_us\": %.2f}\n", name,
         1e6 * times[0][rounds / 2], 1e6 * times[1][rounds / 2]);
  fflush(stdout);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  world = MPI_COMM_WORLD;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &size);
  const int rounds = argc > 1 ? atoi(argv[1]) : 0;
  if (rounds < 1 || rounds > kMostRounds || size < 2) return 2;
  right = (rank + 1) % size, left = (rank + size - 1) % size;
  out = malloc(kMessage), in = malloc(kMessage);
  memset(out, 1, kMessage), memset(in, 0, kMessage);
  for (int i = 0; i < kCount; ++i) ones[i] = 1;
  compare("pauses", pauses, rounds / 4 + 1); /* while no message was ever started */
  compare("short_lived", short_lived, rounds);
  compare("halo", halo, rounds);
  compare("nonblocking", nonblocking, rounds);
  compare("messages", messages, rounds / 4 + 1);
  compare("late_receivers", late_receivers, rounds / 4 + 1);
  compare("pauses_with_messages", pauses, rounds / 4 + 1);
  void* memory;
  MPI_Win_allocate(1024 * kPuts, 1, MPI_INFO_NULL, world, &memory, &window);
  compare("puts", puts_into_window, rounds / 2 + 1);
  MPI_Win_free(&window);
  MPI_Finalize();
  return 0;
}
