// aclnnMultiScaleDeformableAttentionGrad. The formulas are those of the reference; see also `deformable_levels.h`.
//
// The limit is the way to the cache: each sample reads four keys and adds to four, anywhere in a level. So the samples
// of a slab, one head of one batch, are sorted into bands of keys first. A band with its gradient fits the cache; its
// samples come in the order of their queries, and all that is read far away is known ahead. Three passes:
//
//   place   chunk by chunk of queries: pixels in float64, samples appended to the chain of their band
//   add     band by band: keys copied in, one after the other as float32, samples computed, the gradient copied out
//   collect chunk by chunk: each sample's gradients taken from its band's chain
//
// A band is added to by its own samples alone, chunk after chunk: corners that lie in another band are put there as
// stubs. So a slab can be one task or many, and the bits are the same.
//
// Sums are float32, in float64 from time to time where many samples meet. Where float32 leaves the finite numbers, a
// sample or a band is computed again in float64, term by term as the reference does. Levels that overlap or leave the
// keys have no bands: there all is computed so.
#include <cstring>
#include <optional>
#include <vector>

#include "deformable_place.h"
#include "runtime.h"

namespace npugrad {
namespace {

using namespace deformable;

constexpr int64_t kChunk = 1 << 15;       // samples of a chunk
constexpr int64_t kBlockFill = 32;        // samples of a chunk for each band, at least
constexpr int64_t kRound = 1 << 20;       // samples of a slab that are sorted at once
constexpr int64_t kAlone = 1 << 16;       // floats that samples touch, below which other threads are not worth waking
constexpr int64_t kWholeSlab = 1 << 25;   // floats that samples touch, above which a slab is no task
constexpr int64_t kSumsOf = 64;           // samples for each key until sums move on to float64
constexpr int64_t kZeroBytes = 1 << 20;   // of a task that only clears
constexpr int64_t kAhead = 6;             // keys that are fetched before their turn
constexpr int64_t kRows = 8;              // queries whose gradients are written together

// A slab in work.
struct Slab {
  Buffer<float> queries;  // gradient of the output, and a row of zeros
  Buffer<float> carry;    // bands' gradients between rounds
  std::vector<Chunk> chunks;
};

// What one task after the other has in a slot.
struct Slot {
  Buffer<Entry> entries;
  Buffer<float> grads;
  Buffer<float> value, grad;
  Buffer<double> sums;
  // The next entry of a chain, and how many follow in its block.
  struct Place {
    const Entry* next;
    int32_t left, step;
    const Block* block;
  };
  std::vector<Place> places;
};

template <typename T>
class Deformable {
 public:
  Deformable(Call& call, const Sizes& sizes, std::vector<Level> levels)
      : call_(call), of_(call, sizes, std::move(levels)),
        columns_(ceil_div(sizes.channels, kWidth) * kWidth), adder_(entries_adder(columns_)) {}

  void run() {
    if (!bands_.cut(of_.levels, sizes_.keys, columns_)) return run_exact();
    const int64_t samples = sizes_.samples();
    // Not a few samples for each of many bands: their blocks would be empty.
    const int64_t chunk = std::max(kChunk, kBlockFill * static_cast<int64_t>(bands_.bands.size()));
    chunk_queries_ = std::max<int64_t>(1, chunk / samples);
    round_queries_ = ceil_div(std::max<int64_t>(1, kRound / samples), chunk_queries_) * chunk_queries_;
    placer_.emplace(call_, of_, bands_, columns_, most_queries());
    clear_gaps();
    slots_.resize(static_cast<size_t>(call_.threads()));
    const int64_t work = product({sizes_.queries, samples, columns_}), slabs = sizes_.slabs();
    const int threads = call_.threads();
    // Both ways give the same bits.
    const bool alone = work <= kAlone / slabs;
    if (alone || (work <= kWholeSlab && (slabs >= 4 * threads || slabs % threads == 0))) {
      whole_slabs(alone ? slabs : 1);
    } else {
      for (int64_t first = 0; first < slabs; first += threads)
        split_slabs(first, std::min(first + threads, slabs));
    }
  }

 private:
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

  void split_slabs(int64_t first, int64_t end) {
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
      pass(bands_.bands.size(), [&](auto& work, int64_t slab, size_t i, Slot& slot) { add(work, slab, round, i, slot); });
      pass(chunks, [&](auto& work, int64_t slab, size_t i, Slot& slot) { collect(work, slab, round, i, slot); });
    }
  }

