// A call of grid_sampler_3d_backward in mode nearest, data of type T: input_grad is the sum of what points give to the
// voxel that they lie nearest to, grid_grad is 0.
//
// The limit is memory. Voxels are numbered in the order in which they lie, and cut into bands of numbers whose sums fit
// the first-level cache. Points are placed once and sorted by band once for all channels; a band takes up its points two
// channels at a time, in their own order, and writes its voxels whole, those that nothing reaches as well.
#ifndef NPUGRAD_GRID_NEAREST_H
#define NPUGRAD_GRID_NEAREST_H

#include <vector>

#include "grid_crowds.h"
#include "grid_points.h"

namespace npugrad {

template <typename T>
class GridNearest {
 public:
  GridNearest(Call& call, const Sampling& sampling)
      : call_(call), sampling_(sampling), n_(input_.shape(0)), c_(input_.shape(1)),
        size_{input_.shape(2), input_.shape(3), input_.shape(4)}, voxels_(product({size_[0], size_[1], size_[2]})),
        points_(grad_output_.count() / (n_ * c_)) {}

  void run() {
    if (input_grad_.given() && voxels_ > INT32_MAX) throw Unsupported();
    if (grid_grad_.given()) grid_grad_.zero();
    if (!input_grad_.given()) return;
    const int64_t bytes = points_ * (12 + (in_place() ? 0 : 4 * c_));
    const int64_t images = std::min(n_, std::max<int64_t>(1, kWaveBytes / bytes));
    cells_ = call_.template scratch<int32_t>(images * points_);
    hits_ = call_.template scratch<Hit>(images * points_);
    starts_.resize(static_cast<size_t>(images * (bands_ + 1)));
    if (!in_place()) copies_ = call_.template scratch<float>(images * c_ * points_);
    for (int64_t image = 0; image < n_; image += images) run_wave(image, std::min(images, n_ - image));
  }

 private:
  static constexpr int64_t kWaveBytes = 64 << 20;    // scratch memory of a wave, unless one volume needs more
  static constexpr int kBandShift = 12;              // of a voxel's number to its band
  static constexpr int64_t kBand = 1 << kBandShift;  // voxels of a band
  static constexpr int kAtOnce = 2;                  // channels whose sums are taken together
  static constexpr int64_t kPitch = kBand + 80;      // of their sums, which would evict each other at a power of 2
  static constexpr int64_t kChannels = 16;           // of a task, for which a band's points stay in the cache
  static constexpr int64_t kSpan = 1 << 11;          // points of a task
  static constexpr int64_t kStreamBytes = 16 << 20;  // size of input_grad from which it bypasses the cache

  // Scratch memory of the tasks that run in it.
  struct Slot {
    Buffer<float> sums;
    Crowds crowds;
  };
  // A point, and the voxel of its band that it gives to.
  struct Hit {
    int32_t cell, point;
  };

  void run_wave(int64_t image, int64_t count) {
    const int64_t spans = ceil_div(points_, kSpan);
    call_.parallel(count * spans, [&](int64_t task, int) {
      const Span span(task % spans, kSpan, points_);
      place(image + task / spans, span, &cells_[task / spans * points_]);
      if (!in_place()) copy(image + task / spans, span, &copies_[task / spans * c_ * points_]);
    });
    call_.parallel(count, [&](int64_t at, int) { sort(at); });
    const int64_t groups = ceil_div(c_, kChannels);
    std::vector<Slot> slots(static_cast<size_t>(call_.threads()));
    call_.parallel(count * bands_ * groups, [&](int64_t task, int slot) {
      Slot& own = slots[static_cast<size_t>(slot)];
      if (!own.sums.get()) {
        own.sums = call_.template scratch<float>(kAtOnce * kPitch);
        std::fill_n(own.sums.get(), kAtOnce * kPitch, 0.0f);  // and so they are between tasks
      }
      const int64_t at = task / groups / bands_, band = task / groups % bands_;
      const Span channels(task % groups, kChannels, c_);
      const bool crowded = is_crowded(at, band, own.crowds);
      int64_t channel = channels.begin;
      for (; channel + kAtOnce <= channels.end; channel += kAtOnce)
        run_band<kAtOnce>(at, image + at, channel, band, crowded, own.sums.get());
      for (; channel < channels.end; ++channel) run_band<1>(at, image + at, channel, band, crowded, own.sums.get());
      stream_fence();
    });
  }

