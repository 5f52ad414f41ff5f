/* Each collective once with each of five payloads in bytes: below the threshold, above it, and
 * larger, where MPI may be as fast. Its result is that of PMPI.
 */
#include "check.h"

enum { kSizes = 5, kMost = 1048584, kMostRanks = 8 };

static const int kBytes[kSizes] = {480, 1536, 30720, 67584, kMost};

static int in[kMost / 4 + 1], out[kMost / 4], expected[kMost / 4];

static void add(void* from, void* to, int* count, MPI_Datatype* type) {
  (void)type;
  for (int i = 0; i < *count; ++i) ((int*)to)[i] += ((int*)from)[i];
}

static void same(int count) { CHECK(memcmp(out, expected, (size_t)count * sizeof(int)) == 0); }

int main(int argc, char** argv) {
  MPI_Op op;
  int counts[kMostRanks], places[kMostRanks];
  const MPI_Comm world = MPI_COMM_WORLD;
  start(&argc, &argv);
  CHECK(size <= kMostRanks);
  MPI_Op_create(add, 1, &op);
  for (int i = 0; i <= kMost / 4; ++i) in[i] = rank * 1000 + i % 997;
  for (int s = 0; s < kSizes; ++s) {
    const int n = kBytes[s] / 4;
    MPI_Allreduce(in, out, n, MPI_INT, MPI_SUM, world);
    PMPI_Allreduce(in, expected, n, MPI_INT, MPI_SUM, world);
    same(n);
  }
  for (int s = 0; s < kSizes; ++s) {
    const int n = kBytes[s] / 4, block = n / size;
    for (int r = 0; r < size; ++r) counts[r] = block, places[r] = r * block;
    MPI_Allreduce(in, out, n, MPI_INT, op, world);
    PMPI_Allreduce(in, expected, n, MPI_INT, op, world);
    same(n);
    MPI_Bcast(out, n, MPI_INT, size - 1, world);
    PMPI_Bcast(expected, n, MPI_INT, size - 1, world);
    same(n);
    MPI_Allgather(in, block, MPI_INT, out, block, MPI_INT, world);
    PMPI_Allgather(in, block, MPI_INT, expected, block, MPI_INT, world);
    same(n);
    MPI_Allgatherv(in + 1, block, MPI_INT, out, counts, places, MPI_INT, world);
    PMPI_Allgatherv(in + 1, block, MPI_INT, expected, counts, places, MPI_INT, world);
    same(n);
    MPI_Reduce_scatter(in, out, counts, MPI_INT, MPI_SUM, world);
    PMPI_Reduce_scatter(in, expected, counts, MPI_INT, MPI_SUM, world);
    same(block);
    MPI_Reduce_scatter_block(in + 1, out, block, MPI_INT, MPI_SUM, world);
    PMPI_Reduce_scatter_block(in + 1, expected, block, MPI_INT, MPI_SUM, world);
    same(block);
  }
  MPI_Op_free(&op);
  tell_collectives();
  finish();
  return 0;
}