  int64_t rounds() const { return ceil_div(sizes_.queries, round_queries_); }
  Span round_span(int64_t round) const { return Span(round, round_queries_, sizes_.queries); }

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
    const Span all = round_span(round), span(static_cast<int64_t>(index), chunk_queries_, all.size());
    const int64_t samples = sizes_.samples();
    Chunk& chunk = work.chunks[index];
    if (!chunk.bands.get()) chunk.bands = call_.template scratch<uint16_t>(chunk_queries_ * samples + kWidth);
    if (!slot.entries.get()) slot.entries = call_.template scratch<Entry>(samples + kWidth);
    Span queries = span;
    queries.begin += all.begin;
    queries.end += all.begin;
    placer_->place(
        slab, queries, chunk, work.queries.get(), static_cast<int32_t>(span.begin), slot.entries.get());
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
    const Level& level = of_.levels[static_cast<size_t>(band.level)];
    int64_t entries = 0, stubs = 0;
    for (const Chunk& chunk : work.chunks) {
      entries += chunk.entries[index].count();
      stubs += chunk.stubs[index].count();
    }
    const bool last = round == rounds() - 1;
    if (!entries && !stubs && rounds() == 1) return write_zeros(slab, level, band);
    if (!slot.grad.get()) {
      slot.value = call_.template scratch<float>(bands_.scratch_keys * columns_);
      slot.grad = call_.template scratch<float>(bands_.scratch_keys * columns_);
    }
    // A band with few samples gets only the keys that they read.
    const bool few = entries < band.size / 8;
    if (!few) copy_keys(slab, level, band.first, band.first + band.size + level.halo(), slot.value.get());
    float* grad = slot.grad.get();
    const int64_t owned = band.size * columns_;
    float* carry = rounds() > 1 ? work.carry.get() + carried(band) * columns_ : nullptr;
    if (round) {
      std::memcpy(grad, carry, static_cast<size_t>(owned) * sizeof(float));
    } else {
      std::memset(grad, 0, static_cast<size_t>(owned) * sizeof(float));
    }
    std::memset(grad + owned, 0, static_cast<size_t>(level.halo() * columns_) * sizeof(float));
    double* sums = nullptr;
    if (entries + stubs > kSumsOf * band.size) {
      if (!slot.sums.get()) slot.sums = call_.template scratch<double>(bands_.scratch_keys * columns_);
      sums = slot.sums.get();
      std::fill_n(sums, owned, 0.0);
    }
    const BandRows rows{slot.value.get(), grad, work.queries.get(), columns_, level.pitch,
                        static_cast<float>(level.height), static_cast<float>(level.width)};
    int64_t pending = 0;
    const auto sum_up = [&](int count) {
      pending += count;
      if (!sums || pending < kSumsOf * band.size) return;
      move_sums(grad, sums, owned);
      pending = 0;
    };
    for (Chunk& chunk : work.chunks) {
      chunk.entries[index].each([&](Block* block, int count) {
        if (few) copy_corners(slab, level, band, block, count, slot.value.get());
        adder_(rows, block, static_cast<int>(ceil_div(count, kQuads) * kQuads));
        sum_up(count);
      });
      chunk.stubs[index].each([&](Block* block, int count) {
        add_stubs(rows, block, count);
        sum_up(count);
      });
    }
    if (sums) {
      move_sums(grad, sums, owned);
      for (int64_t i = 0; i < owned; ++i) grad[i] = static_cast<float>(sums[i]);
    }
    if (!last) {
      std::memcpy(carry, grad, static_cast<size_t>(owned) * sizeof(float));
    } else if (of_.wants_grad_value() && !write_keys(slab, level, band, grad)) {
      write_exact(slab, level, band, slot);
    }
  }

  int64_t carried(const Band& band) const {
    int64_t before = band.first;
    for (int i = 0; i < band.level; ++i) before += of_.levels[static_cast<size_t>(i)].anchors;
    return before;
  }

  static void move_sums(float* grad, double* sums, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sums[i] += static_cast<double>(grad[i]);
    std::memset(grad, 0, static_cast<size_t>(count) * sizeof(float));
  }

