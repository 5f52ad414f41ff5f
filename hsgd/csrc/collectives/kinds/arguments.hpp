// Checks arguments and builds operations for all kinds of collectives.
#ifndef HSGD_COLLECTIVES_KINDS_ARGUMENTS_HPP_
#define HSGD_COLLECTIVES_KINDS_ARGUMENTS_HPP_

#include <cstdint>

#include "collectives/context/context.hpp"
#include "collectives/context/operation.hpp"
#include "collectives/context/place.hpp"
#include "hsgd_core.h"

namespace hsgd {

// A buffer of a collective, and the offset at which the other one may lie in it.
struct Buffer {
  static constexpr uint64_t kNowhere = UINT64_MAX;
  const void* data;
  uint64_t bytes;
  uint64_t place = 0;
};

// Throws HSGD_ERR_ARGUMENT for NULL, and for buffers that overlap in another way than `allowed`.
void check_buffers(const Buffer& in, const Buffer& out, const char* allowed);

// The blocks of a packed buffer, in bytes.
struct Blocks {
  uint64_t before = 0;  // in front of this rank's block
  uint64_t own = 0;
  uint64_t total = 0;
};

// Returns the blocks of `counts`. Throws HSGD_ERR_ARGUMENT for sizes beyond any memory. `unit`:
// elements per count.
Blocks checked_blocks(const Place& place, const uint64_t* counts, hsgd_dtype dtype,
                      uint64_t unit = 1);

// Check the buffers of allgather and alltoall, also for a result whose size is known late.
void check_gathered(const Blocks& blocks, const void* in, const void* out);
void check_exchanged(const Blocks& sent, const Blocks& received, const void* in, const void* out);

// Returns an operation with label, buffers and the kernels that move elements; without count and
// signature.
Operation operation_of(const Context& context, const hsgd_call& call);
// Returns the same with the reduction kernels. With narrowing, for float32 and on request, half the
// bytes travel between nodes.
Operation reduction_of(const Context& context, const hsgd_call& call);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_ARGUMENTS_HPP_
