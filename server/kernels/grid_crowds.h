// Pixels that crowds of points give to: in float32 their sums would lose digits.
#ifndef NPUGRAD_GRID_CROWDS_H
#define NPUGRAD_GRID_CROWDS_H

#include <cstring>

#include "grid_corners.h"
#include "interleave.h"

namespace npugrad {

// Counts points by the cell that they lie in, one of every 64, chosen so that no order of theirs keeps to the choice.
// A cell is crowded from about 1,000 points on: up to there, sums in float32 are off by 1e-5 at the most.
class Crowds {
 public:
  // For so many cells, of which nothing is known.
  void reset(Call& call, int64_t cells) {
    if (size_ < cells) size_ = cells, counts_ = call.scratch<uint8_t>(cells);
    std::memset(counts_.get(), 0, static_cast<size_t>(cells));
    found_ = false;
  }
  static constexpr int kOf = 64;
  // Which of them is to be counted.
  static NPUGRAD_INLINE int chosen(int64_t sixtyfour) {
    return static_cast<int>(static_cast<uint32_t>(sixtyfour) * 2654435769u >> 26);
  }
  NPUGRAD_INLINE void prefetch(int64_t cell) const { __builtin_prefetch(&counts_[cell], 1); }
  NPUGRAD_INLINE void count(int64_t cell) {
    if (++counts_[cell] > kMost) found_ = true, counts_[cell] = 0;
  }
  // Whether a cell is crowded.
  bool found() const { return found_; }

 private:
  static constexpr int kMost = 15;
  Buffer<uint8_t> counts_;
  int64_t size_ = 0;
  bool found_ = false;
};

// Sums in float64, of pixels whose L channels lie side by side.
template <int L>
struct ExactSums {
  double* sums;

  // Adds a weight times some channels.
  NPUGRAD_INLINE void add(int64_t pixel, float weight, const float* grad) const {
    constexpr int kLanes = L < kWidth / 2 ? L : kWidth / 2;
    using Part = Vec<double, kLanes>;
    double* to = sums + pixel * L;
    for (int k = 0; k < L; k += kLanes) {
      Part part;
      std::memcpy(&part, to + k, sizeof part);
      part += double{weight} * __builtin_convertvector(load_lanes<kLanes>(grad + k), Part);
      std::memcpy(to + k, &part, sizeof part);
    }
  }
  // The sums of `count` pixels, rounded, to planes `plane` apart.
  template <typename T>
  void write(int64_t pixel, int64_t count, T* to, int64_t plane, int channels) const {
    constexpr int64_t kRow = 4 * kWidth;
    alignas(64) float row[kRow * L];
    for (const double* from = sums + pixel * L; count > 0; count -= kRow, from += kRow * L, to += kRow) {
      const int64_t some = std::min(count, kRow);
      for (int64_t i = 0; i < some * L; ++i) row[i] = static_cast<float>(from[i]);
      from_pixels<L>(row, some, to, plane, channels);
    }
  }
};

}  // namespace npugrad
#endif
