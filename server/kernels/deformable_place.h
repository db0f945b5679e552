// Sorts samples into the chains of their bands.
#ifndef NPUGRAD_DEFORMABLE_PLACE_H
#define NPUGRAD_DEFORMABLE_PLACE_H

#include <vector>

#include "deformable_band.h"
#include "deformable_operands.h"
#include "rounding.h"

namespace npugrad {

// One chunk of queries of a slab.
struct Chunk {
  Arena arena;
  std::vector<Chain> entries, stubs;  // by band
  Buffer<uint16_t> bands;             // by sample
};

// `zero_query` is the number of a row of zeros behind those of the queries.
template <typename T>
class Placer {
 public:
  Placer(Call& call, const Operands<T>& operands, const Bands& bands, int64_t columns, int64_t zero_query)
      : call_(call), of_(operands), bands_(bands), columns_(columns), zero_query_(static_cast<int32_t>(zero_query)) {
    make_tables();
  }

  // Sorts the samples of some queries; `rows` gets their gradients. The chain of the entries behind the last band is that
  // of samples that reach nothing.
  void place(int64_t slab, const Span& queries, Chunk& chunk, float* rows, int32_t first, Entry* buffer) {
    const int64_t samples = of_.sizes.samples(), step = of_.sizes.heads;
    chunk.arena.reset();
    chunk.entries.assign(bands_.bands.size() + 1, Chain());
    chunk.stubs.assign(bands_.bands.size(), Chain());
    uint16_t* bands = chunk.bands.get();
    for (int64_t query = queries.begin; query < queries.end; ++query, bands += samples) {
      const T *grad = of_.grad(slab, query), *location = of_.locations(slab, query), *weight = of_.weights(slab, query);
      if (query + kAhead < queries.end) {
        fetch_ahead(grad, of_.sizes.channels, step);
        fetch_ahead(location, 2 * samples, step);
        fetch_ahead(weight, samples, step);
      }
      of_.copy_row(grad, rows + first * columns_);
      locate(location, weight, buffer, bands, chunk, first);
      append(chunk, buffer, bands, first++);
    }
    pad(chunk.entries);
  }

 private:
  static void fetch_ahead(const T* row, int64_t count, int64_t step) {
    fetch(row + kAhead * step * count, count * static_cast<int64_t>(sizeof(T)));
  }

  // Vectors of the samples' pixels along x and y, in turns: the lower one's number and the way beyond it.
  struct Pixels {
    Floats low;
    Ints first, reached;
  };
  NPUGRAD_INLINE Pixels pixels(const T* location, int64_t i) const {
    const int64_t left = 2 * of_.sizes.samples() - i;
    const Floats at = left >= kWidth ? load(location + i) : load_part(location + i, std::max<int64_t>(left, 0));
    const Floats extent = load(extents_.get() + i);
    if (of_.float64_coordinates) return pixels_float64(at, extent);
    Floats pixel = rounded(at * extent) - 0.5f;
    const Ints reached = (pixel > -1.0f) & (pixel < extent);
    pixel = select(reached, pixel, splat(-1.0f));
    const Ints whole = __builtin_convertvector(pixel, Ints);  // towards zero
    Floats lower = __builtin_convertvector(whole, Floats);
    const Ints above = lower > pixel;
    lower -= select(above, splat(1.0f), Floats{});
    return {pixel - lower, whole + above + 1, reached};
  }
  // The same in float64, where the product is exact.
  __attribute__((noinline)) Pixels pixels_float64(Floats at, Floats extent) const {
    using HalfInts = Vec<int32_t, kWidth / 2>;
    HalfFloats lows[2];
    HalfInts firsts[2], reaches[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const auto wide = [&](Floats v) { return __builtin_convertvector(half_of(v, half == 1), HalfDoubles); };
      HalfDoubles pixel = wide(at) * wide(extent) - 0.5;
      const Longs reached = (pixel > -1.0) & (pixel < wide(extent));
      pixel = reached ? pixel : HalfDoubles{} - 1.0;
      const HalfInts whole = __builtin_convertvector(pixel, HalfInts);  // towards zero
      HalfDoubles lower = __builtin_convertvector(whole, HalfDoubles);
      const Longs above = lower > pixel;
      lower = above ? lower - 1.0 : lower;
      firsts[half] = whole + __builtin_convertvector(above, HalfInts) + 1;
      lows[half] = __builtin_convertvector(pixel - lower, HalfFloats);
      reaches[half] = __builtin_convertvector(reached, HalfInts);
    }
    return {joined<Floats>(lows), joined<Ints>(firsts), joined<Ints>(reaches)};
  }

