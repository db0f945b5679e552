// Where coordinates of a sampling grid lie on one axis: positions by the rule `torch` of npugrad/coordinates.py, operation
// by operation, so that every variant finds the pixels that PyTorch's kernels find. In float64 where the context asks.
#ifndef NPUGRAD_GRID_AXIS_H
#define NPUGRAD_GRID_AXIS_H

#include <cmath>

#include "interleave.h"
#include "rounding.h"

namespace npugrad {

struct Sampling {
  bool nearest;
  int64_t padding;
  bool align_corners;
  bool volume;   // three spatial axes: other formulas than for images
  bool float64;  // coordinates
};
enum { kZeros, kBorder, kReflection };

// A vector of points on one axis: the pixel before each, or the nearest one; far outside where there is none. Weights of
// that pixel and of the next one, and derivatives of positions by coordinates.
struct Placed {
  Ints pixel;
  Floats before, after, slope;
};

// The same of half as many points, in float64.
struct PlacedDoubles {
  Vec<int32_t, kWidth / 2> pixel;
  HalfDoubles before, after, slope;
};

class Axis {
 public:
  Axis(int64_t size, const Sampling& sampling)
      : size_(static_cast<double>(size)), last_(static_cast<double>(size - 1)),
        span_(static_cast<float>(sampling.align_corners ? last_ : size_)), end_(static_cast<float>(last_)),
        sampling_(sampling) {}

  NPUGRAD_INLINE Placed place(Floats coordinates) const {
    if (sampling_.float64) return place_float64(coordinates);
    const Floats u = coordinates + 1.0f;
    Floats position = rounded(sampling_.volume ? volume_position(u) : image_position(u));
    Floats slope = splat(span_ / 2);
    if (sampling_.padding == kReflection) position = reflect(position, slope);
    if (sampling_.padding != kZeros) {
      const Ints at_start = position <= 0.0f, at_end = position >= end_;
      position = select(at_start, Floats{}, select(at_end, splat(end_), position));
      slope = select(at_start | at_end, Floats{}, slope);
    }
    // No image reaches there, and pixels beside it can still be counted in 32 bits.
    position = select(absolute(position) < 1073741824.0f, position, splat(-100.0f));
    const Floats whole = sampling_.nearest ? nearest_whole(position) : floor_whole(position);
    const Floats rest = position - whole;
    return {__builtin_convertvector(whole, Ints), 1.0f - rest, rest, slope};
  }
  PlacedDoubles place_doubles(HalfDoubles coordinates) const {
    HalfDoubles slope;
    const HalfDoubles position = locate(coordinates, slope);
    const HalfDoubles whole = sampling_.nearest ? nearest_whole(position) : floor_whole(position);
    const HalfDoubles rest = position - whole;
    return {__builtin_convertvector(whole, Vec<int32_t, kWidth / 2>), 1.0 - rest, rest, slope};
  }

 private:
  // ------------------------------------------------------------------------------------------ float32

  NPUGRAD_INLINE Floats image_position(Floats u) const {
    if (sampling_.align_corners) return u * (span_ / 2);
    return fused(u, splat(span_ / 2), splat(-0.5f));
  }
  NPUGRAD_INLINE Floats volume_position(Floats u) const {
    if (sampling_.align_corners) return u * 0.5f * span_;
    return (rounded(u * span_) - 1.0f) * 0.5f;
  }

  // Folded back at both ends, again and again.
  Floats reflect(Floats position, Floats& slope) const {
    if (span_ == 0) {
      slope = Floats{};
      return Floats{};
    }
    const float low = sampling_.align_corners ? 0.0f : -0.5f;
    const Floats offset = position - low, distance = absolute(offset);
    Floats folded = {};
    const Ints is_backward = sampling_.volume ? fold_volume(distance, folded) : fold_image(distance, folded);
    slope = select(is_backward ^ (offset < 0.0f), -slope, slope);
    return folded + low;
  }
  Ints fold_image(Floats distance, Floats& folded) const {
    const float twice = span_ + span_;
    const Floats rest = fused(-truncated(distance / twice), splat(twice), distance), back = twice - rest;
    const Ints is_backward = rest > back;
    folded = select(is_backward, back, rest);
    return is_backward;
  }
  Ints fold_volume(Floats distance, Floats& folded) const {
    const Floats folds = distance / span_;
    Floats rest = {}, odd = {};
    if (all_set(distance < 8388608.0f)) {
      const Floats whole = floor_whole(folds);
      rest = fused(-whole, splat(span_), distance);
      // The quotient may have been rounded up to a whole number.
      rest += select(rest < 0.0f, splat(span_), Floats{});
      odd = whole - 2.0f * floor_whole(whole * 0.5f);
    } else {
      for (int i = 0; i < kWidth; ++i) {
        rest[i] = std::fmod(distance[i], span_);
        odd[i] = std::fmod(std::floor(folds[i]), 2.0f);
      }
    }
    const Ints is_backward = odd == 1.0f;
    folded = select(is_backward, span_ - rest, rest);
    return is_backward;
  }

  // ------------------------------------------------------------------------------------------ float64

  __attribute__((noinline)) Placed place_float64(Floats coordinates) const {
    Vec<int32_t, kWidth / 2> pixels[2];
    HalfFloats first[2], second[2], slopes[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
      const PlacedDoubles found = place_doubles(__builtin_convertvector(half_of(coordinates, k == 1), HalfDoubles));
      pixels[k] = found.pixel;
      first[k] = __builtin_convertvector(found.before, HalfFloats);
      second[k] = __builtin_convertvector(found.after, HalfFloats);
      slopes[k] = __builtin_convertvector(found.slope, HalfFloats);
    }
    return {joined<int32_t, kWidth / 2>(pixels[0], pixels[1]), joined<float, kWidth / 2>(first[0], first[1]),
            joined<float, kWidth / 2>(second[0], second[1]), joined<float, kWidth / 2>(slopes[0], slopes[1])};
  }
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
    return choose(absolute(position) < 1073741824.0, position, splat_double(-100.0));
  }
  HalfDoubles reflect(HalfDoubles position, HalfDoubles& slope) const {
    const double low = sampling_.align_corners ? 0.0 : -0.5, span = sampling_.align_corners ? last_ : size_;
    if (span == 0) {
      slope = HalfDoubles{};
      return HalfDoubles{};
    }
    const HalfDoubles distance = absolute(position - low), folds = distance / span;
    HalfDoubles rest = {}, odd = {};
    for (int i = 0; i < kWidth / 2; ++i) {
      rest[i] = std::fmod(distance[i], span);
      odd[i] = std::fmod(std::floor(folds[i]), 2.0);
    }
    const Longs is_backward = odd == 1.0, below = position < low;
    slope = choose(is_backward ^ below, -slope, slope);
    return choose(is_backward, span - rest, rest) + low;
  }

  const double size_, last_;
  const float span_, end_;
  const Sampling sampling_;
};

}  // namespace npugrad
#endif
