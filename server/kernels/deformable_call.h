// A call of deformable attention: its passes as tasks, and what they share.
#ifndef NPUGRAD_DEFORMABLE_CALL_H
#define NPUGRAD_DEFORMABLE_CALL_H

#include <cstring>
#include <optional>
#include <vector>

#include "deformable_collect.h"
#include "deformable_keys.h"
#include "deformable_place.h"
#include "deformable_sums.h"
#include "runtime.h"

namespace npugrad {

template <typename T>
class Deformable {
 public:
  Deformable(Call& call, const Sizes& sizes, std::vector<Level> levels)
      : call_(call), of_(call, sizes, std::move(levels)),
        columns_(ceil_div(sizes.channels, kWidth) * kWidth), adder_(entries_adder(columns_)) {}

  void run() {
    const int64_t samples = sizes_.samples();
    // Fewer samples than keys: the time is that of writing grad_value.
    const bool few = product({sizes_.queries, samples}) <= sizes_.keys;
    if (!bands_.cut(of_.levels, sizes_.keys, columns_, few ? kFewBytes : Bands::kBytes)) return run_exact();
    // Not a few samples for each of many bands: their blocks would be empty.
    const int64_t chunk = std::max(kChunk, kBlockFill * static_cast<int64_t>(bands_.bands.size()));
    chunk_queries_ = std::max<int64_t>(1, chunk / samples);
    round_queries_ = ceil_div(std::max<int64_t>(1, kRound / samples), chunk_queries_) * chunk_queries_;
    placer_.emplace(call_, of_, bands_, columns_, most_queries());
    collector_.emplace(call_, of_, bands_);
    clear_gaps();
    slots_.resize(static_cast<size_t>(call_.threads()));
    const int64_t work = product({sizes_.queries, samples, columns_}), slabs = sizes_.slabs();
    const int threads = call_.threads();
    // Each way gives the same bits.
    const bool alone = work <= kAlone / slabs;
    if (few && !alone && rounds() == 1 && heads_scratch() <= kHeadsScratch) {
      const int64_t together = std::max<int64_t>(1, kTogether / sizes_.heads) * sizes_.heads;
      for (int64_t first = 0; first < slabs; first += together)
        split_slabs(first, std::min(first + together, slabs), true);
    } else if (alone || (work <= kWholeSlab && (slabs >= 4 * threads || slabs % threads == 0))) {
      whole_slabs(alone ? slabs : 1);
    } else {
      for (int64_t first = 0; first < slabs; first += threads)
        split_slabs(first, std::min(first + threads, slabs), false);
    }
  }

 private:
  static constexpr int64_t kChunk = 1 << 15;       // samples of a chunk
  static constexpr int64_t kBlockFill = 32;        // samples of a chunk for each band, at least
  static constexpr int64_t kRound = 1 << 20;       // samples of a slab that are sorted at once
  static constexpr int64_t kAlone = 1 << 16;       // floats that samples touch, below which one thread does all
  static constexpr int64_t kWholeSlab = 1 << 25;   // floats that samples touch, above which a slab is no task
  static constexpr int64_t kZeroBytes = 1 << 20;   // of a task that only clears
  static constexpr int64_t kFewBytes = 128 << 10;  // of a band with its gradient, where there are few samples
  static constexpr int64_t kHeadsScratch = 1 << 20;  // floats, above which heads are not computed together
  static constexpr int64_t kTogether = 64;         // slabs, for which samples are sorted before rows are written
  static constexpr int64_t kStagger = 5 * 16;      // floats

  // A slab in work.
  struct Slab {
    Buffer<float> queries;  // gradient of the output, and a row of zeros
    Buffer<float> carry;    // bands' gradients between rounds
    std::vector<Chunk> chunks;
  };

  // What one task after the other has in a slot; no line of the cache is written to by two of them.
  struct alignas(128) Slot {
    Buffer<Entry> entries;
    Buffer<float> value, grad;
    KeySums sums;
    typename Collector<T>::Slot collect;
  };

  // ------------------------------------------------------------------------------------------ tasks

