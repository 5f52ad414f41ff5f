// Lossy compression: what is decoded, what is left for the next time, and what is not finite.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/kernels/compression.hpp"
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

struct Int8 {
  Int8(uint64_t count, uint64_t size)
      : codes(count), scales((count + size - 1) / size), block(size) {}
  hsgd::Int8Blocks view() { return {codes.data(), scales.data(), codes.size(), block}; }
  std::vector<int8_t> codes;
  std::vector<float> scales;
  uint64_t block;
};

struct Top {
  Top(uint64_t length, uint64_t size, uint64_t most)
      : places((length + size - 1) / size * most, 7),
        values(places.size(), 7),
        count(length),
        chunk(size),
        kept(most) {}
  hsgd::TopValues view() { return {places.data(), values.data(), count, chunk, kept}; }
  std::vector<uint16_t> places, values;
  uint64_t count, chunk, kept;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

}  // namespace

TEST("int8: decoded values and what is left add up to what was given") {
  for (const uint64_t count : {1U, 63U, 64U, 65U, 1000U, 4097U}) {
    const std::vector<float> given = drawn(count, 1), before = drawn(count, 2);
    std::vector<float> error = before, sum(count, 0.0F);
    Int8 sent(count, 64);
    hsgd::int8_encode(given.data(), error.data(), sent.view());
    hsgd::int8_decode(sent.view(), 1.0F, sum.data());
    for (uint64_t i = 0; i < count; ++i) {
      const float whole = given[i] + before[i];
      CHECK(std::abs(sum[i] + error[i] - whole) <= 1e-6F);
      CHECK(std::abs(error[i]) <= sent.scales[i / 64] * 0.5001F);
    }
  }
}

TEST("int8: whole numbers up to 127 pass exactly, and are added with their factor") {
  std::vector<float> given(255), error(255, 0.0F), sum(255, 1.0F);
  std::iota(given.begin(), given.end(), -127.0F);
  Int8 sent(255, 255);
  hsgd::int8_encode(given.data(), error.data(), sent.view());
  hsgd::int8_decode(sent.view(), 0.5F, sum.data());
  for (size_t i = 0; i < given.size(); ++i) {
    CHECK_EQ(error[i], 0.0F);
    CHECK_EQ(sum[i], 1.0F + given[i] / 2);
  }
}

TEST("int8: a block of zeros, or of what is too small to scale, sends nothing and keeps it") {
  const std::vector<float> given = {0.0F, 1e-40F, -1e-39F};
  std::vector<float> error(3, 0.0F), sum(3, 0.0F);
  Int8 sent(3, 3);
  hsgd::int8_encode(given.data(), error.data(), sent.view());
  hsgd::int8_decode(sent.view(), 1.0F, sum.data());
  CHECK(sum == std::vector<float>(3, 0.0F));
  CHECK(error == given);
}

TEST("int8: what is not finite is decoded to what is none, in its block alone") {
  for (const float bad : {kNan, kInf, -kInf}) {
    std::vector<float> given(8, 1.0F), error(8, 0.0F), sum(8, 0.0F);
    given[2] = bad;
    Int8 sent(8, 4);
    hsgd::int8_encode(given.data(), error.data(), sent.view());
    hsgd::int8_decode(sent.view(), 1.0F, sum.data());
    CHECK(std::all_of(sum.begin(), sum.begin() + 4, [](float x) { return std::isnan(x); }));
    CHECK(std::all_of(sum.begin() + 4, sum.end(), [](float x) { return x == 1.0F; }));
  }
}

TEST("top: the greatest of each chunk, the first of equals, and the rest stays") {
  const std::vector<float> given = {1, -4, 2, 4, 4, 0.5F, 8, -3};  // chunks of 5 and of 3
  std::vector<float> error(8, 0.0F), sum(8, 0.0F);
  Top sent(8, 5, 2);
  hsgd::top_encode(given.data(), error.data(), 1.0F, sent.view());
  hsgd::top_decode(sent.view(), 0.5F, sum.data());
  CHECK(sent.places == (std::vector<uint16_t>{1, 3, 1, 2}));
  CHECK(sum == (std::vector<float>{0, -2, 0, 2, 0, 0, 4, -1.5F}));
  CHECK(error == (std::vector<float>{1, 0, 2, 0, 4, 0.5F, 0, 0}));
}

TEST("top: the error decays, and goes into the next message") {
  const std::vector<float> given = {0, 0, 3, 0};
  std::vector<float> error = {8, 2, 0, 0}, sum(4, 0.0F);
  Top sent(4, 4, 1);
  hsgd::top_encode(given.data(), error.data(), 0.5F, sent.view());
  hsgd::top_decode(sent.view(), 1.0F, sum.data());
  CHECK(sum == (std::vector<float>{4, 0, 0, 0}));
  CHECK(error == (std::vector<float>{0, 1, 3, 0}));
}

TEST("top: values are bfloat16, and their rounding stays as well") {
  const std::vector<float> given = drawn(70000, 3);
  std::vector<float> error(given.size(), 0.0F), sum(given.size(), 0.0F);
  Top sent(given.size(), 4096, 4096);  // all of them; the last chunk is short
  hsgd::top_encode(given.data(), error.data(), 1.0F, sent.view());
  hsgd::top_decode(sent.view(), 1.0F, sum.data());
  for (size_t i = 0; i < given.size(); ++i) {
    CHECK_EQ(sum[i] + error[i], given[i]);
    CHECK(std::abs(error[i]) <= std::abs(given[i]) / 256);
  }
}

TEST("top: a last chunk with less than is kept takes all, and nothing twice") {
  const std::vector<float> given = {1, 2, 3, 4, 5};
  std::vector<float> error(5, 0.0F), sum(5, 0.0F);
  Top sent(5, 4, 3);
  hsgd::top_encode(given.data(), error.data(), 1.0F, sent.view());
  hsgd::top_decode(sent.view(), 1.0F, sum.data());
  CHECK(sum == (std::vector<float>{0, 2, 3, 4, 5}));
}

TEST("top: what is not finite is the greatest of all") {
  for (const float bad : {kNan, kInf, -kInf}) {
    std::vector<float> given(8, 1.0F), error(8, 0.0F), sum(8, 0.0F);
    given[5] = bad;
    Top sent(8, 8, 1);
    hsgd::top_encode(given.data(), error.data(), 1.0F, sent.view());
    hsgd::top_decode(sent.view(), 1.0F, sum.data());
    CHECK(!std::isfinite(sum[5]));
  }
}

TEST("top: places from elsewhere that lie outside the chunk are passed over") {
  std::vector<float> sum(3, 0.0F);
  Top sent(3, 3, 2);
  sent.places = {2, 9};
  sent.values = {0x3f80, 0x3f80};  // 1.0
  hsgd::top_decode(sent.view(), 1.0F, sum.data());
  CHECK(sum == (std::vector<float>{0, 0, 1}));
}
