// The change of weights: the sum in double, over rows at two distances and parts of any length.
#include <cmath>
#include <vector>

#include "core/kernels/weight_drift.hpp"
#include "support/check.hpp"

namespace {

std::vector<float> drawn(uint64_t count, uint32_t state) {
  std::vector<float> values;
  for (uint64_t i = 0; i < count; ++i) {
    state = state * 1664525U + 1013904223U;
    values.push_back(static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1.0F);
  }
  return values;
}

double wanted(const float* now, const float* last, uint64_t count) {
  double sum = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const double moved = static_cast<double>(now[i]) - static_cast<double>(last[i]);
    sum += moved * moved;
  }
  return sum;
}

bool near(double found, double sum) { return std::abs(found - sum) <= 1e-6 * sum; }

}  // namespace

TEST("one row of any length is the sum of the squares") {
  for (const uint64_t count : {1U, 7U, 63U, 64U, 65U, 4095U, 4096U, 4097U, 50001U}) {
    const std::vector<float> now = drawn(count, 1), last = drawn(count, 2);
    const hsgd::DriftPart part{now.data(), last.data(), 1, count, 0, 1.0};
    CHECK(near(hsgd::drift_square({part}), wanted(now.data(), last.data(), count)));
  }
}

TEST("rows apart count with their weight, and what lies between them does not") {
  constexpr uint64_t kRows = 3, kLength = 100, kStride = 250;
  const std::vector<float> now = drawn(kRows * kStride, 3), last = drawn(kRows * kLength, 4);
  double sum = 0;
  for (uint64_t row = 0; row < kRows; ++row) {
    sum += wanted(now.data() + row * kStride, last.data() + row * kLength, kLength);
  }
  const std::vector<hsgd::DriftPart> parts = {
      {now.data(), last.data(), kRows, kLength, kStride, 2.5},
      {now.data(), last.data(), 1, kLength, 0, 1.0},
      {nullptr, nullptr, 0, 0, 0, 1.0}};
  const double first = wanted(now.data(), last.data(), kLength);
  CHECK(near(hsgd::drift_square(parts), 2.5 * sum + first));
  CHECK_EQ(hsgd::drift_square({}), 0.0);
}

TEST("what is not a number makes the sum none") {
  std::vector<float> now = drawn(5000, 5);
  const std::vector<float> last = now;
  hsgd::DriftPart part{now.data(), last.data(), 1, now.size(), 0, 1.0};
  CHECK_EQ(hsgd::drift_square({part}), 0.0);
  now[4321] = NAN;
  CHECK(std::isnan(hsgd::drift_square({part})));
}
