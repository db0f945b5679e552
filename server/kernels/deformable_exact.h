// One sample of deformable attention in float64, but for its pixels, term by term as the reference computes it and with
// whatever levels: for levels that overlap or leave the keys, and where float32 leaves the finite numbers.
#ifndef NPUGRAD_DEFORMABLE_EXACT_H
#define NPUGRAD_DEFORMABLE_EXACT_H

#include <cmath>

#include "deformable_levels.h"

namespace npugrad {

// Corners in the order (y0, x0), (y0, x0 + 1), (y0 + 1, x0), (y0 + 1, x0 + 1).
struct ExactSample {
  bool reached;
  int64_t keys[4];  // -1 for a corner that is dropped
  double weights[4], by_width[4], by_height[4];
};

// The lower of the two pixels on one axis and the way beyond it; false where the sample does not reach the level.
template <typename Number>
bool exact_axis(Number location, int64_t size, int64_t& first, double& low) {
  // Rounded before the subtraction, as the reference does.
  volatile Number scaled = location * static_cast<Number>(size);
  volatile Number rounded = scaled - Number(0.5);
  const double pixel = rounded;
  if (!(pixel > -1.0 && pixel < 0x1p63)) return false;
  const double lower = std::floor(pixel);
  first = static_cast<int64_t>(lower);
  low = pixel - lower;
  return first < size;
}

// Number: the type that pixels are computed in.
template <typename Number>
ExactSample exact_sample(Number x, Number y, const Level& level, int64_t keys) {
  ExactSample found{};
  int64_t x0 = 0, y0 = 0;
  double lw = 0, lh = 0;
  found.reached = exact_axis(x, level.width, x0, lw) && exact_axis(y, level.height, y0, lh);
  if (!found.reached) return found;
  for (int corner = 0; corner < 4; ++corner) {
    const bool high_y = corner >= 2, high_x = corner & 1;
    // Both are below their size here or equal to it, so nothing overflows.
    const int64_t row = y0 + high_y, column = x0 + high_x;
    const double weight_y = high_y ? lh : 1 - lh, weight_x = high_x ? lw : 1 - lw;
    found.weights[corner] = weight_y * weight_x;
    found.by_width[corner] = high_x ? weight_y : -weight_y;
    found.by_height[corner] = high_y ? weight_x : -weight_x;
    found.keys[corner] = -1;
    if (row < 0 || row >= level.height || column < 0 || column >= level.width) continue;
    const __int128 key = static_cast<__int128>(row) * level.width + column + level.start;
    if (key >= 0 && key < keys) found.keys[corner] = static_cast<int64_t>(key);
  }
  return found;
}

struct SampleGrads {
  double weight = 0, x = 0, y = 0;
};

// `value` at key 0, a key's stride in elements; `grad` the query's gradient.
template <typename T>
SampleGrads exact_grads(
    const ExactSample& sample, const Level& level, double weight, const T* value, int64_t stride, const T* grad,
    int64_t channels) {
  SampleGrads found;
  if (!sample.reached) return found;
  for (int64_t c = 0; c < channels; ++c) {
    double read = 0, by_width = 0, by_height = 0;
    for (int corner = 0; corner < 4; ++corner) {
      const int64_t key = sample.keys[corner];
      const double v = key < 0 ? 0.0 : to_float(value[key * stride + c]);
      read += sample.weights[corner] * v;
      by_width += sample.by_width[corner] * v;
      by_height += sample.by_height[corner] * v;
    }
    const double g = to_float(grad[c]);
    found.weight += g * read;
    found.x += g * by_width;
    found.y += g * by_height;
  }
  found.x *= static_cast<double>(level.width) * weight;
  found.y *= static_cast<double>(level.height) * weight;
  return found;
}

}  // namespace npugrad
#endif
