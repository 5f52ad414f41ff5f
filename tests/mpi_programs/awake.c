/* awake CORES
 * How often rank 0 sleeps while it waits for rank 1 in a collective: it does while nothing is under
 * way, until which rank 1 waits, and never once it has begun to send, because the message goes on
 * only while it looks; that is where the ranks have a core each.
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

/* So far, of the main thread of a process. */
static long sleeps_of(int pid) {
  char path[64], line[256];
  long sleeps = -1;
  snprintf(path, sizeof path, "/proc/%d/status", pid);
  FILE* status = fopen(path, "r");
  CHECK(status != NULL);
  while (fgets(line, sizeof line, status) != NULL) {
    if (sscanf(line, "voluntary_ctxt_switches: %ld", &sleeps) == 1) break;
  }
  fclose(status);
  CHECK(sleeps >= 0);
  return sleeps;
}

static void wait_until_it_slept(int pid) {
  const long enough = sleeps_of(pid) + 5;
  while (sleeps_of(pid) < enough) usleep(1000);
}

int main(int argc, char** argv) {
  start(&argc, &argv);
  const int core_each = argc > 1 && atoi(argv[1]) >= size;
  for (int i = 0; i < kCount; ++i) ones[i] = 1;
  sleeps_in_allreduce();
  int pid = getpid();
  MPI_Bcast(&pid, 1, MPI_INT, 0, MPI_COMM_WORLD); /* a message of the program would count */
  if (rank == 1) wait_until_it_slept(pid);
  long sleeps = sleeps_in_allreduce();
  CHECK(rank == 1 || sleeps >= 1);

  MPI_Request request = MPI_REQUEST_NULL;
  memset(message, rank == 0, kBytes);
  if (rank == 0) MPI_Isend(message, kBytes, MPI_CHAR, 1, 0, MPI_COMM_WORLD, &request);
  if (rank == 1) {
    usleep(kLateUs);
    MPI_Recv(message, kBytes, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  }
  sleeps = sleeps_in_allreduce();
  CHECK(rank == 1 || !core_each || sleeps <= 2); /* the machine may have a reason of its own */
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  CHECK(message[kBytes - 1] == 1);
  finish();
  return 0;
}
