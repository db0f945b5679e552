// A call of grid_sampler_3d_backward in mode bilinear, data of type T: waves of volumes, their blocks of channels, bands of slices.
#ifndef NPUGRAD_GRID_VOLUME_H
#define NPUGRAD_GRID_VOLUME_H

#include <cstring>
#include <vector>

#include "grid_crowds.h"
#include "grid_points.h"

namespace npugrad {

// The eight voxels around a point; weights of both sides of each axis, z first.
struct Voxels {
  int32_t first[3];
  float weight[3][2], slope[3];
  uint8_t inside;  // a bit for each that lies in the volume: 4 z + 2 y + x
};

template <typename T>
class GridVolume {
 public:
  GridVolume(Call& call, const Sampling& sampling)
      : call_(call), sampling_(sampling), n_(input_.shape(0)), c_(input_.shape(1)),
        size_{input_.shape(2), input_.shape(3), input_.shape(4)}, plane_(size_[1] * size_[2]),
        voxels_(size_[0] * plane_), points_(grad_output_.count() / (n_ * c_)),
        scatter_(input_grad_.given()), gather_(grid_grad_.given()) {}

  void run() {
    if (!scatter_ && !gather_) return;
    if (c_ <= 4) return run_lanes<4>();
    if (c_ <= 8) return run_lanes<8>();
    run_lanes<16>();
  }

 private:
  static constexpr int64_t kWaveBytes = 64 << 20;    // scratch memory of a wave, unless one volume needs more
  static constexpr int64_t kBandBytes = 512 << 10;   // of the slices of a task, so that they stay near
  static constexpr int64_t kSpan = 1 << 11;          // points of a task
  static constexpr int64_t kAhead = 8;               // points ahead that voxels are fetched; gradients 2x
  static constexpr int64_t kStreamBytes = 16 << 20;  // size of input_grad from which it may bypass the cache

  template <int L>
  void run_lanes() {
    const int64_t blocks = ceil_div(c_, L), bytes = blocks * points_ * 4 * (L + (gather_ ? 8 : 0));
    const int64_t images = std::min(n_, std::max<int64_t>(1, kWaveBytes / std::max<int64_t>(1, bytes)));
    placed_ = call_.template scratch<Voxels>(images * points_);
    order_ = call_.template scratch<int32_t>(images * points_);
    starts_.resize(static_cast<size_t>(images * (size_[0] + 2)));
    grads_ = call_.template scratch<float>(images * blocks * points_ * L);
    if (gather_) dots_ = call_.template scratch<float>(images * blocks * points_ * 8);
    for (int64_t image = 0; image < n_; image += images) {
      const int64_t count = std::min(images, n_ - image);
      place(image, count);
      run_wave<L>(image, count, blocks);
    }
  }

  // Where each point lies; then the points of each image by the slice they lie in.
  void place(int64_t image, int64_t count) {
    const int64_t spans = ceil_div(points_, kSpan);
    call_.parallel(count * spans, [&](int64_t task, int) {
      const Span span(task % spans, kSpan, points_);
      const int64_t at = task / spans;
      for (int64_t point = span.begin; point < span.end; point += kWidth)
        place_some(image + at, point, std::min<int64_t>(kWidth, span.end - point), &placed_[at * points_ + point]);
    });
    call_.parallel(count, [&](int64_t at, int) {
      int64_t* starts = &starts_[static_cast<size_t>(at * (size_[0] + 2))];
      const Voxels* placed = &placed_[at * points_];
      std::fill_n(starts, size_[0] + 2, 0);
      for (int64_t i = 0; i < points_; ++i)
        if (placed[i].inside) ++starts[placed[i].first[0] + 2];
      for (int64_t z = 0; z <= size_[0]; ++z) starts[z + 1] += starts[z];
      std::vector<int64_t> next(starts, starts + size_[0] + 1);
      for (int64_t i = 0; i < points_; ++i)
        if (placed[i].inside)
          order_[at * points_ + next[static_cast<size_t>(placed[i].first[0] + 1)]++] = static_cast<int32_t>(i);
    });
  }

