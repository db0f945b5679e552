// The points of a sampling grid of images, in groups: which pixels they touch, and how.
#ifndef NPUGRAD_GRID_POINTS_H
#define NPUGRAD_GRID_POINTS_H

#include <algorithm>
#include <cmath>

#include "grid_axis.h"
#include "runtime.h"

namespace npugrad {

constexpr int kGroup = 16;  // points that are computed together

// The pixel at the top left of each point of a group, or the nearest one; far outside where there is none. Weights
// of the columns left and right of it and of the rows above and below.
struct Group {
  alignas(64) int32_t row[kGroup];
  int32_t column[kGroup];
  float left[kGroup], right[kGroup], top[kGroup], bottom[kGroup];
};
// Derivatives of positions by coordinates: halves of whole numbers.
struct Slopes {
  alignas(64) float x[kGroup];
  float y[kGroup];
};

// Checks what memory safety rests on.
inline void require_shape(const Tensor& tensor, std::initializer_list<int64_t> shape, bool output = false) {
  if (!tensor.given()) return;
  require(tensor.rank() == static_cast<int32_t>(shape.size()) && (!output || tensor.contiguous()));
  int axis = 0;
  for (int64_t size : shape) require(tensor.shape(axis++) == size);
}

// Reads the grid of a call, (N, OH, OW, 2) with any strides.
template <typename T>
class Grid {
 public:
  Grid(const Tensor& tensor, int64_t height, int64_t width, const Sampling& sampling)
      : tensor_(tensor), points_(tensor.shape(1) * tensor.shape(2)), x_(width, sampling),
        y_(height, sampling) {}

  int64_t points() const { return points_; }
  int64_t groups() const { return ceil_div(points_, kGroup); }
  int count(int64_t group) const { return static_cast<int>(std::min<int64_t>(kGroup, points_ - group * kGroup)); }

  // Group `group` of an image. Points beyond the last one lie far outside.
  __attribute__((noinline)) void locate(int64_t image, int64_t group, Group& found, Slopes& slopes) const {
    alignas(64) float x[kGroup], y[kGroup];
    read(image, group, x, y);
    for (int i = 0; i < kGroup; i += kWidth) {
      place(x_, load(x + i), found.column + i, found.left + i, found.right + i, slopes.x + i);
      place(y_, load(y + i), found.row + i, found.top + i, found.bottom + i, slopes.y + i);
    }
  }

  // Reads ahead; of points that lie in a row.
  NPUGRAD_INLINE void prefetch(int64_t image, int64_t group) const {
    if (!tensor_.contiguous()) return;
    const T* from = tensor_.data<const T>() + 2 * (image * points_ + group * kGroup);
    for (int64_t i = 0; i < 2 * kGroup; i += 64 / int64_t{sizeof(T)}) __builtin_prefetch(from + i);
  }

 private:
  // Whole vectors are stored: what reads them next would wait for halves.
  NPUGRAD_INLINE void place(
      const Axis& axis, Floats coordinates, int32_t* pixel, float* before, float* after, float* slopes) const {
    const Placed found = axis.place(coordinates);
    store_raw<int32_t>(pixel, found.pixel);
    store(before, found.before);
    store(after, found.after);
    store(slopes, found.slope);
  }

  void read(int64_t image, int64_t group, float* x, float* y) const {
    const int found = count(group);
    if (tensor_.contiguous() && found == kGroup) {
      const T* from = tensor_.data<const T>() + 2 * (image * points_ + group * kGroup);
      for (int i = 0; i < kGroup; i += kWidth, from += 2 * kWidth) {
        const Floats a = load(from), b = load(from + kWidth);
        store(x + i, pick_even(a, b));
        store(y + i, pick_odd(a, b));
      }
      return;
    }
    std::fill_n(x, kGroup, NAN);
    std::fill_n(y, kGroup, NAN);
    const int64_t columns = tensor_.shape(2);
    int64_t row = group * kGroup / columns, column = group * kGroup % columns;
    for (int i = 0; i < found; ++i) {
      const T* from = tensor_.data<const T>() + image * tensor_.stride(0) + row * tensor_.stride(1) +
                      column * tensor_.stride(2);
      x[i] = to_float(from[0]);
      y[i] = to_float(from[tensor_.stride(3)]);
      if (++column == columns) column = 0, ++row;
    }
  }

  const Tensor tensor_;
  const int64_t points_;
  const Axis x_, y_;
};

}  // namespace npugrad
#endif
