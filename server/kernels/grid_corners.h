// What the points of a group do at their corners: add to input_grad, and take the products for grid_grad.
#ifndef NPUGRAD_GRID_CORNERS_H
#define NPUGRAD_GRID_CORNERS_H

#include "grid_points.h"

namespace npugrad {

// A group of points, ready for a window: pixel at the top left, weights of the four corners and of their differences.
struct Ready {
  alignas(64) int32_t pixel[kGroup];
  float weight[4][kGroup];
  float left[kGroup], right[kGroup], top[kGroup], bottom[kGroup];
  Slopes slopes;
};

template <int M>
NPUGRAD_INLINE Vec<float, M> load_lanes(const float* p) {
  return *reinterpret_cast<const typename VectorOf<float, M>::unaligned*>(p);
}
template <int M>
NPUGRAD_INLINE void store_lanes(float* p, Vec<float, M> v) {
  *reinterpret_cast<typename VectorOf<float, M>::unaligned*>(p) = v;
}

// Floats from a pixel to the next: of few channels, input and sums lie side by side, which makes half as many lines
// of the cache that a point touches.
template <int L, bool Scatter, bool Gather>
constexpr int kPixel = Scatter && Gather && L <= 8 ? 2 * L : L;

// What the points of a group do with L channels.
template <int L, bool Scatter, bool Gather>
struct Points {
  static constexpr int kStride = kPixel<L, Scatter, Gather>;
  static constexpr int kLanes = L < kWidth ? L : kWidth, kParts = L / kLanes;
  using Part = Vec<float, kLanes>;

  const float* __restrict image;
  float* __restrict sums;
  const float* __restrict grad;
  const Ready& ready;
  const int64_t step;  // floats from a pixel to the one below

  // Adds a point to input_grad; its terms of the gradient by x and by y, channels side by side.
  NPUGRAD_INLINE void point(int j, Part& x, Part& y) const {
    const int64_t at = static_cast<int64_t>(ready.pixel[j]) * kStride;
    x = y = Part{};
#pragma GCC unroll 4
    for (int k = 0; k < kParts; ++k) {
      const int64_t shift = k * kLanes;
      const Part g = load_lanes<kLanes>(grad + j * L + shift);
      if constexpr (Scatter) {
#pragma GCC unroll 4
        for (int corner = 0; corner < 4; ++corner) {
          float* p = sums + at + shift + (corner & 1) * kStride + (corner >> 1) * step;
          store_lanes<kLanes>(p, load_lanes<kLanes>(p) + ready.weight[corner][j] * g);
        }
      }
      if constexpr (Gather) {
        const float* p = image + at + shift;
        const Part top_left = load_lanes<kLanes>(p), top_right = load_lanes<kLanes>(p + kStride);
        const Part bottom_left = load_lanes<kLanes>(p + step), bottom_right = load_lanes<kLanes>(p + step + kStride);
        x += ((top_right - top_left) * ready.top[j] + (bottom_right - bottom_left) * ready.bottom[j]) * g;
        y += ((bottom_left - top_left) * ready.left[j] + (bottom_right - top_right) * ready.right[j]) * g;
      }
    }
  }

  // Points `first` to `first + Count`, as many lanes for each as fit a vector.
  template <int Count>
  static constexpr int kLanesOf = Count * kLanes < kWidth ? Count * kLanes : kWidth;

  template <int Count>
  NPUGRAD_INLINE void several(int first, Vec<float, kLanesOf<Count>>& x, Vec<float, kLanesOf<Count>>& y) const {
    if constexpr (Count == 1) {
      point(first, x, y);
    } else {
      Vec<float, kLanesOf<Count / 2>> xs[2], ys[2];
      several<Count / 2>(first, xs[0], ys[0]);
      several<Count / 2>(first + Count / 2, xs[1], ys[1]);
      if constexpr (kLanesOf<Count / 2> == kWidth) {
        x = add_pairs(xs[0], xs[1]);
        y = add_pairs(ys[0], ys[1]);
      } else {
        x = joined<float, kLanesOf<Count / 2>>(xs[0], xs[1]);
        y = joined<float, kLanesOf<Count / 2>>(ys[0], ys[1]);
      }
    }
  }

  // All points of the group; sums over the channels of their terms.
  NPUGRAD_INLINE void run(float* by_x, float* by_y) const {
    if constexpr (Gather) {
      for (int j = 0; j < kGroup; j += kWidth) {
        Floats x, y;
        several<kWidth>(j, x, y);
        store(by_x + j, x);
        store(by_y + j, y);
      }
    } else {
      Part x, y;
      for (int j = 0; j < kGroup; ++j) point(j, x, y);
    }
  }
  // The same for the nearest pixel alone.
  NPUGRAD_INLINE void run_nearest() const {
    for (int j = 0; j < kGroup; ++j)
#pragma GCC unroll 4
      for (int k = 0; k < kParts; ++k) {
        float* p = sums + static_cast<int64_t>(ready.pixel[j]) * L + k * kLanes;
        store_lanes<kLanes>(p, load_lanes<kLanes>(p) + load_lanes<kLanes>(grad + j * L + k * kLanes));
      }
  }
};

}  // namespace npugrad
#endif
