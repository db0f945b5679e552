// A call of grid_sampler_3d_backward on float64: points are placed once; input_grad goes by channels of a volume, and
// grid_grad by ranges of points.
#ifndef NPUGRAD_GRID_DOUBLES_H
#define NPUGRAD_GRID_DOUBLES_H

#include <algorithm>
#include <vector>

#include "grid_axis.h"
#include "runtime.h"

namespace npugrad {

class GridDoubles {
 public:
  GridDoubles(Call& call, const Sampling& sampling)
      : call_(call), sampling_(sampling), n_(input_.shape(0)), c_(input_.shape(1)),
        size_{input_.shape(2), input_.shape(3), input_.shape(4)}, voxels_(product({size_[0], size_[1], size_[2]})),
        points_(grad_output_.count() / (n_ * c_)) {}

  void run() {
    const bool gather = grid_grad_.given() && !sampling_.nearest;
    if (grid_grad_.given() && !gather) grid_grad_.zero();
    if (!input_grad_.given() && !gather) return;
    const int64_t bytes = points_ * static_cast<int64_t>(sizeof(Point));
    const int64_t images = std::min(n_, std::max<int64_t>(1, kWaveBytes / bytes));
    placed_ = call_.scratch<Point>(images * points_);
    for (int64_t image = 0; image < n_; image += images) {
      const int64_t count = std::min(images, n_ - image), spans = ceil_div(points_, kSpan);
      call_.parallel(count * spans, [&](int64_t task, int) {
        place(image + task / spans, Span(task % spans, kSpan, points_), &placed_[task / spans * points_]);
      });
      if (input_grad_.given())
        call_.parallel(count * c_, [&](int64_t task, int) {
          sum(image + task / c_, task % c_, &placed_[task / c_ * points_]);
        });
      if (gather)
        call_.parallel(count * spans, [&](int64_t task, int) {
          differ(image + task / spans, Span(task % spans, kSpan, points_), &placed_[task / spans * points_]);
        });
    }
  }

 private:
  static constexpr int64_t kWaveBytes = 64 << 20;  // scratch memory of a wave, unless one volume needs more
  static constexpr int64_t kSpan = 1 << 10;        // points of a task
  static constexpr int kAtOnce = kWidth / 2;

  // The voxels around a point, or the nearest one; weights of both sides of each axis, z first.
  struct Point {
    int32_t first[3];
    uint32_t inside;  // a bit for each that lies in the volume: 4 z + 2 y + x
    int64_t grad;     // where its gradient lies in a channel
    double weight[3][2], slope[3];
  };

  void place(int64_t image, const Span& span, Point* points) const {
    const int64_t columns = grad_output_.shape(4), rows = grad_output_.shape(3);
    const Axis axes[3] = {{size_[0], sampling_}, {size_[1], sampling_}, {size_[2], sampling_}};
    for (int64_t start = span.begin; start < span.end; start += kAtOnce) {
      HalfDoubles coordinates[3] = {};
      const int count = static_cast<int>(std::min<int64_t>(kAtOnce, span.end - start));
      for (int i = 0; i < count; ++i) {
        const int64_t at = start + i, z = at / columns / rows, y = at / columns % rows, x = at % columns;
        points[at].grad = z * grad_output_.stride(2) + y * grad_output_.stride(3) + x * grad_output_.stride(4);
        points[at].inside = sampling_.nearest ? 1 : 0xff;
        const double* from = grid_.data<const double>() + image * grid_.stride(0) + z * grid_.stride(1) +
                             y * grid_.stride(2) + x * grid_.stride(3);
        for (int axis = 0; axis < 3; ++axis) coordinates[axis][i] = from[(2 - axis) * grid_.stride(4)];
      }
      for (int axis = 0; axis < 3; ++axis) {
        const PlacedDoubles found = axes[axis].place_doubles(coordinates[axis]);
        for (int i = 0; i < count; ++i) keep(found, i, axis, points[start + i]);
      }
    }
  }
  void keep(const PlacedDoubles& found, int i, int axis, Point& point) const {
    const int64_t first = found.pixel[i];
    point.first[axis] = found.pixel[i];
    point.weight[axis][0] = sampling_.nearest ? 1.0 : found.before[i];
    point.weight[axis][1] = found.after[i];
    point.slope[axis] = found.slope[i];
    // Bits of the voxels on the upper side of this axis.
    const uint32_t upper = axis == 0 ? 0xf0 : axis == 1 ? 0xcc : 0xaa;
    if (first < 0 || first >= size_[axis]) point.inside &= upper;
    if (first < -1 || first >= size_[axis] - 1) point.inside &= ~upper;
  }