  void place_some(int64_t image, int64_t point, int64_t count, Voxels* to) const {
    alignas(64) float coordinates[3][kWidth] = {};
    for (int64_t i = 0; i < count; ++i) {
      const T* from = at_point(grid_, 1, image, point + i);
      for (int axis = 0; axis < 3; ++axis) coordinates[axis][i] = to_float(from[(2 - axis) * grid_.stride(4)]);
    }
    for (int64_t i = 0; i < count; ++i) to[i].inside = 0xff;
    for (int axis = 0; axis < 3; ++axis) {
      const Placed found = Axis(size_[axis], sampling_).place(load(coordinates[axis]));
      const int step = 4 >> axis;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t first = found.pixel[i];
        to[i].first[axis] = found.pixel[i];
        to[i].weight[axis][0] = found.before[i];
        to[i].weight[axis][1] = found.after[i];
        to[i].slope[axis] = found.slope[i];
        // Bits of the voxels on either side of this axis.
        const int upper = step == 4 ? 0xf0 : step == 2 ? 0xcc : 0xaa;
        if (first < 0 || first >= size_[axis]) to[i].inside &= static_cast<uint8_t>(upper);
        if (first < -1 || first >= size_[axis] - 1) to[i].inside &= static_cast<uint8_t>(~upper);
      }
    }
  }

  // One block of channels of one image.
  struct Unit {
    int64_t number, at, image, channel;
    int channels;
  };
  // Scratch memory of the tasks that run in it; sums are 0 between them.
  struct Slot {
    Buffer<float> volume, sums;
    Buffer<double> exact;
    Crowds crowds;
  };

  template <int L>
  void run_wave(int64_t image, int64_t count, int64_t blocks) {
    const auto unit = [&](int64_t number) {
      const int64_t at = number / blocks, channel = number % blocks * L;
      return Unit{number, at, image + at, channel, static_cast<int>(std::min<int64_t>(L, c_ - channel))};
    };
    const int64_t outer = grad_output_.shape(2);
    call_.parallel(count * blocks * outer, [&](int64_t task, int) {
      const int64_t number = task / outer, slice = task % outer;
      lay<L>(grad_output_, unit(number), slice, &grads_[(number * points_ + slice * (points_ / outer)) * L]);
    });
    const int64_t deep = std::min(size_[0], std::max<int64_t>(1, kBandBytes / (4 * L * plane_)));
    const int64_t bands = ceil_div(size_[0], deep), floats = (deep * plane_ + kWidth) * L;
    std::vector<Slot> slots(static_cast<size_t>(call_.threads()));
    call_.parallel(count * blocks * bands, [&](int64_t task, int slot) {
      Slot& own = slots[static_cast<size_t>(slot)];
      if (gather_ && !own.volume.get()) own.volume = call_.template scratch<float>(floats);
      if (scatter_ && !own.sums.get()) {
        own.sums = call_.template scratch<float>(floats);
        std::memset(own.sums.get(), 0, static_cast<size_t>(floats) * sizeof(float));
      }
      run_band<L>(unit(task / bands), Span(task % bands, deep, size_[0]), own);
    });
    if (!gather_) return;
    const int64_t spans = ceil_div(points_, kSpan);
    call_.parallel(count * spans, [&](int64_t task, int) {
      const Span span(task % spans, kSpan, points_);
      for (int64_t point = span.begin; point < span.end; ++point)
        finish(image + task / spans, point, placed_[task / spans * points_ + point],
               &dots_[(task / spans * blocks * points_ + point) * 8], blocks);
    });
  }

  // A slice of a tensor, its channels side by side.
  template <int L>
  void lay(const Tensor& tensor, const Unit& unit, int64_t slice, float* to) const {
    const int64_t rows = tensor.shape(3), columns = tensor.shape(4), plane = tensor.stride(1), pixel = tensor.stride(4);
    const T* from = tensor.data<const T>() + unit.image * tensor.stride(0) + unit.channel * plane +
                    slice * tensor.stride(2);
    const bool dense = tensor.stride(3) == columns * pixel;
    const int64_t count = dense ? rows * columns : columns, whole = count / kWidth * kWidth;
    for (int64_t row = 0; row < (dense ? 1 : rows); ++row, from += tensor.stride(3), to += count * L) {
      to_pixels<L>(from, plane, pixel, unit.channels, whole, to);
      if (whole == count) continue;
      alignas(64) float rest[kWidth * L];
      to_pixels<L>(from + whole * pixel, plane, pixel, unit.channels, count - whole, rest);
      std::memcpy(to + whole * L, rest, static_cast<size_t>((count - whole) * L) * sizeof(float));
    }
  }

