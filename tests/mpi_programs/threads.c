/* Two threads, each with a communicator of its own; each makes and frees more of them meanwhile. */
#include <pthread.h>

#include "check.h"

enum { kCount = 40000, kRounds = 60 };

static void* work(void* argument) {
  MPI_Comm comm = *(MPI_Comm*)argument;
  double* mine = malloc(kCount * sizeof(double));
  double* sums = malloc(kCount * sizeof(double));
  for (int round = 0; round < kRounds; ++round) {
    const int count = 1 + (kCount - 1) * (round % 7) / 6;
    for (int i = 0; i < count; ++i) mine[i] = rank + round;
    MPI_Allreduce(mine, sums, count, MPI_DOUBLE, MPI_SUM, comm);
    const double expected = size * (size - 1) / 2.0 + (double)size * round;
    for (int i = 0; i < count; ++i) CHECK(sums[i] == expected);
    if (round % 10 == 9) {
      MPI_Comm other;
      MPI_Comm_dup(comm, &other);
      MPI_Allreduce(mine, sums, kCount / 2, MPI_DOUBLE, MPI_MAX, other);
      MPI_Comm_free(&other);
    }
  }
  free(mine), free(sums);
  return NULL;
}

int main(int argc, char** argv) {
  int level;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  CHECK(level == MPI_THREAD_MULTIPLE);
  MPI_Comm comms[2];
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) MPI_Comm_dup(MPI_COMM_WORLD, &comms[i]);
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], NULL, work, &comms[i]);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  for (int i = 0; i < 2; ++i) MPI_Comm_free(&comms[i]);
  finish();
  return 0;
}
