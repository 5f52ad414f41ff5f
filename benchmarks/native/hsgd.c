/* hsgd through its C interface, with private buffers and with shared ones. Owns the communicator of
 * both and the shared buffers.
 */
#include <stddef.h>

#include "hsgd_mpi.h"
#include "worker.h"

enum { kMaxRanks = 256 };
static hsgd_comm* comm;
static double rounding; /* largest relative error of a sum of numbers above 0 */
static hsgd_buffer* shared[2 * kMaxBuffers];

static int start(Bench* b, const char* word, FILE* facts) {
  hsgd_error err = {0};
  hsgd_options options;
  (void)word;
  if (comm != NULL) return 0;
  if (hsgd_options_from_env(&options, &err) ||
      hsgd_mpi_comm_create(&b->world, &options, &comm, &err)) {
    snprintf(b->why, sizeof b->why, "%s", err.message);
    return 1;
  }
  if (options.wire_dtype != HSGD_FLOAT32) rounding = 2.0 / 256; /* partial sums, and the result */
  hsgd_topology t;
  hsgd_comm_topology(comm, &t);
  fprintf(facts, "\"nodes\": %d, \"store\": \"%s\", \"kernels\": \"%s\"", t.node_count,
          t.nontemporal ? "nontemporal" : "ordinary", hsgd_simd_name());
  return 0;
}

static const uint64_t* fill(uint64_t* blocks, const Bench* b, size_t elements) {
  for (int r = 0; r < b->size; r++) blocks[r] = elements;
  return blocks;
}

static int call(Bench* b, int k) {
  static uint64_t blocks[kMaxRanks];
  const size_t block = b->use.count_in < b->use.count_out ? b->use.count_in : b->use.count_out;
  hsgd_error err;
  int code;
  switch (b->use.collective) {
    case kAllreduce:
      code = hsgd_comm_allreduce(comm, b->use.in[k], b->use.out[k], b->use.count_in, HSGD_FLOAT32,
                                 HSGD_SUM, NULL, &err);
      break;
    case kBroadcast:
      code =
          hsgd_comm_broadcast(comm, b->use.out[k], b->use.count_out, HSGD_FLOAT32, 0, NULL, &err);
      break;
    case kAllgather:
      code = hsgd_comm_allgather(comm, b->use.in[k], b->use.out[k], fill(blocks, b, block),
                                 HSGD_FLOAT32, NULL, &err);
      break;
    case kReduceScatter:
      code = hsgd_comm_reduce_scatter(comm, b->use.in[k], b->use.out[k], fill(blocks, b, block),
                                      HSGD_FLOAT32, HSGD_SUM, NULL, &err);
      break;
    case kAlltoall:
      fill(blocks, b, block / (size_t)b->size);
      code = hsgd_comm_alltoall(comm, b->use.in[k], blocks, b->use.out[k], blocks, HSGD_FLOAT32,
                                NULL, &err);
      break;
    default:
      code = hsgd_comm_barrier(comm, &err);
  }
  if (code != HSGD_OK) snprintf(b->why, sizeof b->why, "%s", err.message);
  return code;
}

static void stop(Bench* b) {
  (void)b;
  hsgd_comm_destroy(comm);
  comm = NULL;
}

static double tolerance(void) { return rounding; }

static void* allocate(Bench* b, size_t count) {
  hsgd_error err;
  int k = 0;
  while (k < 2 * kMaxBuffers && shared[k] != NULL) k++;
  if (k == 2 * kMaxBuffers ||
      hsgd_comm_allocate(comm, count, HSGD_FLOAT32, NULL, &shared[k], &err)) {
    snprintf(b->why, sizeof b->why, "%s", k < 2 * kMaxBuffers ? err.message : "too many buffers");
    return NULL;
  }
  return hsgd_buffer_data(shared[k]);
}

static void give_back(void* memory) {
  for (int k = 0; k < 2 * kMaxBuffers; k++) {
    if (shared[k] == NULL || hsgd_buffer_data(shared[k]) != memory) continue;
    hsgd_buffer_free(shared[k]);
    shared[k] = NULL;
    return;
  }
}

const Contender kHsgd = {.name = "hsgd-c",
                         .collectives = (1u << kCollectives) - 1,
                         .start = start,
                         .call = call,
                         .tolerance = tolerance,
                         .stop = stop};
const Contender kHsgdArena = {.name = "hsgd-arena-c",
                              .collectives = ((1u << kCollectives) - 1) & ~(1u << kBarrier),
                              .start = start,
                              .call = call,
                              .tolerance = tolerance,
                              .stop = stop,
                              .allocate = allocate,
                              .free = give_back};
