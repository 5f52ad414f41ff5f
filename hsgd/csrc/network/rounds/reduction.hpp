// Reduction: how elements are summed, and divided into parts, by dtype, op and format between
// nodes. The same on all ranks. Never touches data.
#ifndef HSGD_NETWORK_ROUNDS_REDUCTION_HPP_
#define HSGD_NETWORK_ROUNDS_REDUCTION_HPP_

#include <cstddef>
#include <cstdint>

#include "core/kernels/reduce.hpp"

namespace hsgd {

// How float32 travels between nodes as a 16-bit format. Partial sums are rounded before they are
// sent, and so is the owner's own, so no result depends on the owner. The owner sums them in
// float32 and rounds once more; every node gets that result.
struct Narrowing {
  Conversion conversion;      // without functions: elements travel unchanged
  ReduceFn reduce = nullptr;  // of the 16-bit format
  static constexpr size_t kElementBytes = 2;
  bool active() const { return conversion.narrow != nullptr; }
};

// How 16-bit floats are summed in several steps and rounded once: as float32.
struct Widening {
  Conversion conversion;      // without functions: the dtype is not a 16-bit float
  ReduceFn reduce = nullptr;  // of float32
  bool active() const { return conversion.widen != nullptr; }
};

// How elements are summed. `divisor` applies at the last level.
struct Reduction {
  ReduceFn reduce = nullptr;
  CopyFn copy = nullptr;
  size_t element_bytes = 0;
  double divisor = 1.0;
  Narrowing narrowing = {};
  Widening widening = {};
};

struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t count() const { return end - begin; }
};

// Returns [begin, end) of part `index` of `count` elements in `parts` parts. Bounds are cache lines
// if possible.
Range part_of(uint64_t count, int parts, int index, size_t element_bytes);

}  // namespace hsgd

#endif  // HSGD_NETWORK_ROUNDS_REDUCTION_HPP_