  // Entries and bands of a query's samples; the last band and its chain are those of samples that reach nothing.
  NPUGRAD_INLINE void locate(
      const T* location, const T* weight, Entry* entries, uint16_t* bands, Chunk& chunk, int32_t query) {
    const int64_t samples = of_.sizes.samples();
    const Ints no_band = static_cast<int32_t>(bands_.bands.size()) - Ints{};
    for (int64_t i = 0; i < samples; i += kWidth) {
      const int64_t left = samples - i;
      const Pixels a = pixels(location, 2 * i), b = pixels(location, 2 * i + kWidth);
      const Ints pitch = load_raw<int32_t>(pitches_.get() + i), shift = load_raw<int32_t>(shifts_.get() + i);
      const Ints reached = shuffled<Unzip<0>>(a.reached, b.reached) & shuffled<Unzip<1>>(a.reached, b.reached);
      const Ints x = shuffled<Unzip<0>>(a.first, b.first), y = shuffled<Unzip<1>>(a.first, b.first);
      const Ints number = (y * pitch + x) & reached, band = number >> shift;
      const Ints size = (Ints{} + 1) << shift, key = number & (size - 1);
      const Ints place = reached ? band + load_raw<int32_t>(first_bands_.get() + i) : no_band;
      store_raw<uint16_t>(bands + i, __builtin_convertvector((Words)place, Halves));
      const Floats weights = left >= kWidth ? load(weight + i) : load_part(weight + i, left);
      const Floats low_ends = shuffled<Zip<0>>(weights, (Floats)key), high_ends = shuffled<Zip<1>>(weights, (Floats)key);
      store(&entries[i].low_x, shuffled<ZipPairs<0>>(a.low, low_ends));
      store(&entries[i + kQuads].low_x, shuffled<ZipPairs<1>>(a.low, low_ends));
      store(&entries[i + 2 * kQuads].low_x, shuffled<ZipPairs<0>>(b.low, high_ends));
      store(&entries[i + 3 * kQuads].low_x, shuffled<ZipPairs<1>>(b.low, high_ends));
      const Ints crossing = (key + pitch + 1 >= size) & reached;
      if (any(crossing))
        for (int64_t j = 0; j < std::min<int64_t>(left, kWidth); ++j)
          if (crossing[j]) add_stubs_of(chunk, of_.level_of(i + j), entries[i + j], number[j], query);
    }
  }

  static NPUGRAD_INLINE bool any(Ints mask) {
    Vec<int64_t, kWidth / 2> longs;
    std::memcpy(&longs, &mask, sizeof mask);
    int64_t found = 0;
    for (int i = 0; i < kWidth / 2; ++i) found |= longs[i];
    return found != 0;
  }

  // Appends a query's entries to the chains of their bands.
  NPUGRAD_INLINE void append(Chunk& chunk, const Entry* entries, const uint16_t* bands, int32_t query) {
    Chain* chains = chunk.entries.data();
    const int64_t samples = of_.sizes.samples();
    const size_t no_band = bands_.bands.size();
    for (int64_t i = 0; i < samples; ++i) {
      Chain& chain = chains[bands[i]];
      if (__builtin_expect(chain.used == Block::kEntries, 0)) chain.grow(chunk.arena, call_);
      const int32_t at = chain.used;
      std::memcpy(&chain.last->entries[at], &entries[i], sizeof(Entry));
      chain.last->queries[at] = query;
      // Without a branch: what reaches nothing is written over by the next one.
      chain.used = at + (bands[i] != no_band);
    }
  }

  void add_stubs_of(Chunk& chunk, const Level& level, const Entry& entry, int64_t number, int32_t query) {
    const int64_t size = int64_t{1} << level.shift, band = number >> level.shift;
    for (int corner = 1; corner < 4; ++corner) {
      const int64_t other = number + (corner & 1) + (corner & 2 ? level.pitch : 0);
      if (other >> level.shift == band || other >= level.anchors) continue;
      Chain& chain = chunk.stubs[static_cast<size_t>(level.first_band + (other >> level.shift))];
      if (chain.used == Block::kEntries) chain.grow(chunk.arena, call_);
      const float along_x = corner & 1 ? entry.low_x : 1 - entry.low_x;
      const float along_y = corner & 2 ? entry.low_y : 1 - entry.low_y;
      Entry& stub = chain.last->entries[chain.used];
      stub.weight = along_x * along_y * entry.weight;
      stub.key = static_cast<int32_t>(other & (size - 1));
      chain.last->queries[chain.used++] = query;
    }
  }

  // Entries that add zero, up to a whole vector of them.
  void pad(std::vector<Chain>& chains) const {
    for (Chain& chain : chains) {
      if (!chain.last) continue;
      for (int i = chain.used; i % kQuads; ++i) {
        chain.last->entries[i] = Entry{0, 0, 0, 0};
        chain.last->queries[i] = zero_query_;
      }
    }
  }

  // Nothing is within an extent that is no number.
  void make_tables() {
    const int64_t samples = of_.sizes.samples(), rounded = ceil_div(samples, kWidth) * kWidth;
    extents_ = call_.template scratch<float>(2 * rounded);
    for (auto* table : {&pitches_, &shifts_, &first_bands_}) {
      *table = call_.template scratch<int32_t>(rounded);
      std::fill_n(table->get(), rounded, 0);
    }
    std::fill_n(extents_.get(), 2 * rounded, NAN);
    for (int64_t i = 0; i < samples; ++i) {
      const Level& level = of_.level_of(i);
      pitches_[i] = static_cast<int32_t>(level.pitch);
      shifts_[i] = level.shift;
      first_bands_[i] = level.first_band;
      if (level.height < 0 || level.width < 0) continue;
      extents_[2 * i] = static_cast<float>(level.width);
      extents_[2 * i + 1] = static_cast<float>(level.height);
    }
  }

  static constexpr int64_t kAhead = 6;  // queries that are fetched before their turn

  Call& call_;
  const Operands<T>& of_;
  const Bands& bands_;
  const int64_t columns_;
  const int32_t zero_query_;
  Buffer<float> extents_;                           // by coordinate of a query's locations
  Buffer<int32_t> pitches_, shifts_, first_bands_;  // by sample of a query
};

}  // namespace npugrad
#endif
