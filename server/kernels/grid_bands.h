// Bands of rows of an image, for calls whose images and channels are too few to go round.
//
// Each band is a task: it goes through the groups of points that touch it, and owns its rows of input_grad. What a
// group adds to grid_grad is known at once where it touches one band alone; of others each band keeps its share, and
// shares are added up in order.
#ifndef NPUGRAD_GRID_BANDS_H
#define NPUGRAD_GRID_BANDS_H

#include <algorithm>
#include <vector>

#include "grid_windows.h"

namespace npugrad {

// Which groups of points of an image touch which band.
class Bands {
 public:
  static constexpr int64_t kMost = 16;

  // A group that touches a band; where the band keeps its share, -1 if there are no others.
  struct Entry {
    int64_t group, share;
  };
  // A group whose shares are to be added up.
  struct Parted {
    int64_t group, first, count;
  };

  // Looks at all groups. False if they touch more than `most` bands in the mean: then bands do not pay.
  // located(group) is called by several threads. `parted`: groups that touch one band alone have a share too.
  template <typename Located>
  bool fill(Call& call, const Windows& bands, int64_t groups, bool nearest, bool parted, double most,
            const Located& located) {
    std::vector<Bands> chunks(static_cast<size_t>(ceil_div(groups, kChunk)));
    call.parallel(static_cast<int64_t>(chunks.size()), [&](int64_t index, int) {
      const Span span(index, kChunk, groups);
      Bands& chunk = chunks[static_cast<size_t>(index)];
      for (int64_t group = span.begin; group < span.end; ++group) {
        uint32_t touched = 0;
        bands.each_touched(located(group), nearest, [&](int64_t band) { touched |= uint32_t{1} << band; });
        chunk.add(group, touched, parted);
      }
    });
    for (Bands& chunk : chunks) append(chunk);
    int64_t total = 0;
    for (const auto& list : lists_) total += static_cast<int64_t>(list.size());
    return static_cast<double>(total) <= most * static_cast<double>(groups);
  }

  const std::vector<Entry>& entries(int64_t band) const { return lists_[band]; }
  const std::vector<Parted>& parted() const { return parted_; }
  int64_t shares() const { return shares_; }

 private:
  static constexpr int64_t kChunk = 256;

  void add(int64_t group, uint32_t touched, bool parted) {
    const int count = __builtin_popcount(touched);
    const bool alone = count == 1 && !parted;
    if (!alone) parted_.push_back({group, shares_, count});
    for (; touched; touched &= touched - 1)
      lists_[__builtin_ctz(touched)].push_back({group, alone ? -1 : shares_++});
  }

  void append(Bands& chunk) {
    for (int64_t band = 0; band < kMost; ++band)
      for (Entry entry : chunk.lists_[band]) {
        if (entry.share >= 0) entry.share += shares_;
        lists_[band].push_back(entry);
      }
    for (Parted parted : chunk.parted_) {
      parted.first += shares_;
      parted_.push_back(parted);
    }
    shares_ += chunk.shares_;
  }

  std::vector<Entry> lists_[kMost];
  std::vector<Parted> parted_;
  int64_t shares_ = 0;
};

// Groups of points: those of a band, those of a list, or the first `count` of all.
struct Touching {
  const std::vector<Bands::Entry>* entries;
  const std::vector<int64_t>* list;
  int64_t count;
  NPUGRAD_INLINE int64_t operator[](int64_t i) const {
    const auto at = static_cast<size_t>(i);
    return entries ? (*entries)[at].group : list ? (*list)[at] : i;
  }
};

}  // namespace npugrad
#endif
