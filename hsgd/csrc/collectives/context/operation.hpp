// Operation: the arguments of one collective.
//
// Points to the arguments of the user, which must stay valid during the call.
#ifndef HSGD_COLLECTIVES_CONTEXT_OPERATION_HPP_
#define HSGD_COLLECTIVES_CONTEXT_OPERATION_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "core/base/call_signature.hpp"
#include "network/rounds/reduction.hpp"

namespace hsgd {

struct Operation {
  Signature signature;
  const hsgd_label* label = nullptr;
  const void* in = nullptr;
  void* out = nullptr;
  uint64_t count = 0;
  Reduction reduction;
  int root = -1;              // broadcast: world rank
  Range part{0, UINT64_MAX};  // the part of a reduction's result that this rank wants
  Counts counts;              // reduce_scatter, allgather: the blocks; alltoall: sent
  const uint64_t* receive_counts = nullptr;  // alltoall

  Range wanted() const { return {part.begin, std::min(part.end, count)}; }
  size_t bytes() const { return count * reduction.element_bytes; }
  size_t out_bytes() const {  // bytes that this rank writes
    const uint64_t elements =
        receive_counts == nullptr
            ? wanted().count()
            : std::accumulate(receive_counts, receive_counts + counts.ranks, uint64_t{0});
    return elements * reduction.element_bytes;
  }
};

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_CONTEXT_OPERATION_HPP_
