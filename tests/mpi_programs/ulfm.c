/* What a fault-tolerant program sees, with and without hsgd: a communicator that is revoked while
 * ranks wait in a collective, one with a rank that died, and the one that is left. Each rank says
 * how it went and ends without MPI_Finalize, which may wait for the dead (docs/faults.md).
 */
#include <signal.h>
#include <unistd.h>

#include "check.h"

/* Needs mpi.h before it. */
#include <mpi-ext.h>

enum { kCount = 4096, kLateUs = 200000 };

static float ones[kCount], sums[kCount];
static int handled;

static void handle(MPI_Comm* comm, int* code, ...) {
  (void)comm, (void)code;
  ++handled;
}

/* The class of an allreduce's outcome; its error handler was called once if it failed. */
static int reduce(MPI_Comm comm) {
  int kind;
  handled = 0;
  const int code = MPI_Allreduce(ones, sums, kCount, MPI_FLOAT, MPI_SUM, comm);
  CHECK(handled == (code != MPI_SUCCESS));
  MPI_Error_class(code, &kind);
  return kind;
}

static MPI_Comm copy_of_world(MPI_Errhandler handler) {
  MPI_Comm comm;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Comm_set_errhandler(comm, handler);
  return comm;
}

static void test_revoked(MPI_Comm comm, int calls_before) {
  for (int i = 0; i < calls_before; ++i) CHECK(reduce(comm) == MPI_SUCCESS);
  if (rank == 0) {
    usleep(kLateUs);
    MPIX_Comm_revoke(comm);
  }
  CHECK(reduce(comm) == MPIX_ERR_REVOKED);
  CHECK(reduce(comm) == MPIX_ERR_REVOKED);
}

static void test_death(MPI_Comm comm) {
  CHECK(reduce(comm) == MPI_SUCCESS);
  if (rank == size - 1) {
    usleep(kLateUs);
    raise(SIGKILL);
  }
  const int kind = reduce(comm); /* another survivor may have revoked it meanwhile */
  CHECK(kind == MPIX_ERR_PROC_FAILED || kind == MPIX_ERR_REVOKED);
  if (kind == MPIX_ERR_PROC_FAILED) printf("died\n");
  MPIX_Comm_revoke(comm);
  MPI_Comm left;
  CHECK(MPIX_Comm_shrink(comm, &left) == MPI_SUCCESS);
  for (int i = 0; i < 3; ++i) CHECK(reduce(left) == MPI_SUCCESS);
  CHECK(sums[kCount - 1] == size - 1);
}

int main(int argc, char** argv) {
  MPI_Errhandler handler;
  start(&argc, &argv);
  for (int i = 0; i < kCount; ++i) ones[i] = 1;
  MPI_Comm_create_errhandler(handle, &handler);
  test_revoked(copy_of_world(handler), 2);
  test_revoked(copy_of_world(handler), 0);
  test_death(copy_of_world(handler));
  printf("fine\n");
  fflush(stdout);
  _exit(0);
}
