// The checksum of words: signs, wrapping, and any count.
#include <cstdint>
#include <vector>

#include "core/kernels/weighted_sum.hpp"
#include "support/check.hpp"

TEST("words count with their signs, and the sum wraps") {
  const std::vector<int32_t> words = {-1, 2, INT32_MIN};
  const std::vector<int64_t> weights = {3, INT64_MAX, 5};
  // -3 + (2^64 - 2) - 5 * 2^31, modulo 2^64
  CHECK_EQ(hsgd::weighted_sum(words.data(), weights.data(), 3), int64_t{-5} - (int64_t{5} << 31));
  CHECK_EQ(hsgd::weighted_sum(words.data(), weights.data(), 0), int64_t{0});
}

TEST("each bit of each word counts, at any count") {
  std::vector<int64_t> weights;
  for (uint64_t i = 0; i < 67; ++i) {
    weights.push_back(static_cast<int64_t>((i * 0x9E3779B97F4A7C15U) | 1U));
  }
  std::vector<int32_t> words(67, 7);
  for (uint64_t count : {1U, 8U, 63U, 64U, 67U}) {
    const int64_t before = hsgd::weighted_sum(words.data(), weights.data(), count);
    for (uint64_t i = 0; i < 67; ++i) {
      for (uint32_t bit = 0; bit < 32; ++bit) {
        words[i] = static_cast<int32_t>(7U ^ (1U << bit));
        CHECK_EQ(hsgd::weighted_sum(words.data(), weights.data(), count) != before, i < count);
      }
      words[i] = 7;
    }
  }
}