  void whole_slabs(int64_t at_once) {
    std::vector<Slab> works(slots_.size());
    call_.parallel(ceil_div(sizes_.slabs(), at_once), [&](int64_t task, int number) {
      const Span slabs(task, at_once, sizes_.slabs());
      Slot& slot = slots_[static_cast<size_t>(number)];
      Slab& work = works[static_cast<size_t>(number)];
      for (int64_t slab = slabs.begin; slab < slabs.end; ++slab) {
        for (int64_t round = 0; round < rounds(); ++round) {
          begin(work, round);
          for (size_t chunk = 0; chunk < work.chunks.size(); ++chunk) place(work, slab, round, chunk, slot);
          for (size_t band = 0; band < bands_.bands.size(); ++band) add(work, slab, round, band, slot);
          for (size_t chunk = 0; chunk < work.chunks.size(); ++chunk) collect(work, slab, round, chunk, slot);
        }
      }
    });
  }

  // `by_rows`: a task of the second pass is a band of all heads.
  void split_slabs(int64_t first, int64_t end, bool by_rows) {
    if (works_.empty()) works_.resize(static_cast<size_t>(end - first));
    const int64_t slabs = end - first;
    for (int64_t round = 0; round < rounds(); ++round) {
      for (int64_t i = 0; i < slabs; ++i) begin(works_[static_cast<size_t>(i)], round);
      const auto pass = [&](size_t parts, auto&& body) {
        call_.parallel(slabs * static_cast<int64_t>(parts), [&](int64_t task, int number) {
          const auto part = static_cast<size_t>(task % static_cast<int64_t>(parts));
          const int64_t i = task / static_cast<int64_t>(parts);
          body(works_[static_cast<size_t>(i)], first + i, part, slots_[static_cast<size_t>(number)]);
        });
      };
      const size_t chunks = works_[0].chunks.size();
      pass(chunks, [&](auto& work, int64_t slab, size_t i, Slot& slot) { place(work, slab, round, i, slot); });
      if (by_rows) {
        add_rows(first, end);
      } else {
        pass(bands_.bands.size(), [&](auto& work, int64_t slab, size_t i, Slot& slot) {
          add(work, slab, round, i, slot);
        });
      }
      pass(chunks, [&](auto& work, int64_t slab, size_t i, Slot& slot) { collect(work, slab, round, i, slot); });
    }
  }

  int64_t rounds() const { return ceil_div(sizes_.queries, round_queries_); }
  Span round_span(int64_t round) const { return Span(round, round_queries_, sizes_.queries); }
  Span queries_of(int64_t round, size_t chunk) const {
    const Span all = round_span(round);
    Span found(static_cast<int64_t>(chunk), chunk_queries_, all.size());
    found.begin += all.begin;
    found.end += all.begin;
    return found;
  }

  void begin(Slab& work, int64_t round) {
    const int64_t most = most_queries();
    if (!work.queries.get()) {
      work.queries = call_.template scratch<float>(product({most + 1, columns_}));
      std::fill_n(work.queries.get() + most * columns_, columns_, 0.0f);
      if (rounds() > 1) {
        int64_t numbers = 0;
        for (const Level& level : of_.levels) numbers += level.anchors;
        work.carry = call_.template scratch<float>(product({numbers, columns_}));
      }
    }
    work.chunks.resize(static_cast<size_t>(ceil_div(round_span(round).size(), chunk_queries_)));
  }
  int64_t most_queries() const { return std::min(round_queries_, sizes_.queries); }

  void place(Slab& work, int64_t slab, int64_t round, size_t index, Slot& slot) {
    const Span queries = queries_of(round, index);
    const int64_t samples = sizes_.samples();
    Chunk& chunk = work.chunks[index];
    if (!chunk.bands.get()) chunk.bands = call_.template scratch<uint16_t>(chunk_queries_ * samples + kWidth);
    if (!slot.entries.get()) slot.entries = call_.template scratch<Entry>(samples + kWidth);
    const auto first = static_cast<int32_t>(queries.begin - round_span(round).begin);
    placer_->place(slab, queries, chunk, work.queries.get(), first, slot.entries.get());
  }

  void clear_gaps() {
    if (!of_.wants_grad_value()) return;
    const int64_t row = sizes_.heads * sizes_.channels * static_cast<int64_t>(sizeof(T));
    const int64_t at_once = std::max<int64_t>(1, kZeroBytes / row);
    for (const Span& gap : bands_.gaps) {
      const int64_t parts = ceil_div(gap.size(), at_once);
      call_.parallel(sizes_.batches * parts, [&](int64_t task, int) {
        const Span part(task % parts, at_once, gap.size());
        T* start = of_.grad_value(task / parts * sizes_.heads, gap.begin + part.begin);
        std::memset(start, 0, static_cast<size_t>(part.size() * row));
      });
    }
  }

