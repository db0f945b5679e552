// In libopapi_cv.
#include "grid_sampler_kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace cann_sim {
namespace {

// A position on one axis, and its derivative by the grid's value. Number is float, in which kernels for Atlas
// A2 and A3 take coordinates of all types but double, each operation rounded (grid_sampler2_d_grad.h,
// grid_sampler3_d_grad.h).
template <typename Number>
struct Coordinate {
  Number position;
  Number factor;
};

constexpr double kOutside = -100;  // where every neighbour is outside
constexpr double kBicubicA = -0.75;

template <typename Number>
Coordinate<Number> unnormalize(Number value, int64_t size, bool align_corners) {
  const auto length = static_cast<Number>(size), last = static_cast<Number>(size - 1);
  if (align_corners) {
    return {(value + 1) / 2 * last, last / 2};
  }
  return {((value + 1) * length - 1) / 2, length / 2};
}

template <typename Number>
Coordinate<Number> clip(Coordinate<Number> at, int64_t size) {
  const auto last = static_cast<Number>(size - 1);
  if (at.position <= 0) {
    return {0, 0};
  }
  if (at.position >= last) {
    return {last, 0};
  }
  return at;
}

// How often a distance holds the span, and what is left. In float by the rounded 1 / span, as AscendC's
// vectors do.
double fold(double distance, double span, double& rest) {
  rest = std::fmod(distance, span);
  return std::floor(distance / span);
}
float fold(float distance, float span, float& rest) {
  constexpr float most = 2147483648.0f;  // where a cast to int32 ends
  const float folds = std::min(std::floor(distance * (1 / span)), most);
  const float taken = folds * span;
  rest = distance - taken;
  return folds;
}

template <typename Number>
Coordinate<Number> reflect(Coordinate<Number> at, int64_t size, bool align_corners) {
  const Number low = align_corners ? Number(0) : Number(-0.5);
  const auto span = static_cast<Number>(align_corners ? size - 1 : size);
  if (span == 0) {
    return {0, 0};
  }
  const Number sign = at.position < low ? Number(-1) : Number(1);
  Number rest = 0;
  const bool flips_even = std::fmod(fold(std::abs(at.position - low), span, rest), Number(2)) == 0;
  if (flips_even) {
    return {rest + low, at.factor * sign};
  }
  return {span - rest + low, -at.factor * sign};
}

template <typename Number>
Coordinate<Number> pad(Coordinate<Number> at, int64_t size, const GridOptions& options) {
  if (options.padding == kReflection) at = reflect(at, size, options.align_corners);
  if (options.padding != kZeros) at = clip(at, size);
  constexpr double limit = std::numeric_limits<int32_t>::max();
  if (!std::isfinite(at.position) || std::fabs(at.position) > limit) at.position = kOutside;
  return at;
}

// Weights of the neighbours of a position on one axis, and their derivatives by the position.
struct Neighbours {
  int64_t first = 0;
  int count = 0;
  double weight[4];
  double slope[4];
};

Neighbours linear(double position) {
  const double floor = std::floor(position), t = position - floor;
  return {static_cast<int64_t>(floor), 2, {1 - t, t, 0, 0}, {-1, 1, 0, 0}};
}

Neighbours nearest(double position) {
  return {static_cast<int64_t>(std::nearbyint(position)), 1, {1, 0, 0, 0}, {0, 0, 0, 0}};
}

// Cubic convolution, for distances up to 1 and from 1 to 2, with derivatives.
double near_weight(double x) { return ((kBicubicA + 2) * x - (kBicubicA + 3)) * x * x + 1; }
double far_weight(double x) {
  return ((kBicubicA * x - 5 * kBicubicA) * x + 8 * kBicubicA) * x - 4 * kBicubicA;
}
double near_slope(double x) { return (3 * (kBicubicA + 2) * x - 2 * (kBicubicA + 3)) * x; }
double far_slope(double x) { return (3 * kBicubicA * x - 10 * kBicubicA) * x + 8 * kBicubicA; }

Neighbours cubic(double position) {
  const double floor = std::floor(position), t = position - floor;
  return {static_cast<int64_t>(floor) - 1,
          4,
          {far_weight(t + 1), near_weight(t), near_weight(1 - t), far_weight(2 - t)},
          {far_slope(t + 1), near_slope(t), -near_slope(1 - t), -far_slope(2 - t)}};
}

// Where a neighbour lies after padding, or -1. Bicubic pads each neighbour on its own; the others padded
// before.
int64_t place(int64_t index, int64_t size, const GridOptions& options) {
  if (options.interpolation == kBicubic && options.padding != kZeros) {
    index = static_cast<int64_t>(pad<double>({static_cast<double>(index), 1}, size, options).position);
  }
  return index >= 0 && index < size ? index : -1;
}

struct Axis {
  Neighbours neighbours;
  double factor;
};

template <typename Number>
Axis make_axis(double value, int64_t size, const GridOptions& options) {
  Coordinate<Number> at = unnormalize(static_cast<Number>(value), size, options.align_corners);
  if (options.interpolation != kBicubic) {
    at = pad(at, size, options);
  } else if (!std::isfinite(at.position) || std::fabs(at.position) > std::numeric_limits<int32_t>::max()) {
    at.position = kOutside;
  }
  switch (options.interpolation) {
    case kNearest: return {nearest(at.position), at.factor};
    case kBicubic: return {cubic(at.position), at.factor};
    default: return {linear(at.position), at.factor};
  }
}

// The sizes of an image on each axis, the slowest first; its channels come last.
struct Cells {
  Shape sizes;
  int64_t count = 1;

