// Where the points of a sampling grid lie: positions in float64 by the formulas of the reference, operation by
// operation, so that a point on a tie or a border falls on the same side.
#ifndef NPUGRAD_GRID_POINTS_H
#define NPUGRAD_GRID_POINTS_H

#include <algorithm>
#include <cmath>

#include "interleave.h"
#include "runtime.h"

namespace npugrad {

constexpr int kGroup = 16;  // points that are computed together

struct Sampling {
  bool nearest;
  int64_t padding;
  bool align_corners;
};
enum { kZeros, kBorder, kReflection };

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

// A product that is rounded before it is added to: keeps the compiler from fusing them.
NPUGRAD_INLINE HalfDoubles rounded(HalfDoubles v) {
#if defined(__x86_64__) && defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

using Longs = Vec<int64_t, kWidth / 2>;
NPUGRAD_INLINE HalfDoubles splat_double(double value) { return value - HalfDoubles{}; }
NPUGRAD_INLINE HalfDoubles choose(Longs mask, HalfDoubles a, HalfDoubles b) { return mask ? a : b; }
NPUGRAD_INLINE HalfDoubles choose(Longs mask, double a, HalfDoubles b) { return choose(mask, splat_double(a), b); }
NPUGRAD_INLINE HalfDoubles absolute(HalfDoubles v) { return (HalfDoubles)((Longs)v & INT64_MAX); }
NPUGRAD_INLINE bool any(Longs mask) {
  bool found = false;
  for (int i = 0; i < kWidth / 2; ++i) found |= mask[i] != 0;
  return found;
}

constexpr double kWholeLimit = 1125899906842624.0;  // 2^50: below, every variant finds whole numbers

// To nearest even, and down; for numbers below kWholeLimit.
#if defined(__AVX512F__)
NPUGRAD_INLINE HalfDoubles nearest_whole(HalfDoubles v) {
  return (HalfDoubles)_mm512_maskz_roundscale_pd(0xff, (__m512d)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
NPUGRAD_INLINE HalfDoubles floor_whole(HalfDoubles v) {
  return (HalfDoubles)_mm512_maskz_roundscale_pd(0xff, (__m512d)v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__)
NPUGRAD_INLINE HalfDoubles nearest_whole(HalfDoubles v) {
  return (HalfDoubles)_mm256_round_pd((__m256d)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
NPUGRAD_INLINE HalfDoubles floor_whole(HalfDoubles v) {
  return (HalfDoubles)_mm256_round_pd((__m256d)v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
#elif defined(__aarch64__)
NPUGRAD_INLINE HalfDoubles nearest_whole(HalfDoubles v) { return (HalfDoubles)vrndnq_f64((float64x2_t)v); }
NPUGRAD_INLINE HalfDoubles floor_whole(HalfDoubles v) { return (HalfDoubles)vrndmq_f64((float64x2_t)v); }
#else
constexpr double kWhole = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to whole numbers
NPUGRAD_INLINE HalfDoubles nearest_whole(HalfDoubles v) { return rounded(v + kWhole) - kWhole; }
NPUGRAD_INLINE HalfDoubles floor_whole(HalfDoubles v) {
  const HalfDoubles near = nearest_whole(v);
  return near - choose(near > v, 1.0, HalfDoubles{});
}
#endif

// One axis of the images.
class Axis {
 public:
  Axis(int64_t size, const Sampling& sampling)
      : size_(static_cast<double>(size)), last_(static_cast<double>(size - 1)), sampling_(sampling) {}

  // Positions of coordinates and their derivatives; -100 for those that have none.
  NPUGRAD_INLINE HalfDoubles locate(HalfDoubles coordinate, HalfDoubles& slope) const {
    HalfDoubles position;
    if (sampling_.align_corners) {
      position = rounded(rounded((coordinate + 1.0) * 0.5) * last_);
      slope = splat_double(last_ / 2);
    } else {
      position = rounded((rounded((coordinate + 1.0) * size_) - 1.0) * 0.5);
      slope = splat_double(size_ / 2);
    }
    if (sampling_.padding == kReflection) position = reflect(position, slope);
    if (sampling_.padding != kZeros) {
      const Longs at_start = position <= 0.0, at_end = position >= last_;
      position = choose(at_start, 0.0, choose(at_end, last_, position));
      slope = choose(at_start | at_end, 0.0, slope);
    }
    // No image reaches there, and pixels beside it can still be counted in 32 bits.
    return choose(absolute(position) < 1073741824.0, position, splat_double(-100.0));
  }

 private:
  // Folded back at both edges, again and again.
  HalfDoubles reflect(HalfDoubles position, HalfDoubles& slope) const {
    const double low = sampling_.align_corners ? 0.0 : -0.5, span = sampling_.align_corners ? last_ : size_;
    if (span == 0) {
      slope = HalfDoubles{};
      return HalfDoubles{};
    }
    const HalfDoubles distance = absolute(position - low), folds = distance / span;
    HalfDoubles rest = {}, backward = {};
    if (!divide_fast(distance, span, folds, rest, backward)) divide(distance, span, folds, rest, backward);
    const Longs is_backward = backward == 1.0, below = position < low;
    slope = choose(is_backward ^ below, -slope, slope);
    return choose(is_backward, span - rest, rest) + low;
  }
  // The rest of a division, exact, and whether the rounded quotient is odd.
  static void divide(
      HalfDoubles distance, double span, HalfDoubles folds, HalfDoubles& rest, HalfDoubles& odd) {
    for (int i = 0; i < kWidth / 2; ++i) {
      rest[i] = std::fmod(distance[i], span);
      odd[i] = std::fmod(std::floor(folds[i]), 2.0);
    }
  }
  // The same by a fused operation, if the variant has it and all quotients are small.
  static NPUGRAD_INLINE bool divide_fast(
      HalfDoubles distance, double span, HalfDoubles folds, HalfDoubles& rest, HalfDoubles& odd) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
    if (any(!(folds < kWholeLimit))) return false;
    const HalfDoubles whole = floor_whole(folds);
#if defined(__AVX512F__)
    rest = (HalfDoubles)_mm512_fnmadd_pd((__m512d)whole, (__m512d)splat_double(span), (__m512d)distance);
#elif defined(__FMA__)
    rest = (HalfDoubles)_mm256_fnmadd_pd((__m256d)whole, (__m256d)splat_double(span), (__m256d)distance);
#else
    rest = (HalfDoubles)vfmsq_f64((float64x2_t)distance, (float64x2_t)whole, (float64x2_t)splat_double(span));
#endif
    // The quotient may have been rounded up to a whole number.
    rest += choose(rest < 0.0, span, HalfDoubles{});
    odd = whole - 2.0 * floor_whole(whole * 0.5);
    return true;
#else
    (void)distance, (void)span, (void)folds, (void)rest, (void)odd;
    return false;
#endif
  }

  const double size_, last_;
  const Sampling sampling_;
};

// Reads the grid of a call, (N, OH, OW, 2) with any strides.
template <typename T>
class Grid {
 public:
  Grid(const Tensor& tensor, int64_t height, int64_t width, const Sampling& sampling)
      : tensor_(tensor), points_(tensor.shape(1) * tensor.shape(2)), sampling_(sampling), x_(width, sampling),
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
    using PixelsOfHalf = Vec<int32_t, kWidth / 2>;
    PixelsOfHalf pixels[2];
    HalfFloats first[2], second[2], slope[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      HalfDoubles exact;
      const HalfDoubles position =
          axis.locate(__builtin_convertvector(half_of(coordinates, k == 1), HalfDoubles), exact);
      const HalfDoubles whole = sampling_.nearest ? nearest_whole(position) : floor_whole(position);
      const HalfDoubles rest = position - whole;
      pixels[k] = __builtin_convertvector(whole, PixelsOfHalf);
      first[k] = __builtin_convertvector(1.0 - rest, HalfFloats);
      second[k] = __builtin_convertvector(rest, HalfFloats);
      slope[k] = __builtin_convertvector(exact, HalfFloats);
    }
    store_raw<int32_t>(pixel, joined<int32_t, kWidth / 2>(pixels[0], pixels[1]));
    store(before, joined<float, kWidth / 2>(first[0], first[1]));
    store(after, joined<float, kWidth / 2>(second[0], second[1]));
    store(slopes, joined<float, kWidth / 2>(slope[0], slope[1]));
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
  const Sampling sampling_;
  const Axis x_, y_;
};

}  // namespace npugrad
#endif
