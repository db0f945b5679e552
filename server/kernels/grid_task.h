// One task of grid_sampler_2d_backward: points by window and by block of channels.
#ifndef NPUGRAD_GRID_TASK_H
#define NPUGRAD_GRID_TASK_H

#include <cstring>
#include <vector>

#include "grid_corners.h"
#include "grid_crowds.h"
#include "grid_sampler.h"
#include "interleave.h"

namespace npugrad {

constexpr int64_t kPrefetchBytes = 512 << 10;   // size of a window from which it pays
constexpr int64_t kAhead = 12;                  // groups whose operands and grid_grad are fetched ahead
constexpr int64_t kReady = 4, kReadyAhead = 2;  // groups that are placed, and how far ahead
constexpr int64_t kRowsAhead = 3;               // rows of input that are fetched ahead
constexpr int64_t kSoonBytes = 32 << 10;        // planes of a block that are fetched a block ahead

template <int Write, typename T>
NPUGRAD_INLINE void prefetch_rows(const T* from, int64_t plane, int channels, int64_t count) {
  constexpr auto kLine = static_cast<int64_t>(64 / sizeof(T));
  for (int c = 0; c < channels; ++c)
    for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + c * plane + i, Write);
}

// An image and a span of its blocks of channels.
template <typename T>
class GridSampler<T>::Task {
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
    const int most = static_cast<int>(std::min(whole_.c_, whole_.block_));
    const int64_t floats = windows_->largest() * lanes(most);
    if (slot_.floats < floats) {
      slot_.floats = floats;
      const bool together = whole_.gather_ && whole_.scatter_ && lanes(most) <= 8;
      if (whole_.gather_) slot_.image = whole_.call_.template scratch<float>(together ? 2 * floats : floats);
      if (whole_.scatter_ && !together) {
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

  // The groups of points that touch a window.
  Touching touching(int64_t index) const {
    const auto* entries = banded_ ? &banded_->bands.entries(index) : nullptr;
    const auto* list = listed_ ? &slot_.listing.groups(index) : nullptr;
    return {entries, list, entries ? static_cast<int64_t>(entries->size())
                                   : list ? static_cast<int64_t>(list->size()) : groups_};
  }

  template <int L>
  void with_channels(int64_t index, const Window& window, int64_t block, int channels) {
    Crowds& crowds = slot_.crowds;
    if (whole_.scatter_ && block == begin_) crowds.reset(whole_.call_, window.outside());
    const bool scatter = whole_.scatter_ && !crowds.found(), together = whole_.gather_ && scatter;
    if (together) {
      read_image<kPixel<L, true, true>>(window, block, channels);
    } else if (whole_.gather_) {
      read_image<L>(window, block, channels);
    }
    if (together) {
      pass<L, true, true, false>(index, window, block, channels);
    } else if (whole_.gather_) {
      pass<L, false, true, false>(index, window, block, channels);
    } else if (scatter && whole_.sampling_.nearest) {
      pass<L, true, false, true>(index, window, block, channels);
    } else if (scatter) {
      pass<L, true, false, false>(index, window, block, channels);
    }
    const bool beside = together && kPixel<L, true, true> > L;
    if (whole_.scatter_ && crowds.found()) {
      if (scatter && !beside) std::memset(slot_.sums.get(), 0, static_cast<size_t>(window.pixels() * L) * sizeof(float));
      sum_exactly<L>(index, window, block, channels);
    } else if (beside) {
      write_sums<kPixel<L, true, true>>(window, block, channels);
    } else if (scatter) {
      write_image<L>(window, block, channels);
    }
  }

  // input_grad of a window with crowded pixels, summed in float64.
  template <int L>
  void sum_exactly(int64_t index, const Window& window, int64_t block, int channels);

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

  // The same of sums that lie beside the image; nothing is left to be 0.
  template <int Pixel>
  void write_sums(const Window& window, int64_t block, int channels) {
    const int64_t plane = whole_.h_ * whole_.w_, pitch = window.pitch();
    T* to = whole_.input_grad_.template data<T>() + (n_ * whole_.c_ + block * whole_.block_) * plane +
            window.row * whole_.w_ + window.column;
    for (int64_t row = 0; row < window.rows; ++row, to += whole_.w_) {
      if (row + 1 < window.rows) prefetch_rows<1>(to + whole_.w_, plane, channels, window.columns);
      const float* from = slot_.image.get() + ((row + 1) * pitch + 1) * Pixel;
      from_second_halves<Pixel>(from, window.columns, to, plane, channels);
    }
  }

  // Whether the rows of grad_output lie one behind the other: a division takes as long as two points.
  bool grad_in_a_row() const {
    return whole_.grad_output_.stride(2) == whole_.grad_output_.shape(3) * whole_.grad_output_.stride(3);
  }
  __attribute__((noinline)) int64_t grad_offset(int64_t start) const {
    const Tensor& grad = whole_.grad_output_;
    return start / grad.shape(3) * grad.stride(2) + start % grad.shape(3) * grad.stride(3);
  }
  // What a group reads from far away, and what it writes.
  template <bool Gather>
  NPUGRAD_INLINE void prefetch_group(int64_t group, int64_t block, int channels, bool in_a_row) const {
    const Tensor& grad = whole_.grad_output_;
    const int64_t start = group * kGroup;
    const T* from = grad.data<const T>() + n_ * grad.stride(0) + block * whole_.block_ * grad.stride(1) +
                    (in_a_row ? start * grad.stride(3) : grad_offset(start));
    for (int c = 0; c < channels; ++c) __builtin_prefetch(from + c * grad.stride(1));
    if (!has_table_) whole_.grid_.prefetch(n_, group);
    if (Gather && direct_) whole_.prefetch_result(n_, group);
  }
  template <int L>
  NPUGRAD_INLINE void read_grad(int64_t group, int64_t block, int channels, bool in_a_row, float* to) const {
    const Tensor& grad = whole_.grad_output_;
    const int64_t start = group * kGroup, plane = grad.stride(1);
    const T* from = grad.data<const T>() + n_ * grad.stride(0) + block * whole_.block_ * grad.stride(1);
    if (!in_a_row || grad.stride(3) != 1 || whole_.grid_.count(group) < kGroup) {
      read_any_grad<L>(from, start, whole_.grid_.count(group), channels, to);
    } else if (channels == L) {
      pixels_of_rows<L, true>(from + start, plane, channels, kGroup, to);
    } else {
      pixels_of_rows<L, false>(from + start, plane, channels, kGroup, to);
    }
  }
  template <int L>
  __attribute__((noinline)) void read_any_grad(
      const T* from, int64_t start, int64_t count, int channels, float* to) const {
    const Tensor& grad = whole_.grad_output_;
    const int64_t columns = grad.shape(3), plane = grad.stride(1), pixel = grad.stride(3);
    if (grad_in_a_row()) {
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
    constexpr int kStride = kPixel<L, Scatter, Gather>;
    const int64_t step = window.pitch() * kStride;
    for (int j = 0; j < kGroup; ++j) {
      const int64_t at = int64_t{ready.pixel[j]} * kStride;
      if constexpr (kStride > L) {
        const float* corner = slot_.image.get() + at;
        __builtin_prefetch(corner, 1);
        __builtin_prefetch(corner + kStride, 1);
        __builtin_prefetch(corner + step, 1);
        __builtin_prefetch(corner + step + kStride, 1);
        continue;
      }
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
      if (!bytes) return;  // before the divisions
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

  // The cell of a group's point that is counted, one of `cells`; -1 for none.
  static NPUGRAD_INLINE int64_t counted(int64_t group, const Ready& ready, int64_t cells) {
    constexpr int64_t kGroups = Crowds::kOf / kGroup;
    const int point = Crowds::chosen(group / kGroups);
    if (point / kGroup != group % kGroups) return -1;
    const int64_t cell = ready.pixel[point % kGroup];
    return cell < cells ? cell : -1;
  }

  // All points that touch a window, with the channels of a block.
  template <int L, bool Scatter, bool Gather, bool Nearest>
  void pass(int64_t index, const Window& window, int64_t block, int channels) {
    const bool first = !listed_ && block == begin_;
    const Touching groups = touching(index);
    const int64_t count = groups.count, cells = Scatter && block == begin_ ? window.outside() : 0;
    alignas(64) float grad[(kGroup + kWidth) * L];
    alignas(64) float by_x[kGroup], by_y[kGroup];
    Ready ready[kReady];
    constexpr int kStride = kPixel<L, Scatter, Gather>;
    float* sums = kStride > L ? slot_.image.get() + L : slot_.sums.get();
    const bool in_a_row = grad_in_a_row();
    const Soon grads = small_block(whole_.grad_output_, block + 1);
    const Soon image = Gather ? small_block(whole_.input_, block + 1) : Soon{};
    const Soon result = Scatter ? small_block(whole_.input_grad_, block) : Soon{};
    for (int64_t i = 0; i < std::min(count, kReadyAhead); ++i)
      prepare<L, Scatter, Gather>(groups[i], window, first, ready[i]);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t group = groups[i];
      const int64_t next = i + kReadyAhead;
      if (next < count) {
        prepare<L, Scatter, Gather>(groups[next], window, first, ready[next % kReady]);
        if (const int64_t cell = counted(groups[next], ready[next % kReady], cells); cell >= 0)
          slot_.crowds.prefetch(cell);
      }
      grads.template prefetch<0>(i, count);
      image.template prefetch<0>(i, count);
      result.template prefetch<1>(i, count);
      prefetch_group<Gather>(groups[std::min(i + kAhead, count - 1)], block, channels, in_a_row);
      read_grad<L>(group, block, channels, in_a_row, grad);
      if (const int64_t cell = counted(group, ready[i % kReady], cells); cell >= 0) slot_.crowds.count(cell);
      const Points<L, Scatter, Gather> points{
          slot_.image.get(), sums, grad, ready[i % kReady], window.pitch() * kStride};
      if constexpr (Nearest) {
        points.run_nearest();
      } else {
        points.run(by_x, by_y);
      }
      if constexpr (Gather) {
        const int64_t share = groups.entries ? (*groups.entries)[static_cast<size_t>(i)].share : -1;
        if (share >= 0) {
          double* sums = whole_.share_of(*banded_, span_, share);
          std::copy_n(by_x, kGroup, sums);
          std::copy_n(by_y, kGroup, sums + kGroup);
        } else if (direct_ || groups.entries) {
          whole_.finish(n_, group, by_x, by_y, ready[i % kReady].slopes);
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

}  // namespace npugrad
#endif
