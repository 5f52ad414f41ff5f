/* MPI_Allreduce of every datatype and op that the two-level path takes: integers equal PMPI's
 * result, floats equal the sum in rank order, bit by bit, on all ranks; a different rank in place
 * each time.
 */
#include "check.h"

/* 0, 1, primes, and around the sizes at which the way changes: 1 KiB, 4 KiB, 128 KiB of bytes to
 * doubles. */
static const int kCounts[] = {0,    1,     31,    127,   128,   129,   255,    256,    257,
                              509,  511,   512,   513,   1021,  1024,  1025,   4093,   4096,
                              4097, 16381, 16384, 16385, 32768, 32771, 131072, 131101, 300007};
enum { kMost = 300007 };

static unsigned random_state;

static unsigned next_random(void) { return random_state = random_state * 1664525u + 1013904223u; }

#define FOLD(op, a, b)                   \
  ((op) == 0   ? (a) + (b)               \
   : (op) == 1 ? ((b) < (a) ? (b) : (a)) \
   : (op) == 2 ? ((b) > (a) ? (b) : (a)) \
               : (a) * (b))

static const MPI_Op* ops(void) {
  static MPI_Op known[4];
  known[0] = MPI_SUM, known[1] = MPI_MIN, known[2] = MPI_MAX, known[3] = MPI_PROD;
  return known;
}

/* Calls with `mine` as input, on one rank in place; the result is in `result` then. */
static void reduce(const void* mine, void* result, int count, int bytes, MPI_Datatype type, int op,
                   int in_place) {
  const void* in = mine;
  if (rank == in_place) {
    memcpy(result, mine, (size_t)count * bytes);
    in = MPI_IN_PLACE;
  }
  CHECK(MPI_Allreduce(in, result, count, type, ops()[op], MPI_COMM_WORLD) == MPI_SUCCESS);
}

#define INTEGER_TEST(name, type)                                                                   \
  static void name(MPI_Datatype datatype) {                                                        \
    type* mine = malloc(kMost * sizeof(type));                                                     \
    type* result = malloc(kMost * sizeof(type));                                                   \
    type* expected = malloc(kMost * sizeof(type));                                                 \
    for (size_t c = 0; c < sizeof kCounts / sizeof *kCounts; ++c) {                                \
      for (int op = 0; op < 4; ++op) {                                                             \
        const int count = kCounts[c];                                                              \
        for (int i = 0; i < count; ++i) mine[i] = (type)(next_random() >> 8) % (op == 3 ? 3 : 30); \
        reduce(mine, result, count, sizeof(type), datatype, op, (int)(c + op) % size);             \
        PMPI_Allreduce(mine, expected, count, datatype, ops()[op], MPI_COMM_WORLD);                \
        CHECK(memcmp(result, expected, count * sizeof(type)) == 0);                                \
      }                                                                                            \
    }                                                                                              \
    free(mine), free(result), free(expected);                                                      \
  }

#define FLOAT_TEST(name, type)                                                                  \
  static void name(MPI_Datatype datatype) {                                                     \
    type* mine = malloc(kMost * sizeof(type));                                                  \
    type* result = malloc(kMost * sizeof(type));                                                \
    type* all = malloc((size_t)size * kMost * sizeof(type));                                    \
    for (size_t c = 0; c < sizeof kCounts / sizeof *kCounts; ++c) {                             \
      for (int op = 0; op < 4; ++op) {                                                          \
        const int count = kCounts[c];                                                           \
        for (int i = 0; i < count; ++i) mine[i] = (type)(int)next_random() / (type)1e9;         \
        reduce(mine, result, count, sizeof(type), datatype, op, (int)(c + op) % size);          \
        PMPI_Allgather(mine, count, datatype, all, count, datatype, MPI_COMM_WORLD);            \
        const size_t bytes = count * sizeof(type);                                              \
        for (int i = 0; bytes >= in_order_from && i < count; ++i) {                             \
          type folded = all[i];                                                                 \
          for (int r = 1; r < size; ++r) folded = FOLD(op, folded, all[(size_t)r * count + i]); \
          CHECK(memcmp(&result[i], &folded, sizeof folded) == 0);                               \
        }                                                                                       \
        PMPI_Bcast(memcpy(all, result, bytes), count, datatype, 0, MPI_COMM_WORLD);             \
        CHECK(memcmp(all, result, bytes) == 0);                                                 \
      }                                                                                         \
    }                                                                                           \
    free(mine), free(result), free(all);                                                        \
  }

static size_t in_order_from; /* bytes from which the order of the sum is promised */

INTEGER_TEST(test_int8, int8_t)
INTEGER_TEST(test_uint8, uint8_t)
INTEGER_TEST(test_int32, int32_t)
INTEGER_TEST(test_int64, int64_t)
FLOAT_TEST(test_float, float)
FLOAT_TEST(test_double, double)

int main(int argc, char** argv) {
  start(&argc, &argv);
  in_order_from = argc > 1 ? strtoul(argv[1], NULL, 10) : SIZE_MAX;
  random_state = 2026u + 77u * (unsigned)rank;
  test_int8(MPI_INT8_T);
  test_int8(MPI_SIGNED_CHAR);
  test_uint8(MPI_UINT8_T);
  test_uint8(MPI_UNSIGNED_CHAR);
  test_int32(MPI_INT);
  test_int32(MPI_INT32_T);
  test_int64(MPI_INT64_T);
  test_int64(MPI_LONG_LONG);
  test_int64(MPI_LONG);
  test_float(MPI_FLOAT);
  test_double(MPI_DOUBLE);
  finish();
  return 0;
}
