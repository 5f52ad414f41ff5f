/* The ranks that are given come late to their first collective, and to a later one: MPI lets them,
 * for hours if need be. The default deadline of hsgd is made short here, which no setting of a
 * user does.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>

#include "check.h"

enum { kCount = 4096 };

/* In place of the core's own function. The second word of the options is the deadline. */
__attribute__((visibility("default"))) void hsgd_options_default(double* options) {
  void* core = dlopen("libhsgd_core.so", RTLD_LAZY | RTLD_NOLOAD);
  void (*real)(double*);
  *(void**)&real = dlsym(core, "hsgd_options_default");
  real(options);
  options[1] = 0.5;
}

int main(int argc, char** argv) {
  static float ones[kCount], sums[kCount];
  start(&argc, &argv);
  for (int i = 0; i < kCount; ++i) ones[i] = 1;
  int is_late = 0;
  for (int i = 1; i < argc; ++i) is_late |= atoi(argv[i]) == rank;
  for (int round = 0; round < 2; ++round) {
    if (is_late) sleep(2);
    MPI_Allreduce(ones, sums, kCount, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    CHECK(sums[kCount - 1] == size);
  }
  finish();
  return 0;
}
