// A call of grid_sampler_2d_backward: its tasks, and grid_grad from what they add up. `grid_task.h` is what one does.
#ifndef NPUGRAD_GRID_SAMPLER_H
#define NPUGRAD_GRID_SAMPLER_H

#include <vector>

#include "grid_bands.h"
#include "grid_crowds.h"
#include "grid_windows.h"
#include "runtime.h"

namespace npugrad {

constexpr int64_t kBlock = 16, kSmallBlock = 8;  // channels side by side
constexpr int64_t kNearBytes = 320 << 10;       // pixels of a window for the cache, where input_grad takes as much
constexpr int64_t kFarBytes = 24 << 20;         // the same where the cache does not help, to bound scratch memory
constexpr double kScattered = 2.0;              // windows that a group touches in the mean, above which it does not
constexpr int64_t kTableGroups = 1 << 16;       // groups of an image whose points are kept for the next block
constexpr int64_t kTasks = 16;                  // wanted at least: images, else blocks of channels too
constexpr int64_t kFew = 4;                     // tasks below which images are cut into bands
constexpr int64_t kBandRows = 64;               // rows of a band at least
constexpr int64_t kBandWork = 1 << 16;          // pixels and points, times channels, below which bands do not pay
constexpr int64_t kFinishGroups = 1 << 10;      // of one task that adds up blocks

enum { kGradOutput, kInput, kGrid, kInputGrad, kGridGrad };

// A call with data of type T.
template <typename T>
class GridSampler {
 public:
  GridSampler(Call& call, const Sampling& sampling)
      : call_(call), sampling_(sampling), n_(input_.shape(0)), c_(input_.shape(1)), h_(input_.shape(2)),
        w_(input_.shape(3)), block_(block_of(n_, c_)), blocks_(ceil_div(c_, block_)),
        grid_(call.tensor(kGrid), h_, w_, sampling),
        scatter_(input_grad_.given()), gather_(grid_grad_.given() && !sampling.nearest),
        spans_(std::min(blocks_, ceil_div(kTasks, n_))),
        bands_(Windows::bands(h_, w_, bands_of())),
        near_(h_, w_, window_limit(std::min(c_, block_) > 8 ? kNearBytes : kFarBytes)),
        far_(h_, w_, window_limit(kFarBytes)), slots_(static_cast<size_t>(call.threads())) {}

  void run() {
    if (grid_grad_.given() && !gather_) grid_grad_.zero();
    if (!scatter_ && !gather_) return;
    if (bands_.count() > 1 && run_bands()) return;
    if (gather_ && spans_ > 1) partial_ = call_.template scratch<double>(n_ * spans_ * sums_size());
    call_.parallel(n_ * spans_, [&](int64_t task, int slot) {
      Task(*this, slots_[static_cast<size_t>(slot)], task / spans_, task % spans_).run();
    });
    if (gather_ && spans_ > 1) add_spans();
  }

 private:
  class Task;

  // Scratch memory of the tasks that run in it.
  struct Slot {
    Buffer<float> image, sums;  // sums are 0 between windows
    int64_t floats = 0;
    Buffer<Group> table;
    Buffer<double> partial, exact;
    int64_t doubles = 0;
    Crowds crowds;
    Listing listing;
  };

  // An image cut into bands.
  struct Banded {
    Bands bands;
    int64_t first_share;
  };

  int64_t sums_size() const { return 2 * kGroup * grid_.groups(); }

  // Channels of a block; fewer where there would be a single task.
  static int64_t block_of(int64_t n, int64_t c) { return n > 1 || c > kBlock ? kBlock : kSmallBlock; }
  static int lanes(int channels) { return channels <= 4 ? 4 : channels <= 8 ? 8 : kBlock; }

  // Bands of rows that an image is cut into; 1 where there are tasks enough without.
  int64_t bands_of() const {
    const int64_t tasks = n_ * spans_, bands = std::min(std::min(kTasks / tasks, h_ / kBandRows), Bands::kMost);
    if (tasks >= kFew || spans_ != blocks_ || bands < 2) return 1;
    const bool pays = (h_ * w_ + grid_.points()) * c_ >= kBandWork;
    return pays && Window{0, 0, ceil_div(h_, bands), w_}.pixels() <= window_limit(kFarBytes) ? bands : 1;
  }

