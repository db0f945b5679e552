// The levels of a deformable attention call: what its two index tensors say, and how a level is cut into bands.
//
// A level lies in scratch memory with a border of zeros, so that all four corners of any sample that reaches it are
// there: one column, which ends a row and begins the next one, and a row above and below. Key (y, x) has number
// (y + 1) * pitch + (x + 1) there, pitch = width + 1. A band is a run of such numbers that fits the cache; a sample
// belongs to the band of its first corner, and its others lie at most pitch + 1 behind.
#ifndef NPUGRAD_DEFORMABLE_LEVELS_H
#define NPUGRAD_DEFORMABLE_LEVELS_H

#include <algorithm>
#include <vector>

#include "runtime.h"

namespace npugrad {

struct Level {
  int64_t height, width, start;  // as the caller says
  // Only for levels that `Bands` has taken:
  int64_t pitch = 0;
  int64_t anchors = 0;  // numbers that a sample's first corner can have
  int shift = 0;        // of a number to its band
  int first_band = 0;

  int64_t halo() const { return pitch + 1; }
};

struct Band {
  int level;
  int64_t first, size;  // numbers
};

// Calls run(number, y, x, keys) for each run of keys among the numbers `from` to `to`, and border(number, keys) for
// what lies between.
template <typename Run, typename Border>
void each_run(const Level& level, int64_t from, int64_t to, Run&& run, Border&& border) {
  while (from < to) {
    const int64_t row = from / level.pitch, column = from % level.pitch;
    const int64_t left = to - from;
    if (row == 0 || row > level.height) {
      // Below the last row everything is border.
      const int64_t keys = row == 0 ? std::min(left, level.pitch - column) : left;
      border(from, keys);
      from += keys;
    } else if (column == 0) {
      border(from++, int64_t{1});
    } else {
      const int64_t keys = std::min(left, level.pitch - column);
      run(from, row - 1, column - 1, keys);
      from += keys;
    }
  }
}

class Bands {
 public:
  static constexpr int64_t kBytes = 512 << 10;          // of a band with its gradient
  static constexpr int64_t kScratchBytes = 32 << 20;    // the same with what lies behind it
  static constexpr int64_t kMaxKeys = int64_t{1} << 28;  // numbers fit int32
  static constexpr int64_t kMaxExtent = 1 << 24;         // a float32 holds it
  static constexpr size_t kMaxBands = 60000;             // band numbers fit 16 bits

  // `columns`: floats of a key in scratch memory; `bytes`: of a band with its gradient, or more. False if the levels overlap, leave the keys, or are too wide: then
  // there are no bands.
  bool cut(std::vector<Level>& levels, int64_t keys, int64_t columns, int64_t bytes) {
    if (keys > kMaxKeys || columns > (1 << 20) || !disjoint(levels, keys)) return false;
    for (;; bytes *= 2) {
      bands.clear();
      if (!cut_all(levels, bytes, columns * 2 * static_cast<int64_t>(sizeof(float)))) return false;
      if (bands.size() <= kMaxBands) return true;
    }
  }

  std::vector<Band> bands;
  std::vector<Span> gaps;  // keys of no level
  int64_t scratch_keys = 0;  // most that one band needs

 private:
  bool disjoint(const std::vector<Level>& levels, int64_t keys) {
    gaps.clear();
    std::vector<const Level*> sorted;
    for (const Level& level : levels) {
      // Without an extent nothing is reached; with one of zero, samples have no corner but may still be reached.
      if (level.height < 0 || level.width < 0) continue;
      if (std::max(level.height, level.width) > std::min(keys, kMaxExtent)) return false;
      if (level.height && level.width) sorted.push_back(&level);
    }
    std::sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->start < b->start; });
    int64_t end = 0;
    for (const Level* level : sorted) {
      if (level->start < end || level->start > keys) return false;
      if (level->height * level->width > keys - level->start) return false;
      if (level->start > end) gaps.push_back(span(end, level->start));
      end = level->start + level->height * level->width;
    }
    if (end < keys) gaps.push_back(span(end, keys));
    return true;
  }

  bool cut_all(std::vector<Level>& levels, int64_t bytes, int64_t key_bytes) {
    scratch_keys = 0;
    for (size_t i = 0; i < levels.size(); ++i) {
      Level& level = levels[i];
      const bool reachable = level.height >= 0 && level.width >= 0;
      level.pitch = (reachable ? level.width : 0) + 1;
      level.anchors = ((reachable ? level.height : 0) + 1) * level.pitch;
      level.first_band = static_cast<int>(bands.size());
      level.shift = 4;
      // As many keys as fit, and where rows are long more: what lies behind a band is copied for it, too.
      while (int64_t{1} << level.shift < level.anchors &&
             ((int64_t{2} << level.shift) * key_bytes <= bytes || int64_t{1} << level.shift < 2 * level.halo()))
        ++level.shift;
      const int64_t size = int64_t{1} << level.shift;
      const int64_t scratch = std::min(size, level.anchors) + level.halo();
      if (scratch > kScratchBytes / key_bytes) return false;
      scratch_keys = std::max(scratch_keys, scratch);
      for (int64_t first = 0; first < level.anchors; first += size) {
        bands.push_back({static_cast<int>(i), first, std::min(size, level.anchors - first)});
        if (bands.size() > 2 * kMaxBands) break;
      }
    }
    return true;
  }

  static Span span(int64_t begin, int64_t end) {
    Span found(0, 1, 1);
    found.begin = begin;
    found.end = end;
    return found;
  }
};

}  // namespace npugrad
#endif
