// hsgd_io_crop_image(): scales a part of an image with a triangle filter that widens with the
// reduction, so that no pixel is skipped (Pillow's BILINEAR, torchvision's antialias=True).
//
// Lines first, then columns, in whole numbers of 16 bits, so that all processors agree; in floats
// if many pixels become one. Never allocates and never throws.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "rows.h"

// The loops that are compiled: 2: also AVX2, for processors that have it; 1: SSE2 only; 0: portable
// ones only. Set only by the test that compares them.
#if !defined(HSGD_IO_LOOPS)
#if defined(__x86_64__)
#define HSGD_IO_LOOPS 2
#else
#define HSGD_IO_LOOPS 0
#endif
#endif

#if HSGD_IO_LOOPS > 0
#include <immintrin.h>
#endif

namespace {

constexpr int kChannels = 3;

// The source of an output pixel: input pixels [first, first + count).
struct Taps {
  int64_t first;
  int64_t count;
};

double triangle(double x) { return std::max(0.0, 1.0 - std::fabs(x)); }

// Computes the weights of output pixel `i` of `size`, over the inputs of [start, start + length)
// alone.
Taps taps_of(double start, double length, int64_t size, int64_t i, float* weights) {
  const double scale = length / static_cast<double>(size);
  const double width = std::max(1.0, scale);
  const double center = start + (static_cast<double>(i) + 0.5) * scale;
  const auto low = static_cast<int64_t>(std::floor(start));
  const auto high = static_cast<int64_t>(std::ceil(start + length));
  // Only pixels with a middle nearer than `width`: others would have a weight of 0.
  const int64_t first = std::max(low, static_cast<int64_t>(std::floor(center - width - 0.5)) + 1);
  const int64_t last = std::min(high, static_cast<int64_t>(std::ceil(center + width - 0.5)));
  double sum = 0;
  for (int64_t pixel = first; pixel < last; ++pixel) {
    const double weight = triangle((static_cast<double>(pixel) + 0.5 - center) / width);
    weights[pixel - first] = static_cast<float>(weight);
    sum += weight;
  }
  if (sum <= 0) {  // between two pixels at the edge of the part
    weights[0] = 1;
    return {std::min(std::max(low, static_cast<int64_t>(center)), high - 1), 1};
  }
  for (int64_t k = 0; k < last - first; ++k) weights[k] /= static_cast<float>(sum);
  return {first, last - first};
}

int64_t most_taps(double length, int64_t size) {
  return static_cast<int64_t>(2 * std::max(1.0, length / static_cast<double>(size))) + 3;
}

// The most products summed in 16 bits, which then cannot overflow.
constexpr int64_t kFew = 64;
constexpr int64_t kBlock = 64;  // values at once: few enough for registers
constexpr int64_t kLanes = 4;   // red, green, blue, and the following byte
constexpr int64_t kPixels = 4;  // of a row, at once

uint16_t whole_weight(float weight) {
  return static_cast<uint16_t>(std::min(65535.0F, weight * 65536.0F + 0.5F));
}

// The lines of one output row, each `stride` bytes behind the previous one.
struct Lines {
  const uint8_t* first;
  int64_t stride;
  int64_t count;
};

// Sets row[i] to 256 times the weighted sum of value i of the lines. Weights are of 2^16, values of
// 2^8. `sum` begins with the loss of the products' upper halves, half a unit each on average.
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

#if HSGD_IO_LOOPS > 1
// Does the same as sum_block<kBlock>; bytes become the upper halves of words as they are unpacked.
__attribute__((target("avx2"))) inline void sum_block_avx2(const Lines& lines,
                                                           const uint16_t* weights, uint16_t* row) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i sum[4];
  for (auto& part : sum) part = _mm256_set1_epi16(static_cast<int16_t>(lines.count / 2));
  for (int64_t k = 0; k < lines.count; ++k) {
    const auto* line = reinterpret_cast<const __m256i*>(lines.first + k * lines.stride);
    const __m256i weight = _mm256_set1_epi16(static_cast<int16_t>(weights[k]));
    for (int half = 0; half < 2; ++half) {
      const __m256i bytes = _mm256_loadu_si256(line + half);
      const __m256i low = _mm256_mulhi_epu16(_mm256_unpacklo_epi8(zero, bytes), weight);
      const __m256i high = _mm256_mulhi_epu16(_mm256_unpackhi_epi8(zero, bytes), weight);
      sum[2 * half] = _mm256_add_epi16(sum[2 * half], low);
      sum[2 * half + 1] = _mm256_add_epi16(sum[2 * half + 1], high);
    }
  }
  auto* to = reinterpret_cast<__m256i*>(row);
  for (int half = 0; half < 2; ++half) {  // unpacked within 128 bits: restore their order
    const __m256i low = sum[2 * half];
    const __m256i high = sum[2 * half + 1];
    _mm256_storeu_si256(to + 2 * half, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(to + 2 * half + 1, _mm256_permute2x128_si256(low, high, 0x31));
  }
}

__attribute__((target("avx2"))) void sum_few_lines_avx2(const Lines& lines, const float* weights,
                                                        uint16_t* row, int64_t values) {
  if (values < kBlock) return sum_blocks(lines, weights, row, values);
  uint16_t whole[kFew];
  for (int64_t k = 0; k < lines.count; ++k) whole[k] = whole_weight(weights[k]);
  for (int64_t done = 0; done < values; done += kBlock) {
    const int64_t at = std::min(done, values - kBlock);  // the last block sums some values again
    sum_block_avx2({lines.first + at, lines.stride, lines.count}, whole, row + at);
  }
}
#endif

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
// whole: the weights as whole numbers, kLanes times each, for kPixels pixels weight k of each and
// then weight k + 1; NULL if they are many. Pixels behind the last have weights of 0.
struct Columns {
  const int64_t* first;
  const float* weights;
  const uint16_t* whole;
  int64_t count;
  int64_t size;
};

// The first values of kPixels pixels that are summed together.
using PixelGroup = const uint16_t* [kPixels];

#if HSGD_IO_LOOPS > 0
// Returns two pixels side by side.
inline __m128i two_pixels(const uint16_t* one, const uint16_t* other) {
  const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(one));
  const auto* high = reinterpret_cast<const __m64*>(other);
  return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(low), high));
}

