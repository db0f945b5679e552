// aclnnGridSampler2DBackward: input (N, C, H, W) sampled at the points of grid (N, OH, OW, 2).
//
//   input_grad[corner]  += w * grad_output[point]      for the pixels around each point, w their weights
//   grid_grad[point]     = slope * sum over channels of grad_output[point] * (differences between those pixels)
//
// The limits are the loads and stores at the corners. Up to 16 channels of an image are laid side by side, so that a
// corner is one cache line: input once more in scratch memory, input_grad as sums in scratch memory, each with a border
// of one pixel. Corners outside fall on the border, which is 0 in the one and never read in the other: no point needs a
// branch. An image too large for that is cut into windows, and each window goes through the groups of points that touch
// it.
//
// A task is an image and some of its blocks of channels; where these are few, one band of rows of them (grid_bands.h).
// Sums of grid_grad are float32 over a block, float64 over blocks, in order. Where one is not finite it is computed again in float64, term by term as the reference does.
#include "grid_bands.h"
#include "grid_corners.h"
#include "grid_windows.h"

namespace npugrad {
namespace {

constexpr int64_t kBlock = 16, kSmallBlock = 8;  // channels side by side
constexpr int64_t kNearBytes = 320 << 10;       // pixels of a window for the cache, where input_grad takes as much
constexpr int64_t kFarBytes = 24 << 20;         // the same where the cache does not help, to bound scratch memory
constexpr double kScattered = 2.0;              // windows that a group touches in the mean, above which it does not
constexpr int64_t kTableGroups = 1 << 16;       // groups of an image whose points are kept for the next block
constexpr int64_t kTasks = 16;                  // wanted at least: images, else blocks of channels too
constexpr int64_t kFew = 4;                     // tasks below which images are cut into bands
constexpr int64_t kBandRows = 64;               // rows of a band at least
constexpr int64_t kBandWork = 1 << 16;          // pixels and points, times channels, below which bands do not pay
constexpr int64_t kPrefetchBytes = 512 << 10;   // size of a window from which it pays
constexpr int64_t kAhead = 3;                   // groups that grad_output is fetched ahead
constexpr int64_t kRowsAhead = 3;               // rows of input that are fetched ahead
constexpr int64_t kSoonBytes = 32 << 10;        // planes of a block that are fetched a block ahead
constexpr int64_t kFinishGroups = 1 << 10;      // of one task that adds up blocks

enum { kGradOutput, kInput, kGrid, kInputGrad, kGridGrad };

template <int Write, typename T>
NPUGRAD_INLINE void prefetch_rows(const T* from, int64_t plane, int channels, int64_t count) {
  constexpr auto kLine = static_cast<int64_t>(64 / sizeof(T));
  for (int c = 0; c < channels; ++c)
    for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + c * plane + i, Write);
}
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
        bands_(Windows::bands(h_, w_, bands_of())), near_(h_, w_, window_limit(std::min(c_, block_) > 8 ? kNearBytes : kFarBytes)),
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
  // Scratch memory of the tasks that run in it.
  struct Slot {
    Buffer<float> image, sums;  // sums are 0 between windows
    int64_t floats = 0;
    Buffer<Group> table;
    Buffer<double> partial;
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

  // An image and a span of its blocks of channels.
  class Task {
   public:
    Task(GridSampler& whole, Slot& slot, int64_t image, int64_t span)
        : whole_(whole), slot_(slot), n_(image), span_(span), begin_(whole.blocks_ * span / whole.spans_),
          end_(whole.blocks_ * (span + 1) / whole.spans_), groups_(whole.grid_.groups()),
          has_table_(end_ - begin_ > 1 || whole.near_.count() > 1), windows_(&whole.near_) {}

    void run() {
      has_table_ &= groups_ <= kTableGroups;
      if (has_table_ && !slot_.table.get()) slot_.table = whole_.call_.template scratch<Group>(groups_);
      choose_windows();
      allocate();
      for (int64_t index = 0; index < windows_->count(); ++index) run_window(index);
      if (whole_.gather_ && whole_.spans_ == 1 && !direct_) whole_.finish_sums(n_, 0, groups_, partial_, 1);
    }

    // One band of rows, with the groups that were listed for it.
    void run_band(int64_t band) {
      has_table_ = false;
      windows_ = &whole_.bands_;
      banded_ = &whole_.listed_[static_cast<size_t>(n_)];
      allocate();
      run_window(band);
    }

