/* Each rank in its turn puts into the window of its neighbour, which already waits in a collective,
 * and is not a party to that. MPI promises that this ends: who is inside a collective carries on
 * with what others do to its windows. The first collective of all is one that hsgd sets up for.
 */
#include "check.h"

enum { kCount = 4096, kRounds = 5 };

static void put_into(int target, MPI_Win window, int value) {
  MPI_Win_lock(MPI_LOCK_EXCLUSIVE, target, 0, window);
  MPI_Put(&value, 1, MPI_INT, target, 0, 1, MPI_INT, window);
  MPI_Win_unlock(target, window);
}

int main(int argc, char** argv) {
  static float ones[kCount], sums[kCount];
  static int box = -1;
  start(&argc, &argv);
  for (int i = 0; i < kCount; ++i) ones[i] = 1;
  MPI_Win window;
  MPI_Win_create(&box, sizeof box, sizeof box, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
  for (int round = 0; round < kRounds; ++round) {
    const int putting = round % size;
    if (rank == putting) put_into((rank + 1) % size, window, round);
    MPI_Allreduce(ones, sums, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == (putting + 1) % size) {
      MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
      CHECK(box == round && sums[kCount - 1] == size);
      MPI_Win_unlock(rank, window);
    }
  }
  MPI_Win_free(&window);
  finish();
  return 0;
}
