// Elementwise reduction of n inputs in one pass over memory, copies, and conversions between
// float32 and 16-bit floats: all arithmetic of the core's collectives.
//
// Kernels per dtype, op and instruction set, and the choice between them. They never allocate,
// throw, wait or keep state. They are bitwise equal on every instruction set and at every position
// of an element, so the result does not depend on the machine, chunking or alignment:
// - The result is ((in0 op in1) op in2) ..., left to right. float16 and bfloat16 accumulate in
//   float32 over all inputs and round once, to nearest even. The divisor is applied before that
//   rounding, as x / divisor in float32 (float64 for double).
// - A NaN in any input makes the result NaN, for every op. Every computed NaN is the same one:
//   quiet, positive, without payload (0x7fc00000 in float32). A copy (one input, no divisor) keeps
//   all bits.
// - min and max keep the earlier input if two are equal: min(+0, -0) is +0, min(-0, +0) is -0.
// - Integers wrap.
// The files are compiled with -ffp-contract=off: a fused multiply-add, on machines that have it,
// would round differently.
#ifndef HSGD_CORE_KERNELS_REDUCE_HPP_
#define HSGD_CORE_KERNELS_REDUCE_HPP_

#include <cstddef>
#include <cstdint>

#include "hsgd_core.h"

namespace hsgd {

enum class Isa : uint8_t { kPlain = 0, kAvx2 = 1, kAvx512 = 2 };

// Kind of store for an output. Non-temporal stores bypass the caches if the machine has them and
// the address allows it. Ordinary stores are used for an output that is not aligned to its element
// size, and for out2 if both outputs are non-temporal and their addresses differ modulo the vector
// size (streaming in smaller pieces was slower than ordinary stores).
enum class Store : uint8_t { kOrdinary = 0, kNonTemporal = 1 };

// Arguments of a reduction. Inputs and outputs may have any alignment. Each output is the same
// address as one input, or overlaps no input.
struct ReduceArgs {
  const void* const* inputs;  // `input_count` pointers to `count` elements each
  int input_count;            // >= 1; 1 is a copy, divided when there is a divisor
  void* out;
  void* out2;  // written in the same pass; nullptr: none
  size_t count;
  double divisor;  // 1.0: none. Sum and mean of floating dtypes only, ignored by all others
  Store store;     // of `out`
  Store store2;    // of `out2`
};

// Fence non-temporal stores before they return: a release store by the caller publishes them.
using ReduceFn = void (*)(const ReduceArgs& args) noexcept;
using CopyFn = void (*)(void* dst, const void* src, size_t bytes, Store store) noexcept;

// Converts `count` elements between float32 and a 16-bit format; any alignment, no overlap.
// Narrowing rounds to nearest even and beyond the largest number to infinity; every NaN becomes the
// same NaN. Widening is exact.
using ConvertFn = void (*)(void* dst, const void* src, size_t count) noexcept;
struct Conversion {
  ConvertFn narrow = nullptr;  // float32 to 16 bits
  ConvertFn widen = nullptr;   // 16 bits to float32
};

// Returns the best instruction set of this machine and build. Queries the processor each time: call
// it once and keep the answer.
Isa detect_isa() noexcept;
const char* isa_name(Isa isa) noexcept;  // "avx512", "avx2", "neon", "plain"

// Never returns null for valid arguments. `isa` must not exceed detect_isa(). HSGD_MEAN gives the
// kernel of HSGD_SUM: the caller sets the divisor, and refuses the mean of integers.
ReduceFn select_reduce(hsgd_dtype dtype, hsgd_op op, Isa isa) noexcept;
Conversion select_conversion(hsgd_dtype narrow, Isa isa) noexcept;  // HSGD_FLOAT16, HSGD_BFLOAT16
CopyFn select_copy(Isa isa) noexcept;  // dst == src or no overlap; any alignment and size

// Kernels of each instruction set, in the file compiled for it. Only select_* may call these.
ReduceFn select_reduce_plain(hsgd_dtype dtype, hsgd_op op) noexcept;
Conversion select_conversion_plain(hsgd_dtype narrow) noexcept;
CopyFn select_copy_plain() noexcept;
#if defined(__x86_64__)
ReduceFn select_reduce_avx2(hsgd_dtype dtype, hsgd_op op) noexcept;
Conversion select_conversion_avx2(hsgd_dtype narrow) noexcept;
CopyFn select_copy_avx2() noexcept;
ReduceFn select_reduce_avx512(hsgd_dtype dtype, hsgd_op op) noexcept;
Conversion select_conversion_avx512(hsgd_dtype narrow) noexcept;
CopyFn select_copy_avx512() noexcept;
#endif

}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_REDUCE_HPP_