   private:
    void run_window(int64_t index) {
      const Window window = (*windows_)[index];
      for (int64_t block = begin_; block < end_; ++block) {
        const int channels = static_cast<int>(std::min(whole_.block_, whole_.c_ - block * whole_.block_));
        switch (lanes(channels)) {
          case 4: with_channels<4>(index, window, block, channels); break;
          case 8: with_channels<8>(index, window, block, channels); break;
          default: with_channels<kBlock>(index, window, block, channels);
        }
      }
    }

    // Windows that stay in the cache if points next to each other lie next to each other in the image too.
    void choose_windows() {
      listed_ = whole_.near_.count() > 1 && list_groups(whole_.near_, kScattered);
      if (!listed_) {
        windows_ = &whole_.far_;
        listed_ = windows_->count() > 1 && list_groups(*windows_, HUGE_VAL);
      }
      direct_ = whole_.spans_ == 1 && whole_.blocks_ == 1 && windows_->count() == 1;
    }
    bool list_groups(const Windows& windows, double most) {
      return slot_.listing.fill(windows, groups_, whole_.sampling_.nearest, most, [&](int64_t group) -> const Group& {
        Slopes slopes;
        return located(group, true, slopes);
      });
    }

    void allocate() {
      const int64_t floats = windows_->largest() * lanes(static_cast<int>(std::min(whole_.c_, whole_.block_)));
      if (slot_.floats < floats) {
        slot_.floats = floats;
        if (whole_.gather_) slot_.image = whole_.call_.template scratch<float>(floats);
        if (whole_.scatter_) {
          slot_.sums = whole_.call_.template scratch<float>(floats);
          std::memset(slot_.sums.get(), 0, static_cast<size_t>(floats) * sizeof(float));
        }
      }
      if (!whole_.gather_ || direct_ || banded_) return;
      const int64_t size = whole_.sums_size();
      if (whole_.spans_ > 1) {
        partial_ = whole_.partial_.get() + (n_ * whole_.spans_ + span_) * size;
      } else {
        if (!slot_.partial.get()) slot_.partial = whole_.call_.template scratch<double>(size);
        partial_ = slot_.partial.get();
      }
      std::memset(partial_, 0, static_cast<size_t>(size) * sizeof(double));
    }

    // Where a group lies: from the table, which is filled the first time, or computed.
    const Group& located(int64_t group, bool first, Slopes& slopes) {
      Group& found = has_table_ ? slot_.table[group] : group_;
      if (first || !has_table_) whole_.grid_.locate(n_, group, found, slopes);
      return found;
    }

    template <int L>
    void with_channels(int64_t index, const Window& window, int64_t block, int channels) {
      if (whole_.gather_) read_image<L>(window, block, channels);
      if (whole_.sampling_.nearest) {
        pass<L, true, false, true>(index, window, block, channels);
      } else if (!whole_.gather_) {
        pass<L, true, false, false>(index, window, block, channels);
      } else if (!whole_.scatter_) {
        pass<L, false, true, false>(index, window, block, channels);
      } else {
        pass<L, true, true, false>(index, window, block, channels);
      }
      if (whole_.scatter_) write_image<L>(window, block, channels);
    }

    template <int L>
    void read_image(const Window& window, int64_t block, int channels) {
      const Tensor& input = whole_.input_;
      const T* from = input.data<const T>() + n_ * input.stride(0) + block * whole_.block_ * input.stride(1) +
                      window.row * input.stride(2) + window.column * input.stride(3);
      float* image = slot_.image.get();
      const int64_t pitch = window.pitch();
      std::fill_n(image, (pitch + 1) * L, 0.0f);
      for (int64_t row = 0; row < window.rows; ++row) {
        float* to = image + ((row + 1) * pitch + 1) * L;
        if (row + kRowsAhead < window.rows && input.stride(3) == 1)
          prefetch_rows<0>(from + (row + kRowsAhead) * input.stride(2), input.stride(1), channels, window.columns);
        to_pixels<L>(
            from + row * input.stride(2), input.stride(1), input.stride(3), channels, window.columns, to);
        std::fill_n(to + window.columns * L, L, 0.0f);
      }
      std::fill_n(image + window.outside() * L, (2 * pitch + 1) * L, 0.0f);
    }

