/* How often rank 0 sleeps while it waits for rank 1 in a collective: it does while nothing is under
 * way, and never once it has begun to send, because the message goes on only while it looks.
 */
#define _GNU_SOURCE
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"

enum { kBytes = 4 << 20, kCount = 4096, kLateUs = 300000 };

static float ones[kCount], sums[kCount];
static char message[kBytes];

static long sleeps_in_allreduce(void) {
  struct rusage before, after;
  getrusage(RUSAGE_THREAD, &before);
  MPI_Allreduce(ones, sums, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  getrusage(RUSAGE_THREAD, &after);
  return after.ru_nvcsw - before.ru_nvcsw;
}

int main(int argc, char** argv) {
  start(&argc, &argv);
  for (int i = 0; i < kCount; ++i) ones[i] = 1;
  sleeps_in_allreduce();
  if (rank == 1) usleep(kLateUs);
  long sleeps = sleeps_in_allreduce();
  CHECK(rank == 1 || sleeps >= 5);

  MPI_Request request = MPI_REQUEST_NULL;
  memset(message, rank == 0, kBytes);
  if (rank == 0) MPI_Isend(message, kBytes, MPI_CHAR, 1, 0, MPI_COMM_WORLD, &request);
  if (rank == 1) {
    usleep(kLateUs);
    MPI_Recv(message, kBytes, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }
  sleeps = sleeps_in_allreduce();
  CHECK(rank == 1 || sleeps <= 2); /* the machine may have a reason of its own */
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  CHECK(message[kBytes - 1] == 1);
  finish();
  return 0;
}
