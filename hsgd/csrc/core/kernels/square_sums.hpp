// The order in which squares of float32 are summed: the same on every instruction set.
//
// Owns the walk over the elements; who walks computes what is squared. In an anonymous namespace,
// as core/kernels/reduce_kernels.hpp is, and always inlined: the loops around it are compiled once
// per instruction set. Products and sums are not fused (-ffp-contract=off), so all give the same
// bits.
#ifndef HSGD_CORE_KERNELS_SQUARE_SUMS_HPP_
#define HSGD_CORE_KERNELS_SQUARE_SUMS_HPP_

#include <algorithm>
#include <cstdint>

namespace hsgd {
namespace {

constexpr uint64_t kSquareLanes = 64;  // partial sums side by side, whatever a register holds
constexpr uint64_t kSquareRun = 4096;  // elements of which a float32 sum covers 1/kSquareLanes

// add(at, sum) adds the square of element `at` to `sum`; it is called once for each, in order.
template <class Add>
[[gnu::always_inline]] inline double sum_squares(uint64_t count, const Add& add) {
  double total = 0;
  for (uint64_t begin = 0; begin < count; begin += kSquareRun) {
    const uint64_t end = std::min(begin + kSquareRun, count);
    float squares[kSquareLanes] = {};
    uint64_t i = begin;
    for (; i + kSquareLanes <= end; i += kSquareLanes) {
      for (uint64_t lane = 0; lane < kSquareLanes; ++lane) add(i + lane, squares[lane]);
    }
    for (uint64_t lane = 0; i < end; ++i, ++lane) add(i, squares[lane]);
    for (const float sum : squares) total += static_cast<double>(sum);
  }
  return total;
}

}  // namespace
}  // namespace hsgd

#endif  // HSGD_CORE_KERNELS_SQUARE_SUMS_HPP_