    template <int L>
    void write_image(const Window& window, int64_t block, int channels) {
      T* to = whole_.input_grad_.template data<T>() + (n_ * whole_.c_ + block * whole_.block_) * whole_.h_ * whole_.w_ +
              window.row * whole_.w_ + window.column;
      float* sums = slot_.sums.get();
      const int64_t pitch = window.pitch();
      for (int64_t row = 0; row < window.rows; ++row) {
        float* from = sums + ((row + 1) * pitch + 1) * L;
        if (row + 1 < window.rows)
          prefetch_rows<1>(to + (row + 1) * whole_.w_, whole_.h_ * whole_.w_, channels, window.columns);
        from_pixels<L>(from, window.columns, to + row * whole_.w_, whole_.h_ * whole_.w_, channels);
        std::fill_n(from + window.columns * L, L, 0.0f);
      }
      std::fill_n(sums, (pitch + 1) * L, 0.0f);
      std::fill_n(sums + window.outside() * L, (2 * pitch + 1) * L, 0.0f);
    }

    void prefetch_grad(int64_t group, int64_t block, int channels) const {
      const Tensor& grad = whole_.grad_output_;
      const int64_t columns = grad.shape(3), start = group * kGroup;
      const T* from = grad.data<const T>() + n_ * grad.stride(0) + block * whole_.block_ * grad.stride(1) +
                      start / columns * grad.stride(2) + start % columns * grad.stride(3);
      for (int c = 0; c < channels; ++c) __builtin_prefetch(from + c * grad.stride(1));
    }
    template <int L>
    void read_grad(int64_t group, int64_t block, int channels, float* to) const {
      const Tensor& grad = whole_.grad_output_;
      const T* from = grad.data<const T>() + n_ * grad.stride(0) + block * whole_.block_ * grad.stride(1);
      const int64_t columns = grad.shape(3), plane = grad.stride(1), pixel = grad.stride(3);
      const int64_t start = group * kGroup;
      const int count = whole_.grid_.count(group);
      if (grad.stride(2) == columns * pixel) {
        to_pixels<L>(from + start * pixel, plane, pixel, channels, count, to);
      } else {
        int64_t row = start / columns, column = start % columns;
        for (int64_t done = 0; done < count; ++row, column = 0) {
          const int64_t run = std::min(count - done, columns - column);
          to_pixels<L>(from + row * grad.stride(2) + column * pixel, plane, pixel, channels, run, to + done * L);
          done += run;
        }
      }
      // Nothing but numbers where there is no point.
      std::fill(to + count * L, to + kGroup * L, 0.0f);
    }

    template <int L, bool Scatter, bool Gather>
    void prepare(int64_t group, const Window& window, bool first, Ready& ready) {
      const Group& found = located(group, first, ready.slopes);
      const Words row = splat(static_cast<uint32_t>(window.row - 1));
      const Words last_row = splat(static_cast<uint32_t>(window.rows));
      const Words column = splat(static_cast<uint32_t>(window.column - 1));
      const Words last_column = splat(static_cast<uint32_t>(window.columns));
      const Words pitch = splat(static_cast<uint32_t>(window.pitch()));
      const Words outside = splat(static_cast<uint32_t>(window.outside()));
      for (int i = 0; i < kGroup; i += kWidth) {
        const Words rows = load_raw<uint32_t>(found.row + i) - row;
        const Words columns = load_raw<uint32_t>(found.column + i) - column;
        const Ints inside = (rows <= last_row) & (columns <= last_column);
        store_raw<uint32_t>(ready.pixel + i, select(inside, rows * pitch + columns, outside));
        const Floats left = load(found.left + i), right = load(found.right + i);
        const Floats top = load(found.top + i), bottom = load(found.bottom + i);
        store(ready.weight[0] + i, left * top);
        store(ready.weight[1] + i, right * top);
        store(ready.weight[2] + i, left * bottom);
        store(ready.weight[3] + i, right * bottom);
        store(ready.left + i, left);
        store(ready.right + i, right);
        store(ready.top + i, top);
        store(ready.bottom + i, bottom);
      }
      if (window.pixels() * L * static_cast<int64_t>(sizeof(float)) < kPrefetchBytes) return;
      const int64_t step = window.pitch() * L;
      for (int j = 0; j < kGroup; ++j) {
        const int64_t at = int64_t{ready.pixel[j]} * L;
        if constexpr (Scatter) {
          __builtin_prefetch(slot_.sums.get() + at, 1);
          __builtin_prefetch(slot_.sums.get() + at + step, 1);
        }
        if constexpr (Gather) {
          __builtin_prefetch(slot_.image.get() + at);
          __builtin_prefetch(slot_.image.get() + at + step);
        }
      }
    }

