// sum_squares(): sums squares of float32 in the same order on every instruction set.
//
// The caller computes each square. In an anonymous namespace, like core/kernels/reduce_kernels.hpp,
// and always inlined: the loops around it are compiled once per instruction set. Products and sums
// are not fused (-ffp-contract=off), so all instruction sets give the same bits.
#ifndef HSGD_CORE_KERNELS_SQUARE_SUMS_HPP_
#define HSGD_CORE_KERNELS_SQUARE_SUMS_HPP_

#include <algorithm>
#include <cstdint>

namespace hsgd {
namespace {

constexpr uint64_t kSquareLanes = 64;  // partial sums side by side, for any register width
constexpr uint64_t kSquareRun = 4096;  // elements per run; a float32 sum covers 1/kSquareLanes

// Calls add(at, sum) once for each element in order; it adds the square of element `at` to `sum`.
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
