/* What the programs of this folder share: MPI programs without a word about hsgd, that end with an
 * exit code other than 0 when something is wrong, and the interposer's counters where it is there.
 */
#ifndef CHECK_H_
#define CHECK_H_

#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                       \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      fprintf(stderr, "%s:%d: rank %d: not true: %s\n", __FILE__, __LINE__, rank, #condition); \
      MPI_Abort(MPI_COMM_WORLD, 3);                                                            \
    }                                                                                          \
  } while (0)

static int rank, size;

/* The first words of struct hsgd_counters. */
typedef struct {
  uint64_t calls, payload_bytes, intra_bytes, sent_bytes, received_bytes, wait_ns, total_ns;
} counters;

void hsgd_interposer_counters(counters*) __attribute__((weak));
uint64_t hsgd_interposer_passed(void) __attribute__((weak));

static inline uint64_t taken(void) {
  counters now = {0};
  if (hsgd_interposer_counters != NULL) hsgd_interposer_counters(&now);
  return now.calls;
}

static inline uint64_t passed(void) {
  return hsgd_interposer_passed != NULL ? hsgd_interposer_passed() : 0;
}

static inline void start(int* argc, char*** argv) {
  MPI_Init(argc, argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
}

/* Rank 0 says what happened: one line that a test reads. */
static inline void finish(void) {
  if (rank == 0) {
    printf("taken %llu passed %llu\n", (unsigned long long)taken(), (unsigned long long)passed());
  }
  MPI_Finalize();
}

#endif /* CHECK_H_ */
