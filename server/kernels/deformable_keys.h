// The keys of a band on their way: values into scratch memory as float32, gradients out of it.
#ifndef NPUGRAD_DEFORMABLE_KEYS_H
#define NPUGRAD_DEFORMABLE_KEYS_H

#include <sys/mman.h>

#include <cstring>

#include "deformable_band.h"
#include "deformable_operands.h"

namespace npugrad {

// Rows in scratch memory have `columns` floats, a multiple of the vector width.
template <typename T>
class BandKeys {
 public:
  BandKeys(const Operands<T>& operands, int64_t columns) : of_(operands), columns_(columns) {}

  void copy(int64_t slab, const Level& level, int64_t from, int64_t to, float* rows) const {
    const int64_t step = sizes_.heads * sizes_.channels;
    each_run(
        level, from, to,
        [&](int64_t number, int64_t y, int64_t x, int64_t keys) {
          const T* source = of_.value(slab, level.start + y * level.width + x);
          float* target = rows + (number - from) * columns_;
          for (int64_t i = 0; i < keys; ++i, source += step, target += columns_) {
            if (i + kAhead < keys) fetch(source + kAhead * step, sizes_.channels * static_cast<int64_t>(sizeof(T)));
            of_.copy_row(source, target);
          }
        },
        [&](int64_t number, int64_t keys) {
          std::fill_n(rows + (number - from) * columns_, keys * columns_, 0.0f);
        });
  }

  void copy_corners(
      int64_t slab, const Level& level, const Band& band, const Block* block, int count, float* rows) const {
    constexpr int kGroup = 16;
    const T* sources[kGroup][4];
    for (int first = 0; first < count; first += kGroup) {
      const int group = std::min(kGroup, count - first);
      for (int i = 0; i < group; ++i)
        find_corners(slab, level, band.first + block->entries[first + i].key, sources[i]);
      for (int i = 0; i < group; ++i) {
        float* row = rows + block->entries[first + i].key * columns_;
        for (int corner = 0; corner < 4; ++corner) {
          float* target = row + ((corner & 1) + (corner & 2 ? level.pitch : 0)) * columns_;
          if (sources[i][corner]) {
            of_.copy_row(sources[i][corner], target);
          } else {
            std::fill_n(target, columns_, 0.0f);
          }
        }
      }
    }
  }

  // False, with some keys written, where a gradient is not finite.
  bool write(int64_t slab, const Level& level, const Band& band, const float* grad) const {
    Floats zero = {};
    const int64_t step = sizes_.heads * sizes_.channels;
    each_owned(slab, level, band, [&](int64_t local, T* target, int64_t keys) {
      const float* source = grad + local * columns_;
      for (int64_t i = 0; i < keys; ++i, source += columns_, target += step) {
        if (i + kAhead < keys) fetch<true>(target + kAhead * step, sizes_.channels * static_cast<int64_t>(sizeof(T)));
        zero += write_row(source, target);
      }
    });
    return all_finite(zero);
  }

  // The same for all heads of a batch, from its first slab on; their gradients lie `step` floats apart.
  bool write_rows(int64_t slab, const Level& level, const Band& band, const float* grads, int64_t step) const {
    Floats zero = {};
    const int64_t heads = sizes_.heads, channels = sizes_.channels;
    const Span owned = keys_of(level, band);
    if (owned.size()) make_pages(of_.grad_value(slab, owned.begin), owned.size() * heads * channels);
    each_owned(slab, level, band, [&](int64_t local, T* target, int64_t keys) {
      for (int64_t number = local; number < local + keys; ++number)
        for (int64_t head = 0; head < heads; ++head, target += channels)
          zero += write_row(grads + head * step + number * columns_, target);
    });
    return all_finite(zero);
  }

  void write_zeros(int64_t slab, const Level& level, const Band& band) const {
    if (!of_.wants_grad_value()) return;
    const int64_t step = sizes_.heads * sizes_.channels;
    each_owned(slab, level, band, [&](int64_t, T* target, int64_t keys) {
      for (int64_t i = 0; i < keys; ++i)
        std::memset(target + i * step, 0, static_cast<size_t>(sizes_.channels) * sizeof(T));
    });
  }