  // Points of an image that reach a band.
  struct Hits {
    const Hit *begin, *end;
  };
  Hits hits_of(int64_t at, int64_t band) const {
    const int64_t* starts = &starts_[static_cast<size_t>(at * (bands_ + 1) + band)];
    return {&hits_[at * points_] + starts[0], &hits_[at * points_] + starts[1]};
  }
  bool is_crowded(int64_t at, int64_t band, Crowds& crowds) const {
    const Hits hits = hits_of(at, band);
    crowds.reset(call_, kBand);
    for (int64_t i = 0; Crowds::kOf * (i + 1) <= hits.end - hits.begin && !crowds.found(); ++i)
      crowds.count(hits.begin[Crowds::kOf * i + Crowds::chosen(i)].cell);
    return crowds.found();
  }

  // The numbers of the voxels that points lie nearest to; -1 where they reach none.
  void place(int64_t image, const Span& span, int32_t* cells) const {
    constexpr int kBlock = 64;
    const Axis axes[3] = {{size_[0], sampling_}, {size_[1], sampling_}, {size_[2], sampling_}};
    T buffer[3 * kBlock];
    alignas(64) float coordinates[3][kBlock] = {};
    for (int64_t first = span.begin; first < span.end; first += kBlock) {
      const int64_t count = std::min<int64_t>(kBlock, span.end - first);
      const T* from = grid_.run<T>(3 * (image * points_ + first), 3 * count, buffer);
      for (int64_t i = 0; i < count; ++i)
        for (int axis = 0; axis < 3; ++axis) coordinates[axis][i] = to_float(from[3 * i + 2 - axis]);
      alignas(64) int32_t found[kBlock];
      for (int64_t i = 0; i < count; i += kWidth) {
        Words cell = {};
        Ints inside = ~Ints{};
        for (int axis = 0; axis < 3; ++axis) {
          const auto size = static_cast<uint32_t>(size_[axis]);
          const Words pixel = (Words)axes[axis].place(load(coordinates[axis] + i)).pixel;
          inside &= pixel < size;  // a negative one is a huge one here
          cell = cell * size + pixel;
        }
        store_raw<uint32_t>(found + i, select(inside, cell, ~Words{}));
      }
      std::memcpy(cells + first, found, static_cast<size_t>(count) * sizeof(int32_t));
    }
  }

  // Points of an image by band, in their own order; those that reach nothing left out.
  void sort(int64_t at) {
    const int32_t* cells = &cells_[at * points_];
    int64_t* starts = &starts_[static_cast<size_t>(at * (bands_ + 1))];
    std::fill_n(starts, bands_ + 1, 0);
    for (int64_t i = 0; i < points_; ++i)
      if (cells[i] >= 0) ++starts[(cells[i] >> kBandShift) + 1];
    for (int64_t band = 0; band < bands_; ++band) starts[band + 1] += starts[band];
    std::vector<int64_t> next(starts, starts + bands_);
    for (int64_t i = 0; i < points_; ++i) {
      if (cells[i] < 0) continue;
      const int64_t to = next[static_cast<size_t>(cells[i] >> kBandShift)]++;
      hits_[at * points_ + to] = {static_cast<int32_t>(cells[i] & (kBand - 1)), static_cast<int32_t>(i)};
    }
  }