// Returns the bytes of two of kPixels pixels.
template <int64_t kCount>
inline uint64_t sum_two(const PixelGroup& from, int64_t pair, const uint16_t* weights,
                        int64_t count) {
  __m128i sum = _mm_set1_epi16(static_cast<int16_t>(128 + count / 2));  // 128 rounds
  for (int64_t k = 0; k < (kCount != 0 ? kCount : count); ++k) {
    const __m128i pixels = two_pixels(from[pair] + k * kChannels, from[pair + 1] + k * kChannels);
    const auto* weight = reinterpret_cast<const __m128i*>(weights + (k * kPixels + pair) * kLanes);
    sum = _mm_add_epi16(sum, _mm_mulhi_epu16(pixels, _mm_loadu_si128(weight)));
  }
  const __m128i bytes = _mm_srli_epi16(sum, 8);
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(bytes, bytes)));
}
#else
template <int64_t kCount>
inline uint64_t sum_two(const PixelGroup& from, int64_t pair, const uint16_t* weights,
                        int64_t count) {
  using Words = uint16_t __attribute__((vector_size(8)));
  using Products = uint32_t __attribute__((vector_size(16)));
  using Bytes = uint8_t __attribute__((vector_size(4)));
  Bytes found[2];
  for (int64_t one = 0; one < 2; ++one) {
    Words sum = Words{} + static_cast<uint16_t>(128 + count / 2);  // 128 rounds
    for (int64_t k = 0; k < (kCount != 0 ? kCount : count); ++k) {
      Words pixel;
      Words weight;
      std::memcpy(&pixel, from[pair + one] + k * kChannels, sizeof pixel);
      std::memcpy(&weight, weights + (k * kPixels + pair + one) * kLanes, sizeof weight);
      const Products products =
          __builtin_convertvector(pixel, Products) * __builtin_convertvector(weight, Products);
      sum += __builtin_convertvector(products >> 16, Words);
    }
    found[one] = __builtin_convertvector(sum >> 8, Bytes);
  }
  uint64_t bytes;
  std::memcpy(&bytes, found, sizeof bytes);
  return bytes;
}
#endif