  // A band's gradient in full, from all queries of the call; `sums` has room for its keys.
  void write_exact(int64_t slab, const Level& level, const Band& band, double* sums) const {
    const Span owned = keys_of(level, band);
    const int64_t begin = owned.begin, end = owned.end;
    std::fill_n(sums, (end - begin) * sizes_.channels, 0.0);
    for (int64_t query = 0; query < sizes_.queries; ++query)
      for (int64_t i = band.level * sizes_.points; i < (band.level + 1) * sizes_.points; ++i)
        of_.add_exact(slab, query, i, of_.sample(slab, query, i), begin, end, sums);
    of_.write_sums(slab, begin, end, sums);
  }

 private:
  static constexpr uintptr_t kHuge = uintptr_t{1} << 21;

  // Linux clears a fresh huge page towards the place first touched: from a place near its end in rising order, which is
  // twice as fast as in falling order. That end may be another task's, so nothing is stored there.
  void make_pages(T* target, int64_t count) const {
#if defined(__linux__)
    constexpr int kPopulateWrite = 23;  // since Linux 5.14; refused before
    constexpr uintptr_t kPage = 4096;
    T* const all = of_.grad_value(0, 0);
    const auto last = reinterpret_cast<uintptr_t>(all + product({sizes_.slabs(), sizes_.keys, sizes_.channels})) - 1;
    const auto begin = reinterpret_cast<uintptr_t>(target), end = reinterpret_cast<uintptr_t>(target + count);
    if (last - reinterpret_cast<uintptr_t>(all) < 2 * kHuge) return;
    for (uintptr_t page = begin / kHuge * kHuge; page < end; page += kHuge)
      madvise(reinterpret_cast<void*>(std::min(page + kHuge - 1, last) / kPage * kPage), kPage, kPopulateWrite);
#endif
  }

  static constexpr int64_t kAhead = 6;  // keys that are fetched before their turn

  // Not zero in lanes where something is not finite.
  NPUGRAD_INLINE Floats write_row(const float* from, T* to) const {
    Floats zero = {};
    for (int64_t k = 0; k < sizes_.channels; k += kWidth) {
      const Floats found = load(from + k);
      zero += found * 0.0f;
      if (sizes_.channels - k >= kWidth) {
        store(to + k, found);
      } else {
        store_part(to + k, found, sizes_.channels - k);
      }
    }
    return zero;
  }

  // Fetches the keys of a sample's corners, null for those on the border.
  void find_corners(int64_t slab, const Level& level, int64_t number, const T* (&sources)[4]) const {
    const int64_t row = number / level.pitch - 1, column = number % level.pitch - 1;
    for (int corner = 0; corner < 4; ++corner) {
      const int64_t y = row + corner / 2, x = column + corner % 2;
      sources[corner] = nullptr;
      if (y < 0 || y >= level.height || x < 0 || x >= level.width) continue;
      sources[corner] = of_.value(slab, level.start + y * level.width + x);
      fetch(sources[corner], sizes_.channels * static_cast<int64_t>(sizeof(T)));
    }
  }

  // The keys of a band, which follow each other.
  static Span keys_of(const Level& level, const Band& band) {
    Span found(0, 0, 0);
    each_run(
        level, band.first, band.first + band.size,
        [&](int64_t, int64_t y, int64_t x, int64_t keys) {
          const int64_t key = level.start + y * level.width + x;
          if (!found.size()) found.begin = key;
          found.end = key + keys;
        },
        [](int64_t, int64_t) {});
    return found;
  }

  // Calls body(number from the band's first one, where its gradient goes, keys) for the runs of keys of a band.
  template <typename Body>
  void each_owned(int64_t slab, const Level& level, const Band& band, Body&& body) const {
    each_run(
        level, band.first, band.first + band.size,
        [&](int64_t number, int64_t y, int64_t x, int64_t keys) {
          T* target = of_.grad_value(slab, level.start + y * level.width + x);
          body(number - band.first, target, keys);
        },
        [](int64_t, int64_t) {});
  }

  const Operands<T>& of_;
  const Sizes& sizes_ = of_.sizes;
  const int64_t columns_;
};

}  // namespace npugrad
#endif
