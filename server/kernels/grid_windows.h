// Images cut into windows whose pixels, with their channels side by side, fit a bound of memory.
#ifndef NPUGRAD_GRID_WINDOWS_H
#define NPUGRAD_GRID_WINDOWS_H

#include <vector>

#include "grid_points.h"

namespace npugrad {

// A part of the images with a border of one pixel: rows of `pitch` pixels, the first of which is the border of this row
// and of the one before. Below the lower border lies the row of the points outside.
struct Window {
  int64_t row, column, rows, columns;
  int64_t pitch() const { return columns + 1; }
  int64_t outside() const { return (rows + 1) * pitch(); }
  int64_t pixels() const { return (rows + 3) * pitch() + 1 + kWidth; }
};

template <int N>
NPUGRAD_INLINE int32_t smallest(Vec<int32_t, N> v) {
  if constexpr (N == 2) {
    return std::min<int32_t>(v[0], v[1]);
  } else {
    Vec<int32_t, N / 2> halves[2];
    std::memcpy(halves, &v, sizeof v);
    return smallest<N / 2>(halves[0] < halves[1] ? halves[0] : halves[1]);
  }
}

// Windows of about the same size that cover an image.
class Windows {
 public:
  // At most about `limit` pixels each.
  Windows(int64_t height, int64_t width, int64_t limit) : height_(height), width_(width) {
    const int64_t whole = Window{0, 0, height, width}.pixels();
    if (whole <= limit) {
      rows_ = height, columns_ = width;
    } else {
      // Squares, whole vectors wide: few groups of points then touch two of them.
      const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(limit)));
      columns_ = std::min(width, std::max<int64_t>(side / kGroup, 1) * kGroup);
      rows_ = even_part(height, std::max<int64_t>(limit / (columns_ + 1) - 3, 1));
    }
    across_ = ceil_div(width_, columns_), count_ = across_ * ceil_div(height_, rows_);
  }
  // Bands of rows, as wide as the image.
  static Windows bands(int64_t height, int64_t width, int64_t count) {
    Windows found(height, width, INT64_MAX);
    found.rows_ = ceil_div(height, count);
    found.count_ = ceil_div(height, found.rows_);
    return found;
  }
  int64_t count() const { return count_; }
  int64_t largest() const { return Window{0, 0, rows_, columns_}.pixels(); }
  Window operator[](int64_t index) const {
    const Span rows(index / across_, rows_, height_), columns(index % across_, columns_, width_);
    return {rows.begin, columns.begin, rows.size(), columns.size()};
  }

  // Calls body(window) for those that points may touch; for some of them more than once.
  template <typename Body>
  void each_touched(const Group& group, bool nearest, const Body& body) const {
    const auto height = static_cast<int32_t>(height_), width = static_cast<int32_t>(width_);
    // Smallest numbers, of bottom and right their complements.
    Ints tops = Ints{} + INT32_MAX, lefts = tops, bottoms = tops, rights = tops;
    for (int j = 0; j < kGroup; j += kWidth) {
      const Ints row = load_raw<int32_t>(group.row + j), column = load_raw<int32_t>(group.column + j);
      const Ints inside = (row >= -1) & (row < height) & (column >= -1) & (column < width);
      tops = (inside & (row < tops)) ? row : tops, bottoms = (inside & (~row < bottoms)) ? ~row : bottoms;
      lefts = (inside & (column < lefts)) ? column : lefts, rights = (inside & (~column < rights)) ? ~column : rights;
    }
    const int32_t top = smallest<kWidth>(tops), bottom = ~smallest<kWidth>(bottoms);
    const int32_t left = smallest<kWidth>(lefts), right = ~smallest<kWidth>(rights);
    if (top > bottom) return;
    const uint32_t rows = static_cast<uint32_t>(rows_), columns = static_cast<uint32_t>(columns_);
    const uint32_t first_row = static_cast<uint32_t>(std::max(top, 0)) / rows;
    const uint32_t last_row = static_cast<uint32_t>(std::min(bottom + 1, height - 1)) / rows;
    const uint32_t first_column = static_cast<uint32_t>(std::max(left, 0)) / columns;
    const uint32_t last_column = static_cast<uint32_t>(std::min(right + 1, width - 1)) / columns;
    if (last_row - first_row <= 1 && last_column - first_column <= 1) {
      for (uint32_t row = first_row; row <= last_row; ++row)
        for (uint32_t column = first_column; column <= last_column; ++column) body(row * across_ + column);
      return;
    }
    for (int j = 0; j < kGroup; ++j)
      for (int corner = 0; corner < (nearest ? 1 : 4); ++corner) {
        const int32_t row = group.row[j] + (corner >> 1), column = group.column[j] + (corner & 1);
        if (row < 0 || row >= height || column < 0 || column >= width) continue;
        body(static_cast<uint32_t>(row) / rows * across_ + static_cast<uint32_t>(column) / columns);
      }
  }

 private:
  static int64_t even_part(int64_t total, int64_t most) { return ceil_div(total, ceil_div(total, most)); }

  int64_t height_, width_, rows_ = 0, columns_ = 0, across_ = 0, count_ = 0;
};

// Which groups of points touch which window.
class Listing {
 public:
  // located(group) is asked for every group in order. False if groups touch more than `most` windows in the mean:
  // points in no order, for which windows do not pay.
  template <typename Located>
  bool fill(const Windows& windows, int64_t groups, bool nearest, double most, const Located& located) {
    lists_.resize(static_cast<size_t>(windows.count()));
    for (auto& list : lists_) list.clear();
    int64_t total = 0;
    for (int64_t group = 0; group < groups; ++group) {
      windows.each_touched(located(group), nearest, [&](int64_t window) {
        auto& list = lists_[static_cast<size_t>(window)];
        if (!list.empty() && list.back() == group) return;
        list.push_back(group);
        ++total;
      });
      const bool at_check = group + 1 == groups || group % kCheck == kCheck - 1;
      if (at_check && static_cast<double>(total) > most * static_cast<double>(group + 1)) return false;
    }
    return true;
  }
  const std::vector<int64_t>& groups(int64_t window) const { return lists_[static_cast<size_t>(window)]; }

 private:
  static constexpr int64_t kCheck = 256;
  std::vector<std::vector<int64_t>> lists_;
};

}  // namespace npugrad
#endif