// Writes kPixels pixels, from sums of products of 16 bits as in sum_block: their bytes to `to`, and
// up to 2 more. kCount, if not 0, is the count.
template <int64_t kCount>
struct Sum {
  static void write(const PixelGroup& from, const uint16_t* weights, int64_t count, uint8_t* to) {
    for (int64_t pair = 0; pair < kPixels; pair += 2) {
      const uint64_t bytes = sum_two<kCount>(from, pair, weights, count);
      uint8_t pixels[2 * kLanes];
      std::memcpy(pixels, &bytes, sizeof pixels);
      std::memcpy(to + pair * kChannels, pixels, kLanes);  // the next overwrites the fourth
      std::memcpy(to + (pair + 1) * kChannels, pixels + kLanes, kLanes);
    }
  }
};

#if HSGD_IO_LOOPS > 1
template <int64_t kCount>
struct SumAvx2 {
  __attribute__((target("avx2"))) static void write(const PixelGroup& from, const uint16_t* weights,
                                                    int64_t count, uint8_t* to) {
    __m256i sum = _mm256_set1_epi16(static_cast<int16_t>(128 + count / 2));
    for (int64_t k = 0; k < (kCount != 0 ? kCount : count); ++k) {
      const int64_t at = k * kChannels;
      const __m256i pixels =
          _mm256_inserti128_si256(_mm256_castsi128_si256(two_pixels(from[0] + at, from[1] + at)),
                                  two_pixels(from[2] + at, from[3] + at), 1);
      const auto* weight = reinterpret_cast<const __m256i*>(weights + k * kPixels * kLanes);
      sum = _mm256_add_epi16(sum, _mm256_mulhi_epu16(pixels, _mm256_loadu_si256(weight)));
    }
    const __m256i words = _mm256_srli_epi16(sum, 8);
    const __m256i bytes = _mm256_packus_epi16(words, words);
    const __m256i packed =
        _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(_mm_setr_epi8(
                                       0, 1, 2, 4, 5, 6, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 2 * kChannels),
                     _mm256_extracti128_si256(packed, 1));
  }
};
#endif

template <typename SumOf>
__attribute__((always_inline)) inline void write_pixels(const Columns& columns, int64_t count,
                                                        const uint16_t* row, uint8_t* to) {
  const int64_t size = columns.size;
  const int64_t* first = columns.first;  // local copies: written bytes may alias anything
  const uint16_t* weights = columns.whole;
  for (int64_t x = 0; x < size; x += kPixels, weights += count * kPixels * kLanes) {
    PixelGroup from;
    for (int64_t k = 0; k < kPixels; ++k) {
      from[k] = row + first[std::min(x + k, size - 1)] * kChannels;
    }
    uint8_t last[kPixels * kLanes];
    const bool more = x + kPixels < size;
    SumOf::write(from, weights, count, more ? to + x * kChannels : last);
    if (!more) std::memcpy(to + x * kChannels, last, static_cast<size_t>((size - x) * kChannels));
  }
}

