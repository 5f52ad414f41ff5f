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
const char* hsgd_interposer_collective(int, uint64_t[4]) __attribute__((weak));

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

/* Rank 0 says for each collective what happened to its calls. */
static inline void tell_collectives(void) {
  uint64_t n[4];
  const char* name;
  if (rank != 0 || hsgd_interposer_collective == NULL) return;
  for (int i = 0; (name = hsgd_interposer_collective(i, n)) != NULL; ++i) {
    printf("%s: taken %llu calls %llu bytes, passed %llu calls %llu bytes\n", name,
           (unsigned long long)n[0], (unsigned long long)n[1], (unsigned long long)n[2],
           (unsigned long long)n[3]);
  }
}

/* Rank 0 says what happened: one line that a test reads. */
static inline void finish(void) {
  if (rank == 0) {
    printf("taken %llu passed %llu\n", (unsigned long long)taken(), (unsigned long long)passed());
  }
  MPI_Finalize();
}

#endif /* CHECK_H_ */
