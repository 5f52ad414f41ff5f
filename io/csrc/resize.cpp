// Part of an image to another size: triangle filter, as wide as the reduction asks for, so that
// nothing is skipped (what Pillow calls BILINEAR and torchvision antialias=True). Owns the filter.
// Lines first, then columns, in whole numbers of 16 bits, so all processors agree; in floats where
// many pixels become one. Never allocates and never throws.
#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "rows.h"

namespace {

constexpr int kChannels = 3;

// Where an output pixel gets its value from: input pixels [first, first + count).
struct Taps {
  int64_t first;
  int64_t count;
};

double triangle(double x) { return std::max(0.0, 1.0 - std::fabs(x)); }

// Weights of output pixel `i` of `size`, over the inputs of [start, start + length) alone.
Taps taps_of(double start, double length, int64_t size, int64_t i, float* weights) {
  const double scale = length / static_cast<double>(size);
  const double width = std::max(1.0, scale);
  const double center = start + (static_cast<double>(i) + 0.5) * scale;
  const auto low = static_cast<int64_t>(std::floor(start));
  const auto high = static_cast<int64_t>(std::ceil(start + length));
  const int64_t first = std::max(low, static_cast<int64_t>(std::floor(center - width)));
  const int64_t last = std::min(high, static_cast<int64_t>(std::ceil(center + width)));
  double sum = 0;
  for (int64_t pixel = first; pixel < last; ++pixel) {
    const double weight = triangle((static_cast<double>(pixel) + 0.5 - center) / width);
    weights[pixel - first] = static_cast<float>(weight);
    sum += weight;
  }
  if (sum <= 0) {  // between two pixels at the edge of what is asked for
    weights[0] = 1;
    return {std::min(std::max(low, static_cast<int64_t>(center)), high - 1), 1};
  }
  for (int64_t k = 0; k < last - first; ++k) weights[k] /= static_cast<float>(sum);
  return {first, last - first};
}

int64_t most_taps(double length, int64_t size) {
  return static_cast<int64_t>(2 * std::max(1.0, length / static_cast<double>(size))) + 3;
}

// Up to so many products are summed up in 16 bits, which then cannot overflow.
constexpr int64_t kFew = 64;
constexpr int64_t kBlock = 64;  // values at once: few enough for registers
constexpr int64_t kLanes = 4;   // red, green, blue, and what follows

uint16_t whole_weight(float weight) {
  return static_cast<uint16_t>(std::min(65535.0F, weight * 65536.0F + 0.5F));
}

// Lines of one output row, each `stride` bytes behind the one before.
struct Lines {
  const uint8_t* first;
  int64_t stride;
  int64_t count;
};

// row[i] = 256 times the weighted sum of value i of the lines. Weights are of 2^16, values of 2^8:
// what the upper halves of the products lose, half a unit each on average, `sum` begins with.
template <int64_t kCount>
__attribute__((always_inline)) inline void sum_block(const Lines& lines, const uint16_t* weights,
                                                     uint16_t* row, int64_t count) {
  const int64_t values = kCount != 0 ? kCount : count;
  uint16_t sum[kBlock];
  for (int64_t i = 0; i < values; ++i) sum[i] = static_cast<uint16_t>(lines.count / 2);
  for (int64_t k = 0; k < lines.count; ++k) {
    const uint8_t* line = lines.first + k * lines.stride;
    const uint16_t weight = weights[k];
    for (int64_t i = 0; i < values; ++i) {
      const auto value = static_cast<uint16_t>(line[i] << 8);
      sum[i] = static_cast<uint16_t>(sum[i] + (uint32_t{value} * uint32_t{weight} >> 16));
    }
  }
  for (int64_t i = 0; i < values; ++i) row[i] = sum[i];
}

__attribute__((always_inline)) inline void sum_blocks(const Lines& lines, const float* weights,
                                                      uint16_t* row, int64_t values) {
  uint16_t whole[kFew];
  for (int64_t k = 0; k < lines.count; ++k) whole[k] = whole_weight(weights[k]);
  int64_t done = 0;
  for (; done + kBlock <= values; done += kBlock) {
    sum_block<kBlock>({lines.first + done, lines.stride, lines.count}, whole, row + done, kBlock);
  }
  sum_block<0>({lines.first + done, lines.stride, lines.count}, whole, row + done, values - done);
}

void sum_few_lines(const Lines& lines, const float* weights, uint16_t* row, int64_t values) {
  sum_blocks(lines, weights, row, values);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void sum_few_lines_avx2(const Lines& lines, const float* weights,
                                                        uint16_t* row, int64_t values) {
  sum_blocks(lines, weights, row, values);
}
#endif

using SumLines = void (*)(const Lines&, const float*, uint16_t*, int64_t);

SumLines fastest_sum() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return sum_few_lines_avx2;
#endif
  return sum_few_lines;
}

void sum_many_lines(const Lines& lines, const float* weights, uint16_t* row, int64_t values) {
  for (int64_t i = 0; i < values; ++i) {
    float sum = 0;
    for (int64_t k = 0; k < lines.count; ++k) {
      sum += weights[k] * static_cast<float>(lines.first[k * lines.stride + i]);
    }
    row[i] = static_cast<uint16_t>(256.0F * std::min(255.0F, sum));
  }
}

// The columns of a row: output pixel x is the weighted sum of `count` pixels from first[x] on.
// whole: the weights as whole numbers, kLanes times each; NULL where they are many.
struct Columns {
  const int64_t* first;
  const float* weights;
  const uint16_t* whole;
  int64_t count;
  int64_t size;
};

// Four values as bytes, of the sum of products of 16 bits as in sum_block.
#if defined(__SSE2__)
template <int64_t kCount>
inline uint32_t sum_pixels(const uint16_t* from, const uint16_t* weights, int64_t count) {
  __m128i sum = _mm_set1_epi16(static_cast<int16_t>(128 + count / 2));  // 128 rounds
  for (int64_t k = 0; k < (kCount != 0 ? kCount : count); ++k) {
    const auto* pixel = reinterpret_cast<const __m128i*>(from + k * kChannels);
    const auto* weight = reinterpret_cast<const __m128i*>(weights + k * kLanes);
    sum = _mm_add_epi16(sum, _mm_mulhi_epu16(_mm_loadl_epi64(pixel), _mm_loadl_epi64(weight)));
  }
  const __m128i bytes = _mm_srli_epi16(sum, 8);
  return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_packus_epi16(bytes, bytes)));
}
#else
template <int64_t kCount>
inline uint32_t sum_pixels(const uint16_t* from, const uint16_t* weights, int64_t count) {
  using Words = uint16_t __attribute__((vector_size(8)));
  using Products = uint32_t __attribute__((vector_size(16)));
  using Bytes = uint8_t __attribute__((vector_size(4)));
  Words sum = Words{} + static_cast<uint16_t>(128 + count / 2);  // 128 rounds
  for (int64_t k = 0; k < (kCount != 0 ? kCount : count); ++k) {
    Words pixel;
    Words weight;
    std::memcpy(&pixel, from + k * kChannels, sizeof pixel);
    std::memcpy(&weight, weights + k * kLanes, sizeof weight);
    const Products products =
        __builtin_convertvector(pixel, Products) * __builtin_convertvector(weight, Products);
    sum += __builtin_convertvector(products >> 16, Words);
  }
  const Bytes bytes = __builtin_convertvector(sum >> 8, Bytes);
  uint32_t found;
  std::memcpy(&found, &bytes, sizeof found);
  return found;
}
#endif