  // The first of a point's voxels, which may lie outside, and floats from there to each.
  int64_t cell(const Voxels& voxels) const {
    return (int64_t{voxels.first[0]} * size_[1] + voxels.first[1]) * size_[2] + voxels.first[2];
  }
  template <int L>
  struct Steps {
    Steps(int64_t plane, int64_t row) {
      for (int corner = 0; corner < 8; ++corner)
        of[corner] = ((corner >> 2) * plane + (corner >> 1 & 1) * row + (corner & 1)) * L;
    }
    int64_t of[8];
  };

  // Slices of a volume: what their voxels give to the points that reach them, and the sums of what these give to the
  // voxels, slice by slice of the points, then in their own order.
  template <int L>
  void run_band(const Unit& unit, const Span& slices, Slot& own) {
    float *volume = own.volume.get(), *sums = own.sums.get();
    const int64_t* starts = &starts_[static_cast<size_t>(unit.at * (size_[0] + 2))];
    const int64_t base = slices.begin * plane_, first = starts[slices.begin], last = starts[slices.end + 1];
    if (gather_ && first < last)
      for (int64_t z = slices.begin; z < slices.end; ++z)
        lay<L>(input_, unit, z, volume + (z - slices.begin) * plane_ * L);
    const bool crowded = scatter_ && is_crowded(unit, slices, own.crowds);
    const ExactSums<L> exact{crowded ? exact_sums(own, slices.size() * plane_ * L) : nullptr};
    const Steps<L> steps(plane_, size_[2]);
    const int32_t* order = &order_[unit.at * points_];
    const Voxels* placed = &placed_[unit.at * points_];
    const float* grads = &grads_[unit.number * points_ * L];
    for (int64_t i = first; i < last; ++i) {
      if (i + 2 * kAhead < last) {
        __builtin_prefetch(placed + order[i + 2 * kAhead]);
        __builtin_prefetch(grads + order[i + 2 * kAhead] * int64_t{L});
      }
      if (i + kAhead < last) {
        const Voxels& soon = placed[order[i + kAhead]];
        prefetch(reached_in(slices, soon), (cell(soon) - base) * L, steps, volume, sums);
      }
      const int64_t point = order[i];
      const Voxels& voxels = placed[point];
      const float* grad = grads + point * L;
      const int reached = reached_in(slices, voxels);
      const int64_t at = (cell(voxels) - base) * L;
      float* dots = gather_ ? &dots_[(unit.number * points_ + point) * 8] : nullptr;
      if (reached == 0xff && !crowded) {
        at_all<L>(voxels, grad, steps, gather_ ? volume + at : nullptr, scatter_ ? sums + at : nullptr, dots);
        continue;
      }
      for (int left = reached; left; left &= left - 1) {
        const int corner = __builtin_ctz(static_cast<unsigned>(left));
        const int64_t to = at + steps.of[corner];
        if (gather_) dots[corner] = dot<L>(volume + to, grad);
        if (!scatter_) continue;
        if (crowded) {
          exact.add(to / L, weight(voxels, corner), grad);
        } else {
          add<L>(sums + to, grad, weight(voxels, corner));
        }
      }
    }
    if (!scatter_) return;
    T* to = input_grad_.template data<T>() + (unit.image * c_ + unit.channel) * voxels_ + base;
    if (crowded) return exact.write(0, slices.size() * plane_, to, voxels_, unit.channels);
    // A large result bypasses the cache where vectors are whole lines of it; planes take turns line by line.
    if constexpr (kWidth * sizeof(T) == 64) {
      const bool is_large = n_ * c_ * voxels_ >= kStreamBytes / int64_t{sizeof(T)};
      if (is_large && voxels_ % kWidth == 0 && aligned_start(to) == 0) {
        from_pixels<L, true>(sums, slices.size() * plane_, to, voxels_, unit.channels);
        return stream_fence();
      }
    }
    from_pixels<L>(sums, slices.size() * plane_, to, voxels_, unit.channels);
  }

