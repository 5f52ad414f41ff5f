/* Communicators come and go in every order, with attributes of the program on them: results stay
 * right, the program's own attribute functions are called for its own copies only, and nothing is
 * left of communicators that are gone.
 */
#include <dirent.h>

#include "check.h"

enum { kCount = 3000, kMany = 200 };

static int copies, deletes;

static int copied(MPI_Comm comm, int key, void* state, void* in, void* out, int* flag) {
  (void)comm, (void)key, (void)state;
  ++copies;
  *(void**)out = in;
  *flag = 1;
  return MPI_SUCCESS;
}

static int deleted(MPI_Comm comm, int key, void* value, void* state) {
  (void)comm, (void)key, (void)value, (void)state;
  ++deletes;
  return MPI_SUCCESS;
}

static void sum_over(MPI_Comm comm) {
  static int ones[kCount], sums[kCount];
  int ranks;
  MPI_Comm_size(comm, &ranks);
  for (int i = 0; i < kCount; ++i) ones[i] = i;
  MPI_Allreduce(ones, sums, kCount, MPI_INT, MPI_SUM, comm);
  CHECK(sums[kCount - 1] == ranks * (kCount - 1));
}

static int open_files(void) {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != NULL) ++count;
  closedir(folder);
  return count;
}

static int mappings_of_ours(void) {
  int count = 0;
  char line[4096];
  FILE* maps = fopen("/proc/self/maps", "r");
  while (fgets(line, sizeof line, maps) != NULL) count += strstr(line, "memfd:hsgd") != NULL;
  fclose(maps);
  return count;
}

static void test_copies_and_attributes(void) {
  int key;
  MPI_Comm first, second;
  MPI_Comm_create_keyval(copied, deleted, &key, NULL);
  MPI_Comm_dup(MPI_COMM_WORLD, &first);
  MPI_Comm_set_attr(first, key, &key);
  sum_over(first);
  CHECK(copies == 0 && deletes == 0);
  MPI_Comm_dup(first, &second);
  CHECK(copies == 1);
  sum_over(second);
  MPI_Comm_free(&first);
  CHECK(deletes == 1);
  sum_over(second);
  MPI_Comm_disconnect(&second);
  CHECK(copies == 1 && deletes == 2);
  MPI_Comm_free_keyval(&key);
}

/* Ranks are in several communicators at once, and call on them in different orders. */
static void test_overlaps(void) {
  MPI_Comm all, others, reversed;
  MPI_Comm_dup(MPI_COMM_WORLD, &all);
  MPI_Comm_split(MPI_COMM_WORLD, rank == 0, rank, &others);
  MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &reversed);
  for (int round = 0; round < 20; ++round) {
    sum_over(all);
    sum_over(others);
    sum_over(reversed);
    sum_over(MPI_COMM_WORLD);
  }
  MPI_Comm_free(&all);
  sum_over(reversed);
  sum_over(others);
  MPI_Comm_free(&reversed);
  MPI_Comm_free(&others);
}

static void test_many(void) {
  MPI_Comm comm;
  const int files = open_files(), mappings = mappings_of_ours();
  for (int i = 0; i < kMany; ++i) {
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    sum_over(comm);
    MPI_Comm_free(&comm);
  }
  CHECK(mappings_of_ours() == mappings);
  CHECK(open_files() <= files);
}

int main(int argc, char** argv) {
  start(&argc, &argv);
  sum_over(MPI_COMM_WORLD); /* what is there from now on is not a leak */
  test_copies_and_attributes();
  test_overlaps();
  test_many();
  MPI_Comm kept; /* not freed: MPI_Finalize finds it alive */
  MPI_Comm_dup(MPI_COMM_WORLD, &kept);
  sum_over(kept);
  finish();
  return 0;
}
