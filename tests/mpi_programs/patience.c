/* Broadcasts on one communicator: the first ones pass through, because its set-up would cost more
 * than they gain; then they are taken, and barriers with them. On others that come and go all pass,
 * reductions too.
 */
#include "check.h"

enum { kCount = 4000, kCalls = 700, kMany = 50 };

static void bcast_over(MPI_Comm comm, int calls) {
  static int data[kCount];
  for (int call = 0; call < calls; ++call) {
    const int root = call % size;
    for (int i = 0; i < kCount; ++i) data[i] = rank == root ? call + i : -1;
    MPI_Bcast(data, kCount, MPI_INT, root, comm);
    CHECK(data[0] == call && data[kCount - 1] == call + kCount - 1);
    MPI_Barrier(comm);
  }
}

static void sum_over(MPI_Comm comm) {
  static int ones[kCount], sums[kCount];
  for (int i = 0; i < kCount; ++i) ones[i] = 1;
  MPI_Allreduce(ones, sums, kCount, MPI_INT, MPI_SUM, comm);
  CHECK(sums[kCount - 1] == size);
}

int main(int argc, char** argv) {
  start(&argc, &argv);
  for (int i = 0; i < kMany; ++i) {
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    bcast_over(comm, 2);
    sum_over(comm);
    MPI_Comm_free(&comm);
  }
  CHECK(taken() == 0);
  bcast_over(MPI_COMM_WORLD, kCalls);
  finish();
  return 0;
}