  template <int L>
  NPUGRAD_INLINE void prefetch(
      int reached, int64_t at, const Steps<L>& steps, const float* volume, const float* sums) const {
    for (; reached; reached &= reached - 1) {
      const int64_t to = at + steps.of[__builtin_ctz(static_cast<unsigned>(reached))];
      if (gather_) __builtin_prefetch(volume + to);
      if (scatter_) __builtin_prefetch(sums + to, 1);
    }
  }

  // Which of a point's voxels lie in some slices.
  static NPUGRAD_INLINE int reached_in(const Span& slices, const Voxels& voxels) {
    int reached = voxels.inside;
    if (voxels.first[0] < slices.begin) reached &= 0xf0;
    if (voxels.first[0] + 1 >= slices.end) reached &= 0x0f;
    return reached;
  }
  bool is_crowded(const Unit& unit, const Span& slices, Crowds& crowds) const {
    const int64_t* starts = &starts_[static_cast<size_t>(unit.at * (size_[0] + 2))];
    crowds.reset(call_, slices.size() * plane_);
    constexpr int64_t kOf = Crowds::kOf;
    for (int64_t i = starts[slices.begin]; i + kOf <= starts[slices.end + 1] && !crowds.found(); i += kOf) {
      const int64_t point = order_[unit.at * points_ + i + Crowds::chosen(i / kOf)];
      const Voxels& voxels = placed_[unit.at * points_ + point];
      if (const int reached = reached_in(slices, voxels)) {
        const int64_t step = Steps<1>(plane_, size_[2]).of[__builtin_ctz(static_cast<unsigned>(reached))];
        crowds.count(cell(voxels) + step - slices.begin * plane_);
      }
    }
    return crowds.found();
  }
  double* exact_sums(Slot& own, int64_t count) const {
    own.exact = call_.template scratch<double>(count);
    std::fill_n(own.exact.get(), count, 0.0);
    return own.exact.get();
  }

  static NPUGRAD_INLINE float weight(const Voxels& voxels, int corner) {
    return voxels.weight[0][corner >> 2] * voxels.weight[1][corner >> 1 & 1] * voxels.weight[2][corner & 1];
  }
  template <int L>
  static NPUGRAD_INLINE void add(float* to, const float* grad, float weight) {
    constexpr int kLanes = L < kWidth ? L : kWidth;
    using Part = typename VectorOf<float, kLanes>::unaligned;
    for (int k = 0; k < L; k += kLanes)
      *reinterpret_cast<Part*>(to + k) += weight * *reinterpret_cast<const Part*>(grad + k);
  }
  template <int N>
  static NPUGRAD_INLINE Vec<float, 4> four_of(Vec<float, N> v) {
    if constexpr (N == 4) {
      return v;
    } else {
      Vec<float, N / 2> halves[2];
      std::memcpy(halves, &v, sizeof v);
      return four_of<N / 2>(halves[0] + halves[1]);
    }
  }
  // Four lanes, whose sum is the product of two rows of channels.
  template <int L>
  static NPUGRAD_INLINE Vec<float, 4> products(const float* a, const float* b) {
    constexpr int kLanes = L < kWidth ? L : kWidth;
    using Part = typename VectorOf<float, kLanes>::unaligned;
    Vec<float, kLanes> sum = {};
    for (int i = 0; i < L; i += kLanes)
      sum += *reinterpret_cast<const Part*>(a + i) * *reinterpret_cast<const Part*>(b + i);
    return four_of<kLanes>(sum);
  }
  template <int L>
  static NPUGRAD_INLINE float dot(const float* a, const float* b) {
    const Vec<float, 4> v = products<L>(a, b);
    return (v[0] + v[1]) + (v[2] + v[3]);
  }