    // Memory that is needed soon.
    struct Soon {
      const char* from = nullptr;
      int64_t bytes = 0;
      // Part `index` of `parts`.
      template <int Write>
      NPUGRAD_INLINE void prefetch(int64_t index, int64_t parts) const {
        const int64_t end = bytes * (index + 1) / parts;
        for (int64_t i = bytes * index / parts; i < end; i += 64) __builtin_prefetch(from + i, Write, 2);
      }
    };
    // A block's planes, if they lie in a row and are small: short rows are read from so many places that the processor
    // does not see what comes next.
    Soon small_block(const Tensor& tensor, int64_t block) const {
      const int64_t plane = tensor.shape(2) * tensor.shape(3), from = block * whole_.block_;
      const int64_t bytes = std::min(whole_.block_, whole_.c_ - from) * plane * static_cast<int64_t>(sizeof(T));
      const bool in_a_row = tensor.stride(3) == 1 && tensor.stride(2) == tensor.shape(3) && tensor.stride(1) == plane;
      if (from >= whole_.c_ || bytes > kSoonBytes || !in_a_row) return {};
      return {reinterpret_cast<const char*>(tensor.data<const T>() + n_ * tensor.stride(0) + from * plane), bytes};
    }

    // All points that touch a window, with the channels of a block.
    template <int L, bool Scatter, bool Gather, bool Nearest>
    void pass(int64_t index, const Window& window, int64_t block, int channels) {
      const bool first = !listed_ && block == begin_;
      const std::vector<int64_t>* list = listed_ ? &slot_.listing.groups(index) : nullptr;
      const std::vector<Bands::Entry>* entries = banded_ ? &banded_->bands.entries(index) : nullptr;
      const auto count = static_cast<int64_t>(
          entries ? entries->size() : list ? list->size() : static_cast<size_t>(groups_));
      alignas(64) float grad[(kGroup + kWidth) * L];
      alignas(64) float by_x[kGroup], by_y[kGroup];
      Ready ready[2];
      const auto group_at = [&](int64_t i) {
        const auto at = static_cast<size_t>(i);
        return entries ? (*entries)[at].group : list ? (*list)[at] : i;
      };
      const Soon grads = small_block(whole_.grad_output_, block + 1);
      const Soon image = Gather ? small_block(whole_.input_, block + 1) : Soon{};
      const Soon result = Scatter ? small_block(whole_.input_grad_, block) : Soon{};
      if (count) prepare<L, Scatter, Gather>(group_at(0), window, first, ready[0]);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t group = group_at(i);
        if (i + 1 < count) prepare<L, Scatter, Gather>(group_at(i + 1), window, first, ready[(i + 1) & 1]);
        grads.template prefetch<0>(i, count);
        image.template prefetch<0>(i, count);
        result.template prefetch<1>(i, count);
        prefetch_grad(group_at(std::min(i + kAhead, count - 1)), block, channels);
        read_grad<L>(group, block, channels, grad);
        const Points<L, Scatter, Gather> points{
            slot_.image.get(), slot_.sums.get(), grad, ready[i & 1], window.pitch() * L};
        if constexpr (Nearest) {
          points.run_nearest();
        } else {
          points.run(by_x, by_y);
        }
        if constexpr (Gather) {
          const int64_t share = entries ? (*entries)[static_cast<size_t>(i)].share : -1;
          if (share >= 0) {
            double* sums = whole_.share_of(*banded_, span_, share);
            std::copy_n(by_x, kGroup, sums);
            std::copy_n(by_y, kGroup, sums + kGroup);
          } else if (direct_ || entries) {
            double x[kGroup], y[kGroup];
            std::copy_n(by_x, kGroup, x);
            std::copy_n(by_y, kGroup, y);
            whole_.finish(n_, group, x, y, ready[i & 1].slopes);
          } else {
            double* sums = partial_ + 2 * kGroup * group;
            for (int j = 0; j < kGroup; ++j) sums[j] += by_x[j];
            for (int j = 0; j < kGroup; ++j) sums[kGroup + j] += by_y[j];
          }
        }
      }
    }

