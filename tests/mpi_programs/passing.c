/* Calls that MPI shall make itself: small ones, Horovod's bit operations, user ops, pairs, derived
 * datatypes, types that the core does not know, communicators of one rank, intercommunicators. With
 * an argument also mistakes, where MPI reports them in its own way.
 */
#include "check.h"

enum { kCount = 5000 };

static void add_pairs(void* in, void* in_out, int* count, MPI_Datatype* type) {
  (void)type;
  for (int i = 0; i < 2 * *count; ++i) ((int*)in_out)[i] += ((int*)in)[i];
}

static void test_control_plane(void) {
  int64_t words[17];
  for (int call = 0; call < 20; ++call) {
    for (int i = 0; i < 17; ++i) words[i] = ~(INT64_C(1) << ((rank + i) % 64));
    MPI_Allreduce(MPI_IN_PLACE, words, 17, MPI_LONG_LONG_INT, MPI_BAND, MPI_COMM_WORLD);
    int64_t expected = ~INT64_C(0);
    for (int r = 0; r < size; ++r) expected &= ~(INT64_C(1) << r);
    CHECK(words[0] == expected);
  }
}

static void test_ops_and_types(void) {
  static int64_t bits[kCount];
  static unsigned words[kCount], word_sums[kCount];
  static int pairs[2 * kCount], pair_sums[2 * kCount];
  for (int i = 0; i < kCount; ++i) bits[i] = ~(INT64_C(1) << rank), words[i] = (unsigned)rank;
  for (int i = 0; i < 2 * kCount; ++i) pairs[i] = rank;
  MPI_Allreduce(MPI_IN_PLACE, bits, kCount, MPI_INT64_T, MPI_BAND, MPI_COMM_WORLD);
  CHECK((bits[kCount - 1] & ((INT64_C(1) << size) - 1)) == 0);
  MPI_Allreduce(words, word_sums, kCount, MPI_UNSIGNED, MPI_SUM, MPI_COMM_WORLD);
  CHECK(word_sums[kCount - 1] == (unsigned)(size * (size - 1) / 2));
  MPI_Allreduce(pairs, pair_sums, kCount, MPI_2INT, MPI_MAXLOC, MPI_COMM_WORLD);
  CHECK(pair_sums[0] == size - 1);

  MPI_Datatype pair;
  MPI_Op add;
  MPI_Type_contiguous(2, MPI_INT, &pair);
  MPI_Type_commit(&pair);
  MPI_Op_create(add_pairs, 1, &add);
  MPI_Allreduce(pairs, pair_sums, kCount, pair, add, MPI_COMM_WORLD);
  CHECK(pair_sums[2 * kCount - 1] == size * (size - 1) / 2);
  MPI_Op_free(&add);
  MPI_Type_free(&pair);
}

static void test_communicators(void) {
  static float ones[kCount], sums[kCount];
  for (int i = 0; i < kCount; ++i) ones[i] = 1;
  MPI_Allreduce(ones, sums, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_SELF);
  CHECK(sums[kCount - 1] == 1);

  MPI_Comm half, between;
  const int low = rank < size / 2;
  MPI_Comm_split(MPI_COMM_WORLD, low, rank, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, low ? size / 2 : 0, 9, &between);
  MPI_Allreduce(ones, sums, kCount, MPI_FLOAT, MPI_SUM, between);
  CHECK(sums[kCount - 1] == (low ? size - size / 2 : size / 2));
  MPI_Comm_free(&between);
  MPI_Comm_free(&half);
}

static int class_of(int code) {
  int error_class;
  MPI_Error_class(code, &error_class);
  return error_class;
}

/* MPI says the same about a mistake with and without us. */
static void mistake(void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  const int code = MPI_Allreduce(in, out, count, type, op, comm);
  CHECK(code != MPI_SUCCESS);
  CHECK(class_of(code) == class_of(PMPI_Allreduce(in, out, count, type, op, comm)));
}

/* The same of any call: its name without MPI_ and its arguments. */
#define MISTAKE(call, ...)                                       \
  do {                                                           \
    const int code = MPI_##call(__VA_ARGS__);                    \
    CHECK(code != MPI_SUCCESS);                                  \
    CHECK(class_of(code) == class_of(PMPI_##call(__VA_ARGS__))); \
  } while (0)

static void test_mistakes(void) {
  static float a[kCount], b[kCount];
  const MPI_Comm world = MPI_COMM_WORLD;
  int counts[8] = {kCount, -1}, places[8] = {0};
  MPI_Comm_set_errhandler(world, MPI_ERRORS_RETURN);
  mistake(a, b, -1, MPI_FLOAT, MPI_SUM, world);
  mistake(a, b, kCount, MPI_DATATYPE_NULL, MPI_SUM, world);
  mistake(a, b, kCount, MPI_FLOAT, MPI_OP_NULL, world);
  mistake(a, b, kCount, MPI_FLOAT, MPI_BAND, world);
  mistake(a, b, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_NULL);
  mistake(a, MPI_IN_PLACE, kCount, MPI_FLOAT, MPI_SUM, world);
  MISTAKE(Bcast, a, -1, MPI_FLOAT, 0, world);
  MISTAKE(Bcast, a, kCount, MPI_DATATYPE_NULL, 0, world);
  MISTAKE(Bcast, a, kCount, MPI_FLOAT, size, world);
  MISTAKE(Bcast, a, kCount, MPI_FLOAT, -7, world);
  MISTAKE(Bcast, a, kCount, MPI_FLOAT, 0, MPI_COMM_NULL);
  MISTAKE(Barrier, MPI_COMM_NULL);
  MISTAKE(Allgather, a, kCount, MPI_FLOAT, b, -1, MPI_FLOAT, world);
  MISTAKE(Allgather, a, -1, MPI_FLOAT, b, kCount / size, MPI_FLOAT, world);
  MISTAKE(Allgather, a, 1, MPI_DATATYPE_NULL, b, kCount / size, MPI_FLOAT, world);
  MISTAKE(Allgatherv, a, 1, MPI_FLOAT, b, counts, places, MPI_DATATYPE_NULL, world);
  MISTAKE(Reduce_scatter, a, b, counts, MPI_FLOAT, MPI_SUM, world);
  MISTAKE(Reduce_scatter, a, b, counts, MPI_FLOAT, MPI_SUM, MPI_COMM_NULL);
  MISTAKE(Reduce_scatter_block, a, b, -1, MPI_FLOAT, MPI_SUM, world);
  MISTAKE(Reduce_scatter_block, a, b, kCount / size, MPI_FLOAT, MPI_OP_NULL, world);
}

int main(int argc, char** argv) {
  start(&argc, &argv);
  float one = 1, sum = 0;
  MPI_Allreduce(&one, &sum, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  CHECK(sum == size);
  MPI_Allreduce(NULL, NULL, 0, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  test_control_plane();
  test_ops_and_types();
  test_communicators();
  if (argc > 1) test_mistakes();
  CHECK(taken() == 0);
  finish();
  return 0;
}
