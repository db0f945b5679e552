// The gradients of samples, taken from the chains of their bands in the order of the queries.
#ifndef NPUGRAD_DEFORMABLE_COLLECT_H
#define NPUGRAD_DEFORMABLE_COLLECT_H

#include <cmath>
#include <vector>

#include "deformable_operands.h"
#include "deformable_place.h"

namespace npugrad {

template <typename T>
class Collector {
 public:
  // The next entry of a chain, and how many follow in its block.
  struct Place {
    const Entry* next;
    int32_t left, step;
    const Block* block;
  };
  // What one chunk after the other has in a slot.
  struct Slot {
    Buffer<float> grads;
    std::vector<Place> places;
  };

  Collector(Call& call, const Operands<T>& operands, const Bands& bands) : call_(call), of_(operands), bands_(bands) {}

  // Writes the gradients of the samples of a chunk's queries.
  void collect(const Chunk& chunk, int64_t slab, const Span& queries, Slot& slot) const {
    const int64_t samples = of_.sizes.samples();
    const int64_t row = 3 * samples;  // x and y of each sample, then their weights
    if (!slot.grads.get()) slot.grads = call_.template scratch<float>(kRows * row + kWidth);
    start_places(chunk, slot);
    Place* places = slot.places.data();
    const uint16_t* bands = chunk.bands.get();
    // Some rows at once: a vector that is read while its elements are on their way to the cache waits for them.
    for (int64_t query = queries.begin; query < queries.end; query += kRows) {
      const int64_t rows = std::min(kRows, queries.end - query);
      for (int64_t r = 0; r < rows; ++r) {
        fetch_outputs(slab, query + r);
        float* grads = slot.grads.get() + r * row;
        for (int64_t i = 0; i < samples; ++i) {
          Place& place = places[*bands++];
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
        write_samples(slab, query + r, grads, grads + 2 * samples);
      }
    }
  }

 private:
  static constexpr int64_t kRows = 8;  // queries whose gradients are written together

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
  static void next_block(Place& place) {
    place.block = place.block->next;
    if (place.block) {
      place.next = place.block->entries;
      fetch(place.block->next, 4 * kFetch * sizeof(Entry));
    }
    place.left = Block::kEntries;
  }

  void fetch_outputs(int64_t slab, int64_t query) const {
    const int64_t bytes = of_.sizes.samples() * static_cast<int64_t>(sizeof(T));
    if (const T* row = of_.grad_locations(slab, query)) fetch<true>(row, 2 * bytes);
    if (const T* row = of_.grad_weights(slab, query)) fetch<true>(row, bytes);
  }

  void write_samples(int64_t slab, int64_t query, const float* locations, const float* weights) const {
    const int64_t samples = of_.sizes.samples();
    const Floats zero = write_row(locations, of_.grad_locations(slab, query), 2 * samples) +
                        write_row(weights, of_.grad_weights(slab, query), samples);
    if (all_finite(zero)) return;
    // Only what is not finite: no bit of grad_attn_weight may depend on attn_weight.
    for (int64_t i = 0; i < samples; ++i) {
      const bool location = !std::isfinite(locations[2 * i] + locations[2 * i + 1]);
      const bool weight = !std::isfinite(weights[i]);
      if (location || weight)
        of_.write_exact(slab, query, i, of_.sample(slab, query, i), location, weight);
    }
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

  Call& call_;
  const Operands<T>& of_;
  const Bands& bands_;
};

}  // namespace npugrad
#endif
