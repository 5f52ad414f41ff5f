/* Collectives of the MPI that this program is linked with. Owns the calls only. */
#include <string.h>

#include "worker.h"

static int start(Bench* b, const char* word, FILE* facts) {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  (void)b, (void)word;
  MPI_Get_library_version(text, &length);
  text[strcspn(text, "\n\"\\")] = 0;
  for (char* c = text; *c; c++) *c = (unsigned char)*c < ' ' ? ' ' : *c;
  fprintf(facts, "\"mpi\": \"%s\"", text);
  return 0;
}

static int call(Bench* b, int k) {
  const int in = (int)b->use.count_in, out = (int)b->use.count_out;
  switch (b->use.collective) {
    case kAllreduce:
      return PMPI_Allreduce(b->use.in[k], b->use.out[k], in, MPI_FLOAT, MPI_SUM, b->world);
    case kBroadcast:
      return PMPI_Bcast(b->use.out[k], out, MPI_FLOAT, 0, b->world);
    case kAllgather:
      return PMPI_Allgather(b->use.in[k], in, MPI_FLOAT, b->use.out[k], in, MPI_FLOAT, b->world);
    case kReduceScatter:
      return PMPI_Reduce_scatter_block(b->use.in[k], b->use.out[k], out, MPI_FLOAT, MPI_SUM,
                                       b->world);
    case kAlltoall:
      return PMPI_Alltoall(b->use.in[k], in / b->size, MPI_FLOAT, b->use.out[k], out / b->size,
                           MPI_FLOAT, b->world);
    default:
      return PMPI_Barrier(b->world);
  }
}

const Contender kMpi = {
    .name = "mpi-c", .collectives = (1u << kCollectives) - 1, .start = start, .call = call};