  void sum(int64_t image, int64_t channel, const Point* points) const {
    double* to = input_grad_.data<double>() + (image * c_ + channel) * voxels_;
    std::fill_n(to, voxels_, 0.0);
    const double* grads = grad_output_.data<const double>() + image * grad_output_.stride(0) +
                          channel * grad_output_.stride(1);
    const int64_t row = size_[2], plane = size_[1] * size_[2];
    for (int64_t i = 0; i < points_; ++i) {
      const Point& point = points[i];
      const double grad = grads[point.grad];
      const int64_t start = point.first[0] * plane + point.first[1] * row + point.first[2];
      each(point, [&](int z, int y, int x) {
        to[start + z * plane + y * row + x] += grad * (point.weight[0][z] * point.weight[1][y] * point.weight[2][x]);
      });
    }
  }

  // The difference along each axis of what the voxels give to a point, interpolated over the others.
  void differ(int64_t image, const Span& span, const Point* points) const {
    std::vector<double> all(static_cast<size_t>(span.size()) * 8);
    for (int64_t c = 0; c < c_; ++c) {
      const double* from = input_.data<const double>() + image * input_.stride(0) + c * input_.stride(1);
      const double* grads = grad_output_.data<const double>() + image * grad_output_.stride(0) +
                            c * grad_output_.stride(1);
      double* dots = all.data();
      for (int64_t i = span.begin; i < span.end; ++i, dots += 8) {
        const Point& point = points[i];
        const double grad = grads[point.grad];
        const double* start = from + point.first[0] * input_.stride(2) + point.first[1] * input_.stride(3) +
                              point.first[2] * input_.stride(4);
        each(point, [&](int z, int y, int x) {
          dots[4 * z + 2 * y + x] +=
              start[z * input_.stride(2) + y * input_.stride(3) + x * input_.stride(4)] * grad;
        });
      }
    }
    double* to = grid_grad_.data<double>() + 3 * (image * points_ + span.begin);
    const double* dots = all.data();
    for (int64_t i = span.begin; i < span.end; ++i, dots += 8, to += 3) finish(points[i], dots, to);
  }
  static void finish(const Point& point, const double* dots, double* to) {
    for (int axis = 0; axis < 3; ++axis) {
      const int step = 4 >> axis, outer = axis == 0 ? 1 : 0, inner = axis == 2 ? 1 : 2;
      double by = 0;
      for (int i = 0; i < 2; ++i) {
        const double* from = dots + (4 >> inner) * i;
        const int next = 4 >> outer;
        by += ((from[step] - from[0]) * point.weight[outer][0] +
               (from[next + step] - from[next]) * point.weight[outer][1]) *
              point.weight[inner][i];
      }
      to[2 - axis] = by * point.slope[axis];
    }
  }

  template <typename Body>
  static NPUGRAD_INLINE void each(const Point& point, const Body& body) {
    if (point.inside == 0xff) {
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) body(k >> 2, k >> 1 & 1, k & 1);
    } else {
      for (uint32_t left = point.inside; left; left &= left - 1) {
        const int k = __builtin_ctz(left);
        body(k >> 2, k >> 1 & 1, k & 1);
      }
    }
  }

  Call& call_;
  const Sampling sampling_;
  const Tensor grad_output_ = call_.tensor(0), input_ = call_.tensor(1), grid_ = call_.tensor(2),
               input_grad_ = call_.tensor(3), grid_grad_ = call_.tensor(4);
  const int64_t n_, c_, size_[3], voxels_, points_;
  Buffer<Point> placed_;
};

}  // namespace npugrad
#endif