  // A point whose voxels all lie in the slices. Sums of lanes are taken together where eight fill a vector.
  template <int L>
  static NPUGRAD_INLINE void at_all(
      const Voxels& voxels, const float* grad, const Steps<L>& steps, const float* volume, float* sums,
      float* dots) {
    if (sums)
#pragma GCC unroll 8
      for (int corner = 0; corner < 8; ++corner) add<L>(sums + steps.of[corner], grad, weight(voxels, corner));
    if (!volume) return;
    if constexpr (kWidth == 8) {
      Vec<float, 4> parts[8];
#pragma GCC unroll 8
      for (int corner = 0; corner < 8; ++corner) parts[corner] = products<L>(volume + steps.of[corner], grad);
      Floats pairs[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) pairs[i] = joined<float, 4>(parts[2 * i], parts[2 * i + 1]);
      store(dots, add_pairs(add_pairs(pairs[0], pairs[1]), add_pairs(pairs[2], pairs[3])));
    } else {
      for (int corner = 0; corner < 8; ++corner) dots[corner] = dot<L>(volume + steps.of[corner], grad);
    }
  }

  // The difference along each axis, interpolated over the others, as the reference does; term by term in float64 where
  // a product is not finite.
  void finish(int64_t image, int64_t point, const Voxels& voxels, const float* dots, int64_t blocks) const {
    double sums[8] = {}, wrong = 0;
    for (int corner = 0; corner < 8; ++corner) {
      if (!(voxels.inside >> corner & 1)) continue;
      for (int64_t block = 0; block < blocks; ++block) sums[corner] += dots[block * points_ * 8 + corner];
      wrong += sums[corner] - sums[corner];
    }
    if (wrong != 0) products_again(image, point, voxels, sums);
    T* to = grid_grad_.template data<T>() + 3 * (image * points_ + point);
    for (int axis = 0; axis < 3; ++axis) {
      const int step = 4 >> axis, outer = axis == 0 ? 1 : 0, inner = axis == 2 ? 1 : 2;
      double rows[2] = {};
      for (int i = 0; i < 2; ++i) {
        const double* from = sums + (4 >> inner) * i;
        const int next = 4 >> outer;
        rows[i] = (from[step] - from[0]) * double{voxels.weight[outer][0]} +
                  (from[next + step] - from[next]) * double{voxels.weight[outer][1]};
      }
      const double by = rows[0] * double{voxels.weight[inner][0]} + rows[1] * double{voxels.weight[inner][1]};
      to[2 - axis] = from_double<T>(by * double{voxels.slope[axis]});
    }
  }
  __attribute__((noinline)) void products_again(
      int64_t image, int64_t point, const Voxels& voxels, double* sums) const {
    const T* grad = at_point(grad_output_, 2, image, point);
    for (int corner = 0; corner < 8; ++corner) {
      sums[corner] = 0;
      if (!(voxels.inside >> corner & 1)) continue;
      const T* voxel = input_.data<const T>() + image * input_.stride(0) +
                       (voxels.first[0] + (corner >> 2)) * input_.stride(2) +
                       (voxels.first[1] + (corner >> 1 & 1)) * input_.stride(3) +
                       (voxels.first[2] + (corner & 1)) * input_.stride(4);
      for (int64_t c = 0; c < c_; ++c)
        sums[corner] += double{to_float(voxel[c * input_.stride(1)])} * to_float(grad[c * grad_output_.stride(1)]);
    }
  }
  // The first channel of a point; its spatial axes begin at `axis`.
  const T* at_point(const Tensor& tensor, int axis, int64_t image, int64_t point) const {
    const int64_t columns = tensor.shape(axis + 2), rows = tensor.shape(axis + 1);
    return tensor.data<const T>() + image * tensor.stride(0) + point / columns / rows * tensor.stride(axis) +
           point / columns % rows * tensor.stride(axis + 1) + point % columns * tensor.stride(axis + 2);
  }

  Call& call_;
  const Sampling sampling_;
  const Tensor grad_output_ = call_.tensor(0), input_ = call_.tensor(1), grid_ = call_.tensor(2),
               input_grad_ = call_.tensor(3), grid_grad_ = call_.tensor(4);
  const int64_t n_, c_, size_[3], plane_, voxels_, points_;
  const bool scatter_, gather_;
  Buffer<Voxels> placed_;
  Buffer<int32_t> order_;        // points of each image by slice, those that lie nowhere left out
  std::vector<int64_t> starts_;  // of each slice in it, from the one before the first
  Buffer<float> grads_, dots_;  // channels of points side by side; products at their voxels
};

}  // namespace npugrad
#endif