  explicit Cells(const Shape& shape) : sizes(shape.begin() + 1, shape.end() - 1) {
    for (const int64_t size : sizes) count *= size;
  }
};

// One neighbour of a point: where it lies, its weight, and the weight's derivatives along each axis.
struct Corner {
  int64_t cell = 0;
  double weight = 1;
  double slopes[3] = {1, 1, 1};
};

// The neighbour of that number, the last axis counting fastest. False if it lies outside.
bool find_corner(const std::vector<Axis>& axes, const Shape& sizes, int64_t number,
                 const GridOptions& options, Corner& found) {
  int64_t step = 1;
  for (size_t k = axes.size(); k-- > 0;) {
    const Neighbours& near = axes[k].neighbours;
    const int64_t i = number % near.count, index = place(near.first + i, sizes[k], options);
    if (index < 0) return false;
    number /= near.count;
    found.cell += index * step;
    step *= sizes[k];
    found.weight *= near.weight[i];
    for (size_t m = 0; m < axes.size(); ++m) found.slopes[m] *= m == k ? near.slope[i] : near.weight[i];
  }
  return true;
}

}  // namespace

void grid_sampler_kernel(KernelRun& run, const GridOptions& options) {
  if (!options.channels_last) {
    for (const char* const image : {"gradOutput", "input", "inputGrad"}) run.move_to_end(image, 1);
  }
  const Cells image(run.shape("input")), points(run.shape("gradOutput"));
  const size_t rank = image.sizes.size();
  const auto channels = static_cast<size_t>(run.shape("input").back());
  const auto grad_output = run.read("gradOutput"), input = run.read("input"), grid = run.read("grid");
  std::vector<double> input_grad(input.size()), grid_grad(grid.size());
  std::vector<Axis> axes(rank);
  const bool is_double = run.dtype("input") == kDouble;
  const Summation summation = is_double ? run.summation.in_double() : run.summation;
  for (int64_t n = 0; n < run.shape("input")[0]; ++n) {
    for (const size_t in_turn : run.summation.order(static_cast<size_t>(points.count))) {
      const size_t point = static_cast<size_t>(n * points.count) + in_turn, at_grid = point * rank;
      int64_t corners = 1;
      for (size_t k = 0; k < rank; ++k) {
        const double value = grid[at_grid + rank - 1 - k];
        axes[k] = is_double ? make_axis<double>(value, image.sizes[k], options)
                            : make_axis<float>(value, image.sizes[k], options);
        corners *= axes[k].neighbours.count;
      }
      const double* const gradient = &grad_output[point * channels];
      double slopes[3] = {};
      for (int64_t number = 0; number < corners; ++number) {
        Corner corner;
        if (!find_corner(axes, image.sizes, number, options, corner)) continue;
        const size_t at_input = static_cast<size_t>(n * image.count + corner.cell) * channels;
        if (options.wants_input_grad) {
          summation.add(&input_grad[at_input], corner.weight, gradient, channels);
        }
        double dot = 0;
        for (size_t c = 0; c < channels; ++c) dot += input[at_input + c] * gradient[c];
        for (size_t k = 0; k < rank; ++k) slopes[k] += dot * corner.slopes[k];
      }
      if (options.interpolation == kNearest) continue;  // its gradient by the grid is 0
      for (size_t k = 0; k < rank; ++k) grid_grad[at_grid + rank - 1 - k] = axes[k].factor * slopes[k];
    }
  }
  if (options.wants_input_grad) run.add("inputGrad", input_grad);
  if (options.wants_grid_grad) run.write("gridGrad", grid_grad);
}

}  // namespace cann_sim