// With kCount, it is the count.
template <int64_t kCount>
void write_pixels(const Columns& columns, const uint16_t* row, uint8_t* to) {
  const int64_t count = kCount != 0 ? kCount : columns.count;
  const int64_t size = columns.size;
  const int64_t* first = columns.first;  // copies: bytes that are written may lie anywhere
  const uint16_t* weights = columns.whole;
  for (int64_t x = 0; x + 1 < size; ++x, weights += count * kLanes, to += kChannels) {
    const uint32_t bytes = sum_pixels<kCount>(row + first[x] * kChannels, weights, count);
    std::memcpy(to, &bytes, kLanes);  // the next pixel overwrites the fourth
  }
  const uint32_t last = sum_pixels<kCount>(row + first[size - 1] * kChannels, weights, count);
  std::memcpy(to, &last, kChannels);
}

void write_many(const Columns& columns, const uint16_t* row, uint8_t* to) {
  for (int64_t x = 0; x < columns.size; ++x) {
    const uint16_t* from = row + columns.first[x] * kChannels;
    for (int64_t channel = 0; channel < kChannels; ++channel) {
      float sum = 128.0F;  // rounds
      for (int64_t k = 0; k < columns.count; ++k) {
        const float weight = columns.weights[x * columns.count + k];
        sum += weight * static_cast<float>(from[k * kChannels + channel]);
      }
      *to++ = static_cast<uint8_t>(std::min(255.0F, sum / 256.0F));
    }
  }
}