  // ---------------------------------------------------------------------------------------------- add

  void add(Slab& work, int64_t slab, int64_t round, size_t index, Slot& slot) {
    const Band& band = bands_.bands[index];
    const Level& level = level_of(band);
    const bool last = round == rounds() - 1;
    if (rounds() == 1 && is_empty(work, index)) return keys_.write_zeros(slab, level, band);
    if (!slot.grad.get()) slot.grad = call_.template scratch<float>(bands_.scratch_keys * columns_);
    float* grad = slot.grad.get();
    const int64_t owned = band.size * columns_;
    float* carry = rounds() > 1 ? work.carry.get() + carried(band) * columns_ : nullptr;
    if (round) {
      std::memcpy(grad, carry, static_cast<size_t>(owned) * sizeof(float));
    } else {
      std::memset(grad, 0, static_cast<size_t>(owned) * sizeof(float));
    }
    add_samples(work, slab, index, slot, grad, round > 0);
    if (!last) {
      std::memcpy(carry, grad, static_cast<size_t>(owned) * sizeof(float));
    } else if (of_.wants_grad_value() && !keys_.write(slab, level, band, grad)) {
      keys_.write_exact(slab, level, band, slot.sums.doubles(call_, bands_.scratch_keys * columns_));
    }
  }

  // All heads of each band, so that rows of grad_value are written whole and one behind the other. Tasks that follow
  // each other lie far apart: threads that come to the same fresh page would both clear it.
  void add_rows(int64_t first, int64_t end) {
    const int64_t batches = (end - first) / sizes_.heads;
    const auto bands = static_cast<int64_t>(bands_.bands.size());
    const int64_t parts = std::min(bands, ceil_div(call_.threads(), batches)), each = ceil_div(bands, parts);
    call_.parallel(batches * parts * each, [&](int64_t task, int number) {
      const int64_t heads = task % batches * sizes_.heads, rest = task / batches;
      const int64_t band = rest % parts * each + rest / parts;
      if (band >= bands) return;
      add_rows(&works_[static_cast<size_t>(heads)], first + heads, static_cast<size_t>(band),
               slots_[static_cast<size_t>(number)]);
    });
  }

  // `first`: the first head's slab, of the first of `works`.
  void add_rows(Slab* works, int64_t first, size_t index, Slot& slot) {
    const Band& band = bands_.bands[index];
    const Level& level = level_of(band);
    const int64_t step = heads_step();
    if (!slot.grad.get()) slot.grad = call_.template scratch<float>(sizes_.heads * step);
    for (int64_t head = 0; head < sizes_.heads; ++head) {
      Slab& work = works[head];
      float* grad = slot.grad.get() + head * step;
      std::memset(grad, 0, static_cast<size_t>(band.size * columns_) * sizeof(float));
      if (!is_empty(work, index)) add_samples(work, first + head, index, slot, grad, false);
    }
    if (!of_.wants_grad_value() || keys_.write_rows(first, level, band, slot.grad.get(), step)) return;
    for (int64_t head = 0; head < sizes_.heads; ++head)
      if (!keys_.write(first + head, level, band, slot.grad.get() + head * step))
        keys_.write_exact(first + head, level, band, slot.sums.doubles(call_, bands_.scratch_keys * columns_));
  }

  // Floats from head to head: whole lines, not all at the same place in their pages.
  int64_t heads_step() const { return bands_.scratch_keys * columns_ + kStagger; }
  int64_t heads_scratch() const { return product({sizes_.heads, heads_step()}); }

