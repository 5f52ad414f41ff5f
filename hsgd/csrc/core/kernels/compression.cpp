// Loops over one block or chunk at a time, while it is in the cache.
#include "core/kernels/compression.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/base/float_mode.hpp"

namespace hsgd {
namespace {

constexpr float kCodes = 127;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Returns a key that grows with the magnitude; infinities follow all numbers, and NaNs follow
// infinities.
uint32_t magnitude(float value) { return bits_of(value) & 0x7fffffffU; }

// Rounds to nearest even; a NaN stays a NaN.
uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40U);
  return static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

float from_bfloat16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

struct Block {
  const float* values;
  float* error;
  int8_t* codes;
  uint64_t count;
};

float encode_block(const Block& block) {
  uint32_t greatest = 0;
  for (uint64_t i = 0; i < block.count; ++i) {
    block.error[i] += block.values[i];
    greatest = std::max(greatest, magnitude(block.error[i]));
  }
  float most;
  std::memcpy(&most, &greatest, sizeof most);
  if (!std::isfinite(most)) {
    std::fill_n(block.codes, block.count, int8_t{1});
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float scale = most / kCodes;
  if (scale < std::numeric_limits<float>::min()) {  // 1 / scale may be infinite: nothing is sent
    std::fill_n(block.codes, block.count, int8_t{0});
    return 0;
  }
  const float inverse = 1 / scale;
  for (uint64_t i = 0; i < block.count; ++i) {
    const float code =
        std::min(std::max(std::nearbyint(block.error[i] * inverse), -kCodes), kCodes);
    block.codes[i] = static_cast<int8_t>(code);
    block.error[i] -= code * scale;
  }
  return scale;
}

}  // namespace

void int8_encode(const float* values, float* error, const Int8Blocks& to) {
  const PlainFloats mode;
  for (uint64_t at = 0, number = 0; at < to.count; at += to.block, ++number) {
    const uint64_t count = std::min(to.block, to.count - at);
    to.scales[number] = encode_block({values + at, error + at, to.codes + at, count});
  }
}

void int8_decode(const Int8Blocks& from, float factor, float* sum) {
  const PlainFloats mode;
  for (uint64_t at = 0, number = 0; at < from.count; at += from.block, ++number) {
    const uint64_t end = std::min(from.count, at + from.block);
    const float scale = from.scales[number] * factor;
    for (uint64_t i = at; i < end; ++i) sum[i] += static_cast<float>(from.codes[i]) * scale;
  }
}

void top_encode(const float* values, float* error, float decay, const TopValues& to) {
  const PlainFloats mode;
  std::vector<uint32_t> order(std::min(to.chunk, to.count));
  uint16_t* places = to.places;
  uint16_t* sent = to.values;
  for (uint64_t at = 0; at < to.count; at += to.chunk, places += to.kept, sent += to.kept) {
    const uint64_t count = std::min(to.chunk, to.count - at);
    float* const left = error + at;
    for (uint64_t i = 0; i < count; ++i) {
      left[i] = decay * left[i] + values[at + i];
      order[i] = static_cast<uint32_t>(i);
    }
    const auto kept = static_cast<int64_t>(std::min(to.kept, count));
    const auto begin = order.begin(), end = begin + static_cast<int64_t>(count);
    if (begin + kept != end) {
      std::nth_element(begin, begin + kept, end, [&](uint32_t one, uint32_t other) {
        const uint32_t mine = magnitude(left[one]), theirs = magnitude(left[other]);
        return mine != theirs ? mine > theirs : one < other;
      });
    }
    std::sort(begin, begin + kept);
    std::fill_n(places, to.kept, uint16_t{0});
    std::fill_n(sent, to.kept, uint16_t{0});
    for (int64_t i = 0; i < kept; ++i) {
      const uint32_t place = order[static_cast<size_t>(i)];
      places[i] = static_cast<uint16_t>(place);
      sent[i] = to_bfloat16(left[place]);
      left[place] -= from_bfloat16(sent[i]);
    }
  }
}

void top_decode(const TopValues& from, float factor, float* sum) {
  const PlainFloats mode;
  const uint16_t* places = from.places;
  const uint16_t* values = from.values;
  for (uint64_t at = 0; at < from.count; at += from.chunk) {
    const uint64_t count = std::min(from.chunk, from.count - at);
    for (uint64_t i = 0; i < std::min(from.kept, count); ++i) {
      if (places[i] < count) sum[at + places[i]] += factor * from_bfloat16(values[i]);
    }
    places += from.kept;
    values += from.kept;
  }
}

}  // namespace hsgd