  // Task by task of images, blocks and bands. False, with nothing written, if points lie in no order.
  bool run_bands() {
    const int64_t tasks = spans_ * bands_.count();
    listed_.resize(static_cast<size_t>(n_));
    int64_t shares = 0;
    for (int64_t image = 0; image < n_; ++image) {
      const auto located = [&](int64_t group) {
        Group found;
        Slopes slopes;
        grid_.locate(image, group, found, slopes);
        return found;
      };
      Banded& banded = listed_[static_cast<size_t>(image)];
      if (!banded.bands.fill(call_, bands_, grid_.groups(), sampling_.nearest, spans_ > 1, kScattered, located)) {
        listed_.clear();
        return false;
      }
      banded.first_share = shares;
      shares += spans_ * banded.bands.shares();
    }
    if (gather_) partial_ = call_.template scratch<double>(shares * 2 * kGroup);
    call_.parallel(n_ * tasks, [&](int64_t task, int slot) {
      const int64_t part = task % tasks;
      Task(*this, slots_[static_cast<size_t>(slot)], task / tasks, part / bands_.count())
          .run_band(part % bands_.count());
    });
    if (gather_) add_shares();
    return true;
  }

  int64_t window_limit(int64_t bytes) const {
    return bytes / static_cast<int64_t>(sizeof(float)) / lanes(static_cast<int>(std::min(c_, block_)));
  }

  // grid_grad of a group from the sums over its channels.
  void finish(int64_t image, int64_t group, const double* x, const double* y, const Slopes& slopes) const {
    const int count = grid_.count(group);
    alignas(64) float pairs[2 * kGroup];
    double wrong = 0;
    for (int j = 0; j < kGroup; ++j) {
      const double by_x = x[j] * slopes.x[j], by_y = y[j] * slopes.y[j];
      pairs[2 * j] = static_cast<float>(by_x);
      pairs[2 * j + 1] = static_cast<float>(by_y);
      wrong += (by_x - by_x) + (by_y - by_y);
    }
    T* to = grid_grad_.template data<T>() + 2 * (image * grid_.points() + group * kGroup);
    int i = 0;
    for (; i + kWidth <= 2 * count; i += kWidth) store(to + i, load(pairs + i));
    if (i < 2 * count) store_part(to + i, load(pairs + i), 2 * count - i);
    if (wrong != 0) finish_again(image, group, x, y, slopes);
  }

  // The same from sums over one block.
  NPUGRAD_INLINE void finish(int64_t image, int64_t group, const float* x, const float* y, const Slopes& slopes) const {
    const int64_t left = 2 * int64_t{grid_.count(group)};
    T* to = grid_grad_.template data<T>() + 2 * (image * grid_.points() + group * kGroup);
    Floats wrong = {};
    for (int j = 0; j < kGroup; j += kWidth) {
      const Floats sum_x = load(x + j), sum_y = load(y + j);
      const Floats by_x = sum_x * load(slopes.x + j), by_y = sum_y * load(slopes.y + j);
      wrong += (by_x - by_x) + (by_y - by_y);
      store_first(to + 2 * j, merge_first(by_x, by_y), left - 2 * j);
      store_first(to + 2 * j + kWidth, merge_second(by_x, by_y), left - 2 * j - kWidth);
    }
    if (any_set(wrong != wrong)) finish_again(image, group, x, y, slopes);
  }
  NPUGRAD_INLINE void prefetch_result(int64_t image, int64_t group) const {
    const T* to = grid_grad_.template data<T>() + 2 * (image * grid_.points() + group * kGroup);
    for (int64_t i = 0; i < 2 * kGroup; i += 64 / int64_t{sizeof(T)}) __builtin_prefetch(to + i, 1);
  }
  static NPUGRAD_INLINE void store_first(T* to, Floats v, int64_t count) {
    if (count >= kWidth) {
      store(to, v);
    } else if (count > 0) {
      store_part(to, v, count);
    }
  }

  // The same for points whose sums are not finite, as the reference computes them.
  template <typename Sum>
  __attribute__((noinline)) void finish_again(
      int64_t image, int64_t group, const Sum* x, const Sum* y, const Slopes& slopes) const {
    Group found;
    Slopes same;
    grid_.locate(image, group, found, same);
    T* to = grid_grad_.template data<T>() + 2 * (image * grid_.points() + group * kGroup);
    for (int j = 0; j < grid_.count(group); ++j) {
      if (std::isfinite(x[j]) && std::isfinite(y[j])) continue;
      double dots[4] = {};
      corner_products(image, group * kGroup + j, found.row[j], found.column[j], dots);
      const double left = found.left[j], right = found.right[j], top = found.top[j], bottom = found.bottom[j];
      to[2 * j] = from_double<T>(((dots[1] - dots[0]) * top + (dots[3] - dots[2]) * bottom) * double{slopes.x[j]});
      to[2 * j + 1] = from_double<T>(((dots[2] - dots[0]) * left + (dots[3] - dots[1]) * right) * double{slopes.y[j]});
    }
  }