void write_row(const Columns& columns, const uint16_t* row, uint8_t* to) {
  if (columns.whole == nullptr) return write_many(columns, row, to);
  switch (columns.count) {
    case 2:
      return write_pixels<2>(columns, row, to);
    case 3:
      return write_pixels<3>(columns, row, to);
    case 4:
      return write_pixels<4>(columns, row, to);
    case 5:
      return write_pixels<5>(columns, row, to);
    default:
      return write_pixels<0>(columns, row, to);
  }
}

// How many scratch holds of each, in the order of its parts.
struct Scratch {
  explicit Scratch(const hsgd_io_crop& crop)
      : across(most_taps(crop.width, crop.size)),
        down(most_taps(crop.height, crop.size)),
        whole(across <= kFew ? across * crop.size * kLanes : 0),
        row((static_cast<int64_t>(std::ceil(crop.width)) + 2 + across) * kChannels + kLanes),
        bytes(static_cast<int64_t>(sizeof(int64_t)) * crop.size +
              static_cast<int64_t>(sizeof(float)) * (across * crop.size + down) +
              static_cast<int64_t>(sizeof(uint16_t)) * (whole + row)) {}

  int64_t across;  // weights of each column, after `size` first pixels
  int64_t down;    // weights of the lines of one output row
  int64_t whole;   // weights of all columns as whole numbers
  int64_t row;     // values of a row, and zeros behind them that are read with the last pixels
  int64_t bytes;
};

// Fills in first and weights, mirrored with flip; returns how many each column has.
int64_t find_columns(const hsgd_io_crop& crop, int64_t most, int64_t* first, float* weights) {
  const auto low = static_cast<int64_t>(std::floor(crop.left));
  int64_t count = 0;
  for (int64_t x = 0; x < crop.size; ++x) {
    const int64_t from = crop.flip != 0 ? crop.size - 1 - x : x;
    float* own = weights + most * x;
    const Taps taps = taps_of(crop.left, crop.width, crop.size, from, own);
    std::fill(own + taps.count, own + most, 0.0F);
    first[x] = taps.first - low;
    count = std::max(count, taps.count);
  }
  for (int64_t x = 1; x < crop.size; ++x) {
    std::copy(weights + most * x, weights + most * x + count, weights + count * x);
  }
  return count;
}

}  // namespace

extern "C" int64_t hsgd_io_crop_image(const hsgd_io_crop* crop, void* scratch, int64_t bytes) {
  const Scratch parts(*crop);
  if (bytes < parts.bytes) return parts.bytes;
  const int64_t size = crop->size;
  auto* first = static_cast<int64_t*>(scratch);
  auto* weights = reinterpret_cast<float*>(first + size);
  float* down = weights + parts.across * size;
  auto* whole = reinterpret_cast<uint16_t*>(down + parts.down);
  uint16_t* row = whole + parts.whole;
  const int64_t count = find_columns(*crop, parts.across, first, weights);
  for (int64_t i = 0; i < (parts.whole != 0 ? count * size : 0); ++i) {
    std::fill(whole + i * kLanes, whole + (i + 1) * kLanes, whole_weight(weights[i]));
  }
  const Columns columns{first, weights, parts.whole != 0 ? whole : nullptr, count, size};
  const auto low = static_cast<int64_t>(std::floor(crop->left));
  const auto high = static_cast<int64_t>(std::ceil(crop->left + crop->width));
  const int64_t values = (high - low) * kChannels;
  std::fill(row + values, row + parts.row, uint16_t{0});
  const int64_t stride = crop->row_pixels * kChannels;
  const SumLines sum_few = fastest_sum();
  for (int64_t y = 0; y < size; ++y) {
    const Taps own = taps_of(crop->top, crop->height, size, y, down);
    const Lines lines{crop->pixels + own.first * stride + low * kChannels, stride, own.count};
    (own.count <= kFew ? sum_few : sum_many_lines)(lines, down, row, values);
    write_row(columns, row, crop->to + y * size * kChannels);
  }
  return 0;
}
