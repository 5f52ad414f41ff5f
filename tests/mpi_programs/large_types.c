/* Broadcasts of datatypes that were made with MPI 4's large counts, packed and with gaps. */
#include "check.h"

enum { kRows = 300, kColumns = 10 };
static int data[kRows * kColumns];

static void check_broadcast(MPI_Datatype type, int column) {
  MPI_Type_commit(&type);
  for (int root = 0; root < 2; ++root) {
    for (int i = 0; i < kRows * kColumns; ++i) data[i] = rank == root ? i : -1;
    CHECK(MPI_Bcast(data, 1, type, root, MPI_COMM_WORLD) == MPI_SUCCESS);
    CHECK(data[kColumns * (kRows - 1)] == kColumns * (kRows - 1));
    CHECK(rank == root || !column || data[1] == -1);
  }
  MPI_Type_free(&type);
}

int main(int argc, char** argv) {
  start(&argc, &argv);
  MPI_Datatype rows, column;
#if MPI_VERSION >= 4
  MPI_Type_contiguous_c(kRows * kColumns, MPI_INT, &rows);
  MPI_Type_vector_c(kRows, 1, kColumns, MPI_INT, &column);
#else
  MPI_Type_contiguous(kRows * kColumns, MPI_INT, &rows);
  MPI_Type_vector(kRows, 1, kColumns, MPI_INT, &column);
#endif
  check_broadcast(rows, 0);
  check_broadcast(column, 1);
  finish();
  return 0;
}
