// The loop, compiled once per instruction set; products and sums are not fused (-ffp-contract=off),
// so all of them give the same bits.
#include "change.hpp"

#include <algorithm>

#include "hsgd_core.h"

#if defined(__x86_64__)
#define HSGD_CHANGE_ISA(name) __attribute__((target(name)))
#endif

namespace hsgd {
namespace {

constexpr uint64_t kLanes = 64;  // partial sums side by side, whatever the width of a register
constexpr uint64_t kRun = 4096;  // elements that one float32 partial sum covers 1/kLanes of

[[gnu::always_inline]] inline double square_in(const float* __restrict now,
                                               const float* __restrict last, uint64_t count) {
  double total = 0;
  for (uint64_t begin = 0; begin < count; begin += kRun) {
    const uint64_t end = std::min(begin + kRun, count);
    float squares[kLanes] = {};
    const auto one = [&](uint64_t at, float& sum) __attribute__((always_inline)) {
      const float moved = now[at] - last[at];
      sum += moved * moved;
    };
    uint64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (uint64_t lane = 0; lane < kLanes; ++lane) one(i + lane, squares[lane]);
    }
    for (uint64_t lane = 0; i < end; ++i, ++lane) one(i, squares[lane]);
    for (const float sum : squares) total += static_cast<double>(sum);
  }
  return total;
}

double square_plain(const float* now, const float* last, uint64_t count) {
  return square_in(now, last, count);
}

#if defined(__x86_64__)
HSGD_CHANGE_ISA("avx2")
double square_avx2(const float* now, const float* last, uint64_t count) {
  return square_in(now, last, count);
}
HSGD_CHANGE_ISA("avx512f,prefer-vector-width=512")
double square_avx512(const float* now, const float* last, uint64_t count) {
  return square_in(now, last, count);
}
#endif

}  // namespace

ChangeFn choose_change() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return square_avx512;
  if (__builtin_cpu_supports("avx2")) return square_avx2;
#endif
  return square_plain;
}

}  // namespace hsgd

double hsgd_change_square(const hsgd_change_part* parts, uint64_t count) {
  const hsgd::ChangeFn square = hsgd::choose_change();
  double total = 0;
  for (const hsgd_change_part* part = parts; part != parts + count; ++part) {
    double sum = 0;
    for (uint64_t row = 0; row < part->rows; ++row) {
      sum += square(part->now + row * part->stride, part->last + row * part->length, part->length);
    }
    total += part->weight * sum;
  }
  return total;
}
