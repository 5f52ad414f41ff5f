// Functions that fill an hsgd_call for each kind of collective.
#ifndef HSGD_CORE_BASE_CALLS_HPP_
#define HSGD_CORE_BASE_CALLS_HPP_

#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

inline hsgd_call call_of(hsgd_kind kind, const void* in, void* out, hsgd_dtype dtype,
                         const hsgd_label* label) {
  hsgd_call call{};
  call.kind = kind;
  call.in = in;
  call.out = out;
  call.dtype = dtype;
  call.label = label;
  return call;
}

inline hsgd_call allreduce_call(const void* in, void* out, uint64_t count, hsgd_dtype dtype,
                                hsgd_op op, const hsgd_label* label) {
  hsgd_call call = call_of(HSGD_ALLREDUCE, in, out, dtype, label);
  call.count = count;
  call.op = op;
  return call;
}

inline hsgd_call broadcast_call(void* data, uint64_t count, hsgd_dtype dtype, int root,
                                const hsgd_label* label) {
  hsgd_call call = call_of(HSGD_BROADCAST, data, data, dtype, label);
  call.count = count;
  call.root = root;
  return call;
}

inline hsgd_call barrier_call() {
  return call_of(HSGD_BARRIER, nullptr, nullptr, HSGD_UINT8, nullptr);
}

// `counts`: size of each rank's block, the same on all ranks.
inline hsgd_call reduce_scatter_call(const void* in, void* out, const uint64_t* counts,
                                     hsgd_dtype dtype, hsgd_op op, const hsgd_label* label) {
  hsgd_call call = call_of(HSGD_REDUCE_SCATTER, in, out, dtype, label);
  call.counts = counts;
  call.op = op;
  return call;
}

inline hsgd_call allgather_call(const void* in, void* out, const uint64_t* counts, hsgd_dtype dtype,
                                const hsgd_label* label) {
  hsgd_call call = call_of(HSGD_ALLGATHER, in, out, dtype, label);
  call.counts = counts;
  return call;
}

// Takes the counts to and from each rank; each rank passes only its own.
inline hsgd_call alltoall_call(const void* in, const uint64_t* send_counts, void* out,
                               const uint64_t* receive_counts, hsgd_dtype dtype,
                               const hsgd_label* label) {
  hsgd_call call = call_of(HSGD_ALLTOALL, in, out, dtype, label);
  call.counts = send_counts;
  call.receive_counts = receive_counts;
  return call;
}

}  // namespace hsgd

#endif  // HSGD_CORE_BASE_CALLS_HPP_
