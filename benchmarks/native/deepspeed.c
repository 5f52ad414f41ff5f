/* DeepSpeed's shared-memory allreduce, from the library that ../peers.py makes.
 *
 * Owns the tensors around the buffers, and removes the names of DeepSpeed's segments as soon as all
 * ranks have mapped them, because DeepSpeed never does. Its ranks spin for ever.
 */
#include <dlfcn.h>
#include <unistd.h>

#include "worker.h"

static void (*peer_start)(int size, int rank, const char* job);
static void (*peer_unlink)(int rank, const char* job);
static void* (*peer_tensor)(float* data, size_t count);
static void (*peer_tensor_free)(void* tensor);
static void (*peer_allreduce)(void* tensor);

static void* tensors[kMaxBuffers];
static int serial = -1;

static int start(Bench* b, const char* word, FILE* facts) {
  (void)facts;
  void* library = dlopen(word, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    snprintf(b->why, sizeof b->why, "%s", dlerror());
    return 1;
  }
  peer_start = (void (*)(int, int, const char*))dlsym(library, "peer_start");
  peer_unlink = (void (*)(int, const char*))dlsym(library, "peer_unlink");
  peer_tensor = (void* (*)(float*, size_t))dlsym(library, "peer_tensor");
  peer_tensor_free = (void (*)(void*))dlsym(library, "peer_tensor_free");
  peer_allreduce = (void (*)(void*))dlsym(library, "peer_allreduce");
  if (!peer_start || !peer_unlink || !peer_tensor || !peer_tensor_free || !peer_allreduce) {
    snprintf(b->why, sizeof b->why, "%s lacks a function", word);
    return 1;
  }
  int pid = (int)getpid();
  char job[32];
  PMPI_Bcast(&pid, 1, MPI_INT, 0, b->world);
  snprintf(job, sizeof job, "bench%d", pid);
  peer_start(b->size, b->rank, job);
  PMPI_Barrier(b->world);
  peer_unlink(b->rank, job);
  return 0;
}

static void drop_tensors(void) {
  for (int k = 0; k < kMaxBuffers; k++) {
    if (tensors[k]) peer_tensor_free(tensors[k]);
    tensors[k] = NULL;
  }
}

static int call(Bench* b, int k) {
  if (serial != b->use.serial) {
    drop_tensors();
    serial = b->use.serial;
    for (int i = 0; i < b->use.pairs; i++) tensors[i] = peer_tensor(b->use.in[i], b->use.count_in);
  }
  peer_allreduce(tensors[k]);
  return 0;
}

static void stop(Bench* b) {
  (void)b;
  drop_tensors();
}

const Contender kDeepSpeed = {.name = "deepspeed",
                              .collectives = 1u << kAllreduce,
                              .in_place = 1,
                              .start = start,
                              .call = call,
                              .stop = stop};
