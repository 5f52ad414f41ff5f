/* DeepSpeed's shared-memory allreduce behind three functions in C, for native/deepspeed.c.
 *
 * Owns nothing but the tensors around the caller's buffers. DeepSpeed's source is not here:
 * peers.py fetches it and compiles it into one library with this file.
 */
#include "shm.cpp"  // DeepSpeed's, found by -I

extern "C" {

/* Collective: makes and maps the segments. `job` must be the same on all ranks and of this job
 * alone: it becomes part of their names. */
void peer_start(int size, int rank, const char* job) {
  shm_initialize(size, rank, const_cast<char*>(job), const_cast<char*>(""));
}

/* Removes the name of this rank's segment, which stays mapped. All ranks must have started. */
void peer_unlink(int rank, const char* job) {
  char name[256];
  snprintf(name, sizeof name, "%s_%d_%s__%d", SHM_BUFFER_NAME, getuid(), job, rank);
  shm_unlink(name);
}

void* peer_tensor(float* data, size_t count) {
  return new at::Tensor(at::from_blob(data, {static_cast<int64_t>(count)}));
}

void peer_tensor_free(void* tensor) { delete static_cast<at::Tensor*>(tensor); }

/* Collective: sums over all ranks, in place. */
void peer_allreduce(void* tensor) {
  at::Tensor& data = *static_cast<at::Tensor*>(tensor);
  all_reduce_outer_loop(data, data.numel(), data.numel() * sizeof(float));
}
}
