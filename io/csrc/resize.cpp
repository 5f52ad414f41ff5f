// Part of an image to another size: triangle filter, as wide as the reduction asks for, so that
// nothing is skipped (what Pillow calls BILINEAR and torchvision antialias=True). Owns the filter.
// Never allocates and never throws.
#include <algorithm>
#include <cmath>

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

}  // namespace

extern "C" int64_t hsgd_io_crop_scratch(const hsgd_io_crop* crop) {
  const auto columns = static_cast<int64_t>(std::ceil(crop->width)) + 2;
  const int64_t across = most_taps(crop->width, crop->size);
  const int64_t down = most_taps(crop->height, crop->size);
  return static_cast<int64_t>(sizeof(Taps)) * crop->size +
         static_cast<int64_t>(sizeof(float)) * (columns * kChannels + across * crop->size + down);
}

extern "C" void hsgd_io_crop_image(const hsgd_io_crop* crop, void* scratch) {
  const int64_t size = crop->size;
  const int64_t across = most_taps(crop->width, size);
  auto* taps = static_cast<Taps*>(scratch);
  auto* weights = reinterpret_cast<float*>(taps + size);
  float* down = weights + across * size;
  float* row = down + most_taps(crop->height, size);
  for (int64_t x = 0; x < size; ++x) {
    taps[x] = taps_of(crop->left, crop->width, size, x, weights + across * x);
  }
  const auto low = static_cast<int64_t>(std::floor(crop->left));
  const auto high = static_cast<int64_t>(std::ceil(crop->left + crop->width));
  const int64_t values = (high - low) * kChannels;
  for (int64_t y = 0; y < size; ++y) {
    const Taps lines = taps_of(crop->top, crop->height, size, y, down);
    std::fill(row, row + values, 0.5F);  // rounds
    for (int64_t k = 0; k < lines.count; ++k) {
      const uint8_t* line = crop->pixels + ((lines.first + k) * crop->row_pixels + low) * kChannels;
      const float weight = down[k];
      for (int64_t i = 0; i < values; ++i) row[i] += weight * static_cast<float>(line[i]);
    }
    uint8_t* to = crop->to + y * size * kChannels;
    for (int64_t x = 0; x < size; ++x) {
      const Taps& across_x = taps[x];
      const float* weight = weights + across * x;
      const float* from = row + (across_x.first - low) * kChannels;
      float red = 0;
      float green = 0;
      float blue = 0;
      for (int64_t k = 0; k < across_x.count; ++k, from += kChannels) {
        red += weight[k] * from[0];
        green += weight[k] * from[1];
        blue += weight[k] * from[2];
      }
      uint8_t* pixel = to + (crop->flip != 0 ? size - 1 - x : x) * kChannels;
      pixel[0] = static_cast<uint8_t>(std::min(255.0F, red));
      pixel[1] = static_cast<uint8_t>(std::min(255.0F, green));
      pixel[2] = static_cast<uint8_t>(std::min(255.0F, blue));
    }
  }
}