    GridSampler& whole_;
    Slot& slot_;
    const int64_t n_, span_, begin_, end_, groups_;
    bool has_table_, listed_ = false, direct_ = false;
    const Windows* windows_;
    const Banded* banded_ = nullptr;
    double* partial_ = nullptr;
    Group group_;
  };

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

  // The same for points whose sums are not finite, as the reference computes them.
  void finish_again(int64_t image, int64_t group, const double* x, const double* y, const Slopes& slopes) const {
    Group found;
    Slopes same;
    grid_.locate(image, group, found, same);
    T* to = grid_grad_.template data<T>() + 2 * (image * grid_.points() + group * kGroup);
    for (int j = 0; j < grid_.count(group); ++j) {
      if (std::isfinite(x[j]) && std::isfinite(y[j])) continue;
      double dots[4] = {};
      corner_products(image, group * kGroup + j, found.row[j], found.column[j], dots);
      const double left = found.left[j], right = found.right[j], top = found.top[j], bottom = found.bottom[j];
      to[2 * j] = from_double<T>(((dots[1] - dots[0]) * top + (dots[3] - dots[2]) * bottom) * slopes.x[j]);
      to[2 * j + 1] = from_double<T>(((dots[2] - dots[0]) * left + (dots[3] - dots[1]) * right) * slopes.y[j]);
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
    Group found;
    Slopes slopes;
    for (int64_t group = begin; group < end; ++group) {
      double sums[2 * kGroup];
      std::copy_n(partial + 2 * kGroup * group, 2 * kGroup, sums);
      for (int64_t span = 1; span < spans; ++span) {
        const double* more = partial + span * sums_size() + 2 * kGroup * group;
        for (int j = 0; j < 2 * kGroup; ++j) sums[j] += more[j];
      }
      grid_.locate(image, group, found, slopes);
      finish(image, group, sums, sums + kGroup, slopes);
    }
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
    Group found;
    Slopes slopes;
    grid_.locate(image, parted.group, found, slopes);
    finish(image, parted.group, sums, sums + kGroup, slopes);
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

// Checks what memory safety rests on.
void check(const Tensor& tensor, std::initializer_list<int64_t> shape, bool output) {
  if (!tensor.given()) return;
  require(tensor.rank() == static_cast<int32_t>(shape.size()) && (!output || tensor.contiguous()));
  int axis = 0;
  for (int64_t size : shape) require(tensor.shape(axis++) == size);
}

}  // namespace

void grid_sampler_2d_backward(Call& call) {
  const Tensor grad_output = call.tensor(kGradOutput), input = call.tensor(kInput), grid = call.tensor(kGrid);
  const Tensor input_grad = call.tensor(kInputGrad), grid_grad = call.tensor(kGridGrad);
  require(grad_output.given() && input.given() && grid.given() && grad_output.rank() == 4 && input.rank() == 4);
  const int64_t n = input.shape(0), c = input.shape(1), h = input.shape(2), w = input.shape(3);
  const int64_t oh = grad_output.shape(2), ow = grad_output.shape(3);
  check(grad_output, {n, c, oh, ow}, false);
  check(grid, {n, oh, ow, 2}, false);
  check(input_grad, {n, c, h, w}, true);
  check(grid_grad, {n, oh, ow, 2}, true);
  const Sampling sampling{call.integer(0) == 1, call.integer(1), call.boolean(0)};
  require(call.integer(0) >= 0 && call.integer(0) <= 1);
  require(sampling.padding >= kZeros && sampling.padding <= kReflection);
  const int32_t dtype = input.dtype();
  for (const Tensor& tensor : {grad_output, grid, input_grad, grid_grad})
    if (tensor.given() && tensor.dtype() != dtype) throw Unsupported();
  constexpr int64_t kLongest = 1 << 30;  // pixels are counted in 32 bits
  if (!is_float(dtype) || h > kLongest || w > kLongest) throw Unsupported();
  if (!input.count() || !grad_output.count()) {
    if (input_grad.given()) input_grad.zero();
    if (grid_grad.given()) grid_grad.zero();
    return;
  }
  with_float_type(dtype, [&](auto type) { GridSampler<decltype(type)>(call, sampling).run(); });
}

}  // namespace npugrad