  // Sums over the channels of input at each corner times grad_output; 0 outside.
  void corner_products(int64_t image, int64_t point, int64_t row, int64_t column, double* dots) const {
    const int64_t across = grad_output_.shape(3);
    const T* grad = grad_output_.data<const T>() + image * grad_output_.stride(0) +
                    point / across * grad_output_.stride(2) + point % across * grad_output_.stride(3);
    for (int corner = 0; corner < 4; ++corner) {
      const int64_t y = row + (corner >> 1), x = column + (corner & 1);
      if (y < 0 || y >= h_ || x < 0 || x >= w_) continue;
      const T* pixel = input_.data<const T>() + image * input_.stride(0) + y * input_.stride(2) + x * input_.stride(3);
      for (int64_t c = 0; c < c_; ++c)
        dots[corner] += double{to_float(pixel[c * input_.stride(1)])} * to_float(grad[c * grad_output_.stride(1)]);
    }
  }

  // grid_grad of some groups from what the spans of channels have added up.
  void finish_sums(int64_t image, int64_t begin, int64_t end, const double* partial, int64_t spans) const {
    for (int64_t group = begin; group < end; ++group) {
      double sums[2 * kGroup];
      std::copy_n(partial + 2 * kGroup * group, 2 * kGroup, sums);
      for (int64_t span = 1; span < spans; ++span) {
        const double* more = partial + span * sums_size() + 2 * kGroup * group;
        for (int j = 0; j < 2 * kGroup; ++j) sums[j] += more[j];
      }
      finish_sums_of(image, group, sums);
    }
  }
  void finish_sums_of(int64_t image, int64_t group, const double* sums) const {
    Group found;
    Slopes slopes;
    grid_.locate(image, group, found, slopes);
    finish(image, group, sums, sums + kGroup, slopes);
  }

  void add_spans() {
    const int64_t groups = grid_.groups(), parts = ceil_div(groups, kFinishGroups);
    call_.parallel(n_ * parts, [&](int64_t task, int) {
      const Span span(task % parts, kFinishGroups, groups);
      const int64_t image = task / parts;
      finish_sums(image, span.begin, span.end, partial_.get() + image * spans_ * sums_size(), spans_);
    });
  }

  double* share_of(const Banded& banded, int64_t span, int64_t share) const {
    return partial_.get() + 2 * kGroup * (banded.first_share + span * banded.bands.shares() + share);
  }
  void add_shares() {
    for (int64_t image = 0; image < n_; ++image) {
      const Banded& banded = listed_[static_cast<size_t>(image)];
      const auto& parted = banded.bands.parted();
      const auto total = static_cast<int64_t>(parted.size());
      call_.parallel(ceil_div(total, kFinishGroups), [&](int64_t task, int) {
        const Span span(task, kFinishGroups, total);
        for (int64_t i = span.begin; i < span.end; ++i) finish_shares(image, banded, parted[static_cast<size_t>(i)]);
      });
    }
  }
  void finish_shares(int64_t image, const Banded& banded, const Bands::Parted& parted) const {
    double sums[2 * kGroup] = {};
    for (int64_t span = 0; span < spans_; ++span)
      for (int64_t share = 0; share < parted.count; ++share) {
        const double* more = share_of(banded, span, parted.first + share);
        for (int j = 0; j < 2 * kGroup; ++j) sums[j] += more[j];
      }
    finish_sums_of(image, parted.group, sums);
  }

  Call& call_;
  const Sampling sampling_;
  const Tensor grad_output_ = call_.tensor(kGradOutput), input_ = call_.tensor(kInput),
               input_grad_ = call_.tensor(kInputGrad), grid_grad_ = call_.tensor(kGridGrad);
  const int64_t n_, c_, h_, w_, block_, blocks_;
  const Grid<T> grid_;
  const bool scatter_, gather_;
  const int64_t spans_;
  const Windows bands_, near_, far_;
  std::vector<Banded> listed_;  // by image
  Buffer<double> partial_;
  std::vector<Slot> slots_;
};

}  // namespace npugrad
#endif