  void copy_keys(int64_t slab, const Level& level, int64_t from, int64_t to, float* rows) const {
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

  void copy_corners(int64_t slab, const Level& level, const Band& band, const Block* block, int count, float* rows) {
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

  // False, with some keys written, where a gradient is not finite.
  bool write_keys(int64_t slab, const Level& level, const Band& band, const float* grad) const {
    Floats zero = {};
    const int64_t step = sizes_.heads * sizes_.channels;
    each_owned(slab, level, band, [&](int64_t local, T* target, int64_t keys) {
      const float* source = grad + local * columns_;
      for (int64_t i = 0; i < keys; ++i, source += columns_, target += step) {
        if (i + kAhead < keys) fetch<true>(target + kAhead * step, sizes_.channels * static_cast<int64_t>(sizeof(T)));
        for (int64_t k = 0; k < sizes_.channels; k += kWidth) {
          const Floats found = load(source + k);
          zero += found * 0.0f;
          if (sizes_.channels - k >= kWidth) {
            store(target + k, found);
          } else {
            store_part(target + k, found, sizes_.channels - k);
          }
        }
      }
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

  // ------------------------------------------------------------------------------------------ collect

  void collect(Slab& work, int64_t slab, int64_t round, size_t index, Slot& slot) {
    const Chunk& chunk = work.chunks[index];
    const Span all = round_span(round), span(static_cast<int64_t>(index), chunk_queries_, all.size());
    const int64_t samples = sizes_.samples();
    const int64_t row = 3 * samples;  // x and y of each sample, then their weights
    if (!slot.grads.get()) slot.grads = call_.template scratch<float>(kRows * row + kWidth);
    start_places(chunk, slot);
    Slot::Place* places = slot.places.data();
    const uint16_t* bands = chunk.bands.get();
    // Some rows at once: a vector that is read while its elements are on their way to the cache waits for them.
    for (int64_t query = span.begin; query < span.end; query += kRows) {
      const int64_t rows = std::min(kRows, span.end - query);
      for (int64_t r = 0; r < rows; ++r) {
        fetch_outputs(slab, all.begin + query + r);
        float* grads = slot.grads.get() + r * row;
        for (int64_t i = 0; i < samples; ++i) {
          Slot::Place& place = places[*bands++];
          EntryGrads found;
          std::memcpy(&found, place.next, sizeof found);
          __builtin_prefetch(place.next + 4 * kFetch);
          place.next += place.step;
          if (!(place.left -= place.step)) next_block(place);
          grads[2 * i] = found.x;
          grads[2 * i + 1] = found.y;
          grads[2 * samples + i] = found.weight;
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        const float* grads = slot.grads.get() + r * row;
        write_samples(slab, all.begin + query + r, grads, grads + 2 * samples);
      }
    }
  }

  // At the chains' first entries; behind them at one for all samples that reach nothing, where it stays.
  void start_places(const Chunk& chunk, Slot& slot) const {
    static const Entry kNothing{0, 0, 0, 0};
    slot.places.clear();
    for (size_t band = 0; band < bands_.bands.size(); ++band) {
      const Chain& chain = chunk.entries[band];
      slot.places.push_back({nullptr, 0, 1, nullptr});
      if (!chain.first) continue;
      slot.places.back() = {chain.first->entries, Block::kEntries, 1, chain.first};
    }
    slot.places.push_back({&kNothing, 1, 0, nullptr});
  }
  static void next_block(Slot::Place& place) {
    place.block = place.block->next;
    if (place.block) {
      place.next = place.block->entries;
      fetch(place.block->next, 4 * kFetch * sizeof(Entry));
    }
    place.left = Block::kEntries;
  }

  void fetch_outputs(int64_t slab, int64_t query) const {
    const int64_t bytes = sizes_.samples() * static_cast<int64_t>(sizeof(T));
    if (const T* row = of_.grad_locations(slab, query)) fetch<true>(row, 2 * bytes);
    if (const T* row = of_.grad_weights(slab, query)) fetch<true>(row, bytes);
  }

  void write_samples(int64_t slab, int64_t query, const float* locations, const float* weights) const {
    const int64_t samples = sizes_.samples();
    const Floats zero = write_row(locations, of_.grad_locations(slab, query), 2 * samples) +
                        write_row(weights, of_.grad_weights(slab, query), samples);
    if (all_finite(zero)) return;
    for (int64_t i = 0; i < samples; ++i)
      if (!std::isfinite(locations[2 * i] + locations[2 * i + 1] + weights[i]))
        of_.write_exact(slab, query, i, of_.sample(slab, query, i));
  }

  // Not zero in lanes where something is not finite.
  static Floats write_row(const float* from, T* to, int64_t count) {
    Floats zero = {};
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
      const Floats found = load(from + i);
      zero += found * 0.0f;
      if (to) store(to + i, found);
    }
    if (i < count) {
      const Floats found = load_part(from + i, count - i);
      zero += found * 0.0f;
      if (to) store_part(to + i, found, count - i);
    }
    return zero;
  }

  // ---------------------------------------------------------------------------------------- in float64

  // A band's gradient in full, from all queries of the call.
  void write_exact(int64_t slab, const Level& level, const Band& band, Slot& slot) {
    int64_t begin = -1, end = -1;  // keys
    each_run(
        level, band.first, band.first + band.size,
        [&](int64_t, int64_t y, int64_t x, int64_t keys) {
          end = level.start + y * level.width + x + keys;
          if (begin < 0) begin = end - keys;
        },
        [](int64_t, int64_t) {});
    if (begin < 0) return;
    if (!slot.sums.get()) slot.sums = call_.template scratch<double>(bands_.scratch_keys * columns_);
    double* sums = slot.sums.get();
    std::fill_n(sums, (end - begin) * sizes_.channels, 0.0);
    for (int64_t query = 0; query < sizes_.queries; ++query)
      for (int64_t i = band.level * sizes_.points; i < (band.level + 1) * sizes_.points; ++i)
        of_.add_exact(slab, query, i, of_.sample(slab, query, i), begin, end, sums);
    of_.write_sums(slab, begin, end, sums);
  }

  // Everything in float64, whatever the levels: a slab is summed by one task at a time, some queries in each.
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
        of_.write_exact(slab, query, i, found);
        if (of_.wants_grad_value()) of_.add_exact(slab, query, i, found, 0, sizes_.keys, sums);
      }
  }

  Call& call_;
  Operands<T> of_;
  const Sizes& sizes_ = of_.sizes;
  const int64_t columns_;  // floats of a key or query in scratch memory
  const AddEntries adder_;
  Bands bands_;
  int64_t chunk_queries_ = 0, round_queries_ = 0;
  std::optional<Placer<T>> placer_;
  std::vector<Slot> slots_;
  std::vector<Slab> works_;
};

void require_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  require(tensor.given() && tensor.rank() == static_cast<int32_t>(shape.size()) && tensor.contiguous());
  int axis = 0;
  for (int64_t size : shape) require(tensor.shape(axis++) == size);
}

int64_t index_at(const Tensor& tensor, int64_t i) {
  return tensor.dtype() == NPUGRAD_INT64 ? tensor.data<const int64_t>()[i] : tensor.data<const int32_t>()[i];
}

// Sizes that all operands agree on.
Sizes checked_sizes(const Call& call) {
  const Tensor value = call.tensor(kValue), location = call.tensor(kLocation), grad = call.tensor(kGradOutput);
  require(value.given() && value.rank() == 4 && location.given() && location.rank() == 6);
  require(grad.given() && (grad.rank() == 3 || grad.rank() == 4));
  const int64_t bs = value.shape(0), nk = value.shape(1), nh = value.shape(2), ch = value.shape(3);
  const int64_t nq = location.shape(1), nl = location.shape(3), np = location.shape(4);
  require_shape(value, {bs, nk, nh, ch});
  require_shape(call.tensor(kSpatialShape), {nl, 2});
  require_shape(call.tensor(kLevelStartIndex), {nl});
  require_shape(location, {bs, nq, nh, nl, np, 2});
  require_shape(call.tensor(kAttnWeight), {bs, nq, nh, nl, np});
  if (grad.rank() == 4) {
    require_shape(grad, {bs, nq, nh, ch});
  } else {
    require_shape(grad, {bs, nq, product({nh, ch})});
  }
  if (call.tensor(kGradValue).given()) require_shape(call.tensor(kGradValue), {bs, nk, nh, ch});
  if (call.tensor(kGradLocation).given()) require_shape(call.tensor(kGradLocation), {bs, nq, nh, nl, np, 2});
  if (call.tensor(kGradAttnWeight).given()) require_shape(call.tensor(kGradAttnWeight), {bs, nq, nh, nl, np});
  return {bs, nk, nh, ch, nq, nl, np};
}

void check_types(const Call& call, int32_t dtype) {
  if (!is_float(dtype)) throw Unsupported();
  for (int index : {kLocation, kAttnWeight, kGradOutput, kGradValue, kGradLocation, kGradAttnWeight}) {
    const Tensor tensor = call.tensor(index);
    if (tensor.given() && tensor.dtype() != dtype) throw Unsupported();
  }
  for (int index : {kSpatialShape, kLevelStartIndex}) {
    const int32_t found = call.tensor(index).dtype();
    if (found != NPUGRAD_INT32 && found != NPUGRAD_INT64) throw Unsupported();
  }
}

}  // namespace

void multi_scale_deformable_attention_grad(Call& call) {
  const Sizes sizes = checked_sizes(call);
  const int32_t dtype = call.tensor(kValue).dtype();
  check_types(call, dtype);
  const auto all = {sizes.batches, sizes.keys, sizes.heads, sizes.channels, sizes.queries, sizes.levels, sizes.points};
  if (std::min(all) == 0) {
    for (int output : {kGradValue, kGradLocation, kGradAttnWeight})
      if (call.tensor(output).given()) call.tensor(output).zero();
    return;
  }
  // A numbering of the queries in a round, and of samples in a chunk, that fits 32 bits.
  if (sizes.samples() > (1 << 24)) throw Unsupported();
  std::vector<Level> levels;
  for (int64_t i = 0; i < sizes.levels; ++i)
    levels.push_back(
        {index_at(call.tensor(kSpatialShape), 2 * i), index_at(call.tensor(kSpatialShape), 2 * i + 1),
         index_at(call.tensor(kLevelStartIndex), i)});
  with_float_type(dtype, [&](auto type) { Deformable<decltype(type)>(call, sizes, std::move(levels)).run(); });
}

}  // namespace npugrad