  // Whether each channel of grad_output lies as it is read: float32, point by point.
  bool in_place() const {
    const int64_t columns = grad_output_.shape(4);
    return std::is_same_v<T, float> && grad_output_.stride(4) == 1 && grad_output_.stride(3) == columns &&
           grad_output_.stride(2) == columns * grad_output_.shape(3);
  }
  void copy(int64_t image, const Span& span, float* to) const {
    alignas(64) T buffer[kSpan];
    for (int64_t channel = 0; channel < c_; ++channel) {
      const T* from = grad_output_.run<T>((image * c_ + channel) * points_ + span.begin, span.size(), buffer);
      float* const found = to + channel * points_ + span.begin;
      int64_t i = 0;
      for (; i + kWidth <= span.size(); i += kWidth) store(found + i, load(from + i));
      if (i < span.size()) store_part(found + i, load_part(from + i, span.size() - i), span.size() - i);
    }
  }

  // Some channels of a band: sums what its points give, and writes it.
  template <int K>
  void run_band(int64_t at, int64_t image, int64_t channel, int64_t band, bool crowded, float* sums) const {
    const bool here = in_place();
    const int64_t apart = here ? grad_output_.stride(1) : points_;
    const float* const grads =
        here ? grad_output_.data<const float>() + image * grad_output_.stride(0) + channel * apart
             : copies_.get() + (at * c_ + channel) * points_;
    const Hits hits = hits_of(at, band);
    if (crowded) {
      for (int k = 0; k < K; ++k) sum_exactly(hits, grads + k * apart, sums + k * kPitch);
    } else {
      for (const Hit* hit = hits.begin; hit < hits.end; ++hit)
        for (int k = 0; k < K; ++k) sums[k * kPitch + hit->cell] += grads[k * apart + hit->point];
    }
    const int64_t count = Span(band, kBand, voxels_).size();
    for (int k = 0; k < K; ++k) {
      T* const to = input_grad_.data<T>() + (image * c_ + channel + k) * voxels_ + band * kBand;
      if (input_grad_.count() >= kStreamBytes / int64_t{sizeof(T)}) {
        write<true>(sums + k * kPitch, count, to);
      } else {
        write<false>(sums + k * kPitch, count, to);
      }
    }
  }

  // The same sums in float64, rounded once.
  static __attribute__((noinline)) void sum_exactly(const Hits& hits, const float* grads, float* sums) {
    std::vector<double> exact(kBand);
    for (const Hit* hit = hits.begin; hit < hits.end; ++hit)
      exact[static_cast<size_t>(hit->cell)] += double{grads[hit->point]};
    std::copy(exact.begin(), exact.end(), sums);
  }

  // Sums become 0. Stream: whole vectors bypass the cache.
  template <bool Stream>
  static void write(float* sums, int64_t count, T* to) {
    const auto part = [&](int64_t i, int64_t n) {
      store_part(to + i, load_part(sums + i, n), n);
      std::fill_n(sums + i, n, 0.0f);
    };
    int64_t i = Stream ? std::min(aligned_start(to), count) : 0;
    part(0, i);
    for (; i + kWidth <= count; i += kWidth) {
      const Floats found = load(sums + i);
      store(sums + i, Floats{});
      if constexpr (Stream) {
        stream(to + i, found);
      } else {
        store(to + i, found);
      }
    }
    if (i < count) part(i, count - i);
  }

  Call& call_;
  const Sampling sampling_;
  const Tensor grad_output_ = call_.tensor(0), input_ = call_.tensor(1), grid_ = call_.tensor(2),
               input_grad_ = call_.tensor(3), grid_grad_ = call_.tensor(4);
  const int64_t n_, c_, size_[3], voxels_, points_, bands_ = ceil_div(voxels_, kBand);
  Buffer<int32_t> cells_;        // of each point
  Buffer<Hit> hits_;             // of each image by band
  std::vector<int64_t> starts_;  // of each band in them
  Buffer<float> copies_;         // grad_output, where it does not lie so
};

}  // namespace npugrad
#endif
