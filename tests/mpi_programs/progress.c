/* Rank 0 waits in a collective while rank 1 receives, before it comes there, a large message that
 * rank 0 began to send before. MPI promises that this ends: who is inside a collective carries on
 * with what was started earlier.
 */
#include "check.h"

enum { kBytes = 2 << 20, kCount = 4096 };

int main(int argc, char** argv) {
  static char message[kBytes];
  static float ones[kCount], sums[kCount];
  start(&argc, &argv);
  for (int i = 0; i < kCount; ++i) ones[i] = 1;
  MPI_Request request = MPI_REQUEST_NULL;
  memset(message, rank == 0, kBytes);
  MPI_Allreduce(ones, sums, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0) MPI_Isend(message, kBytes, MPI_CHAR, 1, 0, MPI_COMM_WORLD, &request);
  if (rank == 1) MPI_Recv(message, kBytes, MPI_CHAR, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  MPI_Allreduce(ones, sums, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  CHECK(sums[kCount - 1] == size && (rank > 1 || message[kBytes - 1] == 1));
  finish();
  return 0;
}