template <template <int64_t> typename SumOf>
__attribute__((always_inline)) inline void write_few(const Columns& columns, const uint16_t* row,
                                                     uint8_t* to) {
  switch (columns.count) {
    case 2:
      return write_pixels<SumOf<2>>(columns, 2, row, to);
    case 3:
      return write_pixels<SumOf<3>>(columns, 3, row, to);
    case 4:
      return write_pixels<SumOf<4>>(columns, 4, row, to);
    case 5:
      return write_pixels<SumOf<5>>(columns, 5, row, to);
    default:
      return write_pixels<SumOf<0>>(columns, columns.count, row, to);
  }
}

void write_few_pixels(const Columns& columns, const uint16_t* row, uint8_t* to) {
  write_few<Sum>(columns, row, to);
}

#if HSGD_IO_LOOPS > 1
__attribute__((target("avx2"))) void write_few_pixels_avx2(const Columns& columns,
                                                           const uint16_t* row, uint8_t* to) {
  write_few<SumAvx2>(columns, row, to);
}
#endif

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

// The fastest loops that this processor has; all give the same results.
struct Loops {
  void (*sum_few)(const Lines&, const float*, uint16_t*, int64_t);
  void (*write_few)(const Columns&, const uint16_t*, uint8_t*);
};

Loops fastest_loops() {
#if HSGD_IO_LOOPS > 1
  if (__builtin_cpu_supports("avx2")) return {sum_few_lines_avx2, write_few_pixels_avx2};
#endif
  return {sum_few_lines, write_few_pixels};
}

// The sizes of the parts of scratch, in their order.
struct Scratch {
  explicit Scratch(const hsgd_io_crop& crop)
      : across(most_taps(crop.width, crop.size)),
        down(most_taps(crop.height, crop.size)),
        whole(across <= kFew ? across * (crop.size + kPixels - 1) * kLanes : 0),
        row((static_cast<int64_t>(std::ceil(crop.width)) + 2 + across) * kChannels + kLanes),
        bytes(static_cast<int64_t>(sizeof(int64_t)) * crop.size +
              static_cast<int64_t>(sizeof(float)) * (across * crop.size + down) +
              static_cast<int64_t>(sizeof(uint16_t)) * (whole + row)) {}

  int64_t across;  // weights of each column, after `size` first pixels
  int64_t down;    // weights of the lines of one output row
  int64_t whole;   // weights of all columns as whole numbers
  int64_t row;     // values of a row, and zeros behind them, which are read with the last pixels
  int64_t bytes;
};

// Fills in first and weights, mirrored with flip; returns the number of weights of each column.
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

// Writes the weights in the form of Columns::whole.
void fill_whole(const float* weights, int64_t count, int64_t size, uint16_t* whole) {
  for (int64_t x = 0; x < (size + kPixels - 1) / kPixels * kPixels; ++x) {
    uint16_t* to = whole + (x / kPixels * count * kPixels + x % kPixels) * kLanes;
    for (int64_t k = 0; k < count; ++k, to += kPixels * kLanes) {
      std::fill(to, to + kLanes, x < size ? whole_weight(weights[x * count + k]) : uint16_t{0});
    }
  }
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
  if (parts.whole != 0) fill_whole(weights, count, size, whole);
  const Columns columns{first, weights, parts.whole != 0 ? whole : nullptr, count, size};
  const auto low = static_cast<int64_t>(std::floor(crop->left));
  const auto high = static_cast<int64_t>(std::ceil(crop->left + crop->width));
  const int64_t values = (high - low) * kChannels;
  std::fill(row + values, row + parts.row, uint16_t{0});
  const int64_t stride = crop->row_pixels * kChannels;
  const Loops loops = fastest_loops();
  for (int64_t y = 0; y < size; ++y) {
    const Taps own = taps_of(crop->top, crop->height, size, y, down);
    const Lines lines{crop->pixels + own.first * stride + low * kChannels, stride, own.count};
    (own.count <= kFew ? loops.sum_few : sum_many_lines)(lines, down, row, values);
    (parts.whole != 0 ? loops.write_few : write_many)(columns, row,
                                                      crop->to + y * size * kChannels);
  }
  return 0;
}