  // Adds to the gradient of a band, with what lies behind it as scratch memory. `carried`: it has sums of former rounds.
  void add_samples(Slab& work, int64_t slab, size_t index, Slot& slot, float* grad, bool carried) {
    const Band& band = bands_.bands[index];
    const Level& level = level_of(band);
    if (!slot.value.get()) slot.value = call_.template scratch<float>(bands_.scratch_keys * columns_);
    const int64_t entries = entries_of(work, index), stubs = stubs_of(work, index), owned = band.size * columns_;
    // A band with few samples gets only the keys that they read.
    const bool few = entries < band.size / 8;
    if (!few) keys_.copy(slab, level, band.first, band.first + band.size + level.halo(), slot.value.get());
    std::memset(grad + owned, 0, static_cast<size_t>(level.halo() * columns_) * sizeof(float));
    const BandRows rows{slot.value.get(), grad, work.queries.get(), columns_, level.pitch,
                        static_cast<float>(level.height), static_cast<float>(level.width)};
    KeySums& sums = slot.sums;
    sums.begin(call_, {grad, band.size, columns_, level.pitch}, bands_.scratch_keys, entries + stubs, carried);
    for (Chunk& chunk : work.chunks) {
      chunk.entries[index].each([&](Block* block, int count) {
        if (few) keys_.copy_corners(slab, level, band, block, count, slot.value.get());
        sums.count(block->entries, count);
        adder_(rows, block, static_cast<int>(ceil_div(count, kQuads) * kQuads));
        sums.move_on(count);
      });
      chunk.stubs[index].each([&](Block* block, int count) {
        sums.count(block->entries, count);
        add_stubs(rows, block, count);
        sums.move_on(count);
      });
    }
    sums.end();
  }

  const Level& level_of(const Band& band) const { return of_.levels[static_cast<size_t>(band.level)]; }
  static int64_t entries_of(const Slab& work, size_t index) {
    int64_t found = 0;
    for (const Chunk& chunk : work.chunks) found += chunk.entries[index].count();
    return found;
  }
  static int64_t stubs_of(const Slab& work, size_t index) {
    int64_t found = 0;
    for (const Chunk& chunk : work.chunks) found += chunk.stubs[index].count();
    return found;
  }
  static bool is_empty(const Slab& work, size_t index) { return !entries_of(work, index) && !stubs_of(work, index); }

  int64_t carried(const Band& band) const {
    int64_t before = band.first;
    for (int i = 0; i < band.level; ++i) before += of_.levels[static_cast<size_t>(i)].anchors;
    return before;
  }

  // ---------------------------------------------------------------------------------------------- collect

  void collect(Slab& work, int64_t slab, int64_t round, size_t index, Slot& slot) {
    collector_->collect(work.chunks[index], slab, queries_of(round, index), slot.collect);
  }

  // ---------------------------------------------------------------------------------------- in float64

  // Everything in float64 but pixels, whatever the levels: a slab is summed by one task at a time, some queries in each.
  void run_exact() {
    const int64_t row = product({sizes_.keys, sizes_.channels}), samples = sizes_.samples();
    const int64_t at_once = std::max<int64_t>(1, kChunk / samples), threads = call_.threads();
    std::vector<Buffer<double>> sums(static_cast<size_t>(std::min<int64_t>(threads, sizes_.slabs())));
    for (auto& one : sums) one = call_.template scratch<double>(of_.wants_grad_value() ? row : 0);
    for (int64_t first = 0; first < sizes_.slabs(); first += threads) {
      const int64_t slabs = std::min(threads, sizes_.slabs() - first);
      for (int64_t from = 0; from < sizes_.queries; from += at_once) {
        call_.parallel(slabs, [&](int64_t i, int) {
          double* own = sums[static_cast<size_t>(i)].get();
          if (!from && of_.wants_grad_value()) std::fill_n(own, row, 0.0);
          run_exact(first + i, from, std::min(from + at_once, sizes_.queries), own);
        });
      }
      if (!of_.wants_grad_value()) continue;
      call_.parallel(slabs, [&](int64_t i, int) {
        of_.write_sums(first + i, 0, sizes_.keys, sums[static_cast<size_t>(i)].get());
      });
    }
  }

  void run_exact(int64_t slab, int64_t from, int64_t to, double* sums) {
    for (int64_t query = from; query < to; ++query)
      for (int64_t i = 0; i < sizes_.samples(); ++i) {
        const ExactSample found = of_.sample(slab, query, i);
        of_.write_exact(slab, query, i, found, true, true);
        if (of_.wants_grad_value()) of_.add_exact(slab, query, i, found, 0, sizes_.keys, sums);
      }
  }

  Call& call_;
  Operands<T> of_;
  const Sizes& sizes_ = of_.sizes;
  const int64_t columns_;  // floats of a key or query in scratch memory
  const AddEntries adder_;
  const BandKeys<T> keys_{of_, columns_};
  Bands bands_;
  int64_t chunk_queries_ = 0, round_queries_ = 0;
  std::optional<Placer<T>> placer_;
  std::optional<Collector<T>> collector_;
  std::vector<Slot> slots_;
  std::vector<Slab> works_;
};

}  // namespace npugrad
#endif
