/* A rank that lives but does not come is no failed process: not on its node, whose deadline passes,
 * and not on the other node, which hears of that before its own deadline.
 */
#include <unistd.h>

#include "check.h"

/* Needs mpi.h before it. */
#include <mpi-ext.h>

enum { kCount = 4096, kLateUs = 500000 };

int main(int argc, char** argv) {
  static float ones[kCount], sums[kCount];
  int kind = MPI_SUCCESS;
  start(&argc, &argv);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  CHECK(MPI_Allreduce(ones, sums, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD) == MPI_SUCCESS);
  if (rank < size / 2) usleep(kLateUs);
  if (rank < size - 1) {
    MPI_Error_class(MPI_Allreduce(ones, sums, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD), &kind);
    CHECK(kind == MPI_ERR_OTHER);
    printf("fine\n");
    fflush(stdout);
  }
  sleep(rank < size - 1 ? 5 : 8); /* one that ends without MPI_Finalize is a failed process */
  _exit(0);
}
