// The loop, compiled once per instruction set.
#include "core/kernels/weight_drift.hpp"

#include "core/base/float_mode.hpp"
#include "core/kernels/reduce.hpp"
#include "core/kernels/square_sums.hpp"

namespace hsgd {
namespace {

[[gnu::always_inline]] inline double square_in(const float* __restrict now,
                                               const float* __restrict last, uint64_t count) {
  return sum_squares(count, [&](uint64_t at, float& sum) __attribute__((always_inline)) {
    const float moved = now[at] - last[at];
    sum += moved * moved;
  });
}

double square_plain(const float* now, const float* last, uint64_t count) {
  return square_in(now, last, count);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] double square_avx2(const float* now, const float* last, uint64_t count) {
  return square_in(now, last, count);
}
[[gnu::target("avx512f,prefer-vector-width=512")]] double square_avx512(const float* now,
                                                                        const float* last,
                                                                        uint64_t count) {
  return square_in(now, last, count);
}
#endif

using SquareFn = double (*)(const float* now, const float* last, uint64_t count);

SquareFn choose_square() {
#if defined(__x86_64__)
  const Isa isa = detect_isa();
  if (isa == Isa::kAvx512) return square_avx512;
  if (isa == Isa::kAvx2) return square_avx2;
#endif
  return square_plain;
}

}  // namespace

double drift_square(const std::vector<DriftPart>& parts) {
  const PlainFloats mode;
  const SquareFn square = choose_square();
  double total = 0;
  for (const DriftPart& part : parts) {
    double sum = 0;
    for (uint64_t row = 0; row < part.rows; ++row) {
      sum += square(part.now + row * part.stride, part.last + row * part.length, part.length);
    }
    total += part.weight * sum;
  }
  return total;
}

}  // namespace hsgd
