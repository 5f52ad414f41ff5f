// What the kinds of collectives share in checking their arguments and in describing what to do.
#ifndef HSGD_COLLECTIVES_KINDS_ARGUMENTS_HPP_
#define HSGD_COLLECTIVES_KINDS_ARGUMENTS_HPP_

#include <cstdint>

#include "collectives/context/context.hpp"
#include "collectives/context/operation.hpp"
#include "collectives/context/place.hpp"
#include "hsgd_core.h"

namespace hsgd {

// A buffer of a collective, and where in it the other one may lie.
struct Buffer {
  static constexpr uint64_t kNowhere = UINT64_MAX;
  const void* data;
  uint64_t bytes;
  uint64_t place = 0;
};

// Throws HSGD_ERR_ARGUMENT for NULL, and for buffers that overlap but for what is `allowed`.
void check_buffers(const Buffer& in, const Buffer& out, const char* allowed);

// The blocks of a packed buffer, in bytes.
struct Blocks {
  uint64_t before = 0;  // in front of this rank's
  uint64_t own = 0;
  uint64_t total = 0;
};

// Throws HSGD_ERR_ARGUMENT for sizes beyond any memory. `unit`: elements that one count stands for.
Blocks checked_blocks(const Place& place, const uint64_t* counts, hsgd_dtype dtype,
                      uint64_t unit = 1);

// Of a result whose size is known late, too: of allgather and of alltoall.
void check_gathered(const Blocks& blocks, const void* in, const void* out);
void check_exchanged(const Blocks& sent, const Blocks& received, const void* in, const void* out);

// With label, buffers and what moves elements; without count and signature.
Operation operation_of(const Context& context, const hsgd_call& call);
// The same with what reduces them. With narrowing, for float32 and on request, half the bytes
// travel between nodes.
Operation reduction_of(const Context& context, const hsgd_call& call);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_KINDS_ARGUMENTS_HPP_
