/* Calls that a Fortran compiler makes: every name that it may give to a subroutine, all arguments
 * by address, handles as integers, and the addresses that stand for MPI_IN_PLACE and MPI_BOTTOM.
 * For Open MPI, whose Fortran functions an interposer must replace; there may be none here.
 */
#include <dlfcn.h>

#include "check.h"

enum { kCount = 600, kMostRanks = 8 };

extern char mpi_fortran_in_place_, mpi_fortran_bottom_;

typedef MPI_Fint* F;

static void* find(const char* lower, const char* upper, int kind) {
  char name[64];
  static const char* const kEnds[] = {"_", "", "__", "_f08_"};
  snprintf(name, sizeof name, "%s%s", kind < 4 ? lower : upper, kind < 4 ? kEnds[kind] : "");
  void* function = dlsym(RTLD_DEFAULT, name);
  if (function == NULL) fprintf(stderr, "no %s\n", name);
  CHECK(function != NULL);
  return function;
}

static int in[kCount * kMostRanks], out[kCount * kMostRanks], expected[kCount * kMostRanks];

static void fill(void) {
  for (int i = 0; i < kCount * kMostRanks; ++i) {
    in[i] = 100 * rank + i % 89;
    out[i] = expected[i] = -1 - i % 7;
  }
}

static int right(int count) { return memcmp(out, expected, (size_t)count * sizeof *out) == 0; }

static void test_kind(int kind) {
  MPI_Fint world = MPI_Comm_c2f(MPI_COMM_WORLD), type = MPI_Type_c2f(MPI_INTEGER);
  MPI_Fint sum = MPI_Op_c2f(MPI_SUM), count = kCount, error = -1, root = size - 1;
  MPI_Fint counts[kMostRanks], places[kMostRanks];
  for (int r = 0; r < size; ++r) counts[r] = kCount - r, places[r] = (size - 1 - r) * kCount;
  F ierror = kind == 3 ? NULL : &error; /* the module mpi_f08 allows to leave it out */

  void (*allreduce)(void*, void*, F, F, F, F, F) = find("mpi_allreduce", "MPI_ALLREDUCE", kind);
  fill();
  allreduce(in, out, &count, &type, &sum, &world, ierror);
  PMPI_Allreduce(in, expected, kCount, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  CHECK(right(kCount));
  allreduce(&mpi_fortran_in_place_, out, &count, &type, &sum, &world, ierror);
  PMPI_Allreduce(MPI_IN_PLACE, expected, kCount, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  CHECK(right(kCount) && (kind == 3 || error == MPI_SUCCESS));

  void (*bcast)(void*, F, F, F, F, F) = find("mpi_bcast", "MPI_BCAST", kind);
  for (int i = 0; i < kCount; ++i) out[i] = expected[i] = rank + i;
  bcast(out, &count, &type, &root, &world, ierror);
  PMPI_Bcast(expected, kCount, MPI_INT, root, MPI_COMM_WORLD);
  CHECK(right(kCount));

  MPI_Datatype absolute; /* the buffer's address is in the datatype */
  MPI_Aint address;
  const int length = kCount;
  MPI_Get_address(out, &address);
  MPI_Type_create_hindexed(1, &length, &address, MPI_INT, &absolute);
  MPI_Type_commit(&absolute);
  MPI_Fint one = 1, handle = MPI_Type_c2f(absolute);
  for (int i = 0; i < kCount; ++i) out[i] = expected[i] = 3 * rank + i;
  bcast(&mpi_fortran_bottom_, &one, &handle, &root, &world, ierror);
  PMPI_Bcast(expected, kCount, MPI_INT, root, MPI_COMM_WORLD);
  CHECK(right(kCount));
  MPI_Type_free(&absolute);

  void (*barrier)(F, F) = find("mpi_barrier", "MPI_BARRIER", kind);
  barrier(&world, ierror);

  void (*allgather)(void*, F, F, void*, F, F, F, F) = find("mpi_allgather", "MPI_ALLGATHER", kind);
  fill();
  allgather(in, &count, &type, out, &count, &type, &world, ierror);
  PMPI_Allgather(in, kCount, MPI_INT, expected, kCount, MPI_INT, MPI_COMM_WORLD);
  CHECK(right(kCount * size));

  void (*allgatherv)(void*, F, F, void*, F, F, F, F, F) =
      find("mpi_allgatherv", "MPI_ALLGATHERV", kind);
  fill();
  allgatherv(in, &counts[rank], &type, out, counts, places, &type, &world, ierror);
  PMPI_Allgatherv(in, counts[rank], MPI_INT, expected, counts, places, MPI_INT, MPI_COMM_WORLD);
  CHECK(right(kCount * size));

  void (*reduce_scatter)(void*, void*, F, F, F, F, F) =
      find("mpi_reduce_scatter", "MPI_REDUCE_SCATTER", kind);
  fill();
  reduce_scatter(in, out, counts, &type, &sum, &world, ierror);
  PMPI_Reduce_scatter(in, expected, counts, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  CHECK(right(kCount));

  void (*block)(void*, void*, F, F, F, F, F) =
      find("mpi_reduce_scatter_block", "MPI_REDUCE_SCATTER_BLOCK", kind);
  fill();
  block(in, out, &count, &type, &sum, &world, ierror);
  PMPI_Reduce_scatter_block(in, expected, kCount, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  CHECK(right(kCount));
}

int main(int argc, char** argv) {
  start(&argc, &argv);
  CHECK(size <= kMostRanks);
  for (int kind = 0; kind < 5; ++kind) test_kind(kind);
  finish();
  return 0;
}
