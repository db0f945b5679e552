// The samples of one band: what each adds to the gradient of the value, and its own gradients.
#ifndef NPUGRAD_DEFORMABLE_BAND_H
#define NPUGRAD_DEFORMABLE_BAND_H

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime.h"

namespace npugrad {

// Fetches the cache lines of memory that is read soon, or written; nothing there is touched, nor need it be there.
template <bool Write = false>
NPUGRAD_INLINE void fetch(const void* from, int64_t bytes) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(from), end = start + static_cast<uintptr_t>(bytes);
  for (uintptr_t at = start & ~uintptr_t{63}; at < end; at += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(at), Write);
}

// A sample as its band sees it. Its gradients take its place once they are there.
struct alignas(16) Entry {
  float low_x, low_y;  // way beyond the first corner
  float weight;        // attention weight; of a stub that times the corner's weight
  int32_t key;         // number of the first corner, counted from the band's first one
};
struct alignas(16) EntryGrads {
  float weight, x, y, unused;
};
static_assert(sizeof(Entry) == 4 * sizeof(float) && sizeof(EntryGrads) == sizeof(Entry), "four lanes");

struct Block {
  static constexpr int kEntries = 128;
  Entry entries[kEntries];
  int32_t queries[kEntries];
  Block* next;
  int64_t unused[7];
};
static_assert(sizeof(Block) % 64 == 0 && Block::kEntries % kWidth == 0, "blocks lie one behind the other, aligned");

// Blocks of one chunk of queries: given out one by one, taken back together.
class Arena {
 public:
  Block* take(Call& call) {
    if (used_ == static_cast<int64_t>(parts_.size()) * kPart) parts_.push_back(call.scratch<Block>(kPart));
    Block* found = parts_[static_cast<size_t>(used_ / kPart)].get() + used_ % kPart;
    ++used_;
    found->next = nullptr;
    return found;
  }
  void reset() { used_ = 0; }

 private:
  static constexpr int64_t kPart = 64;
  std::vector<Buffer<Block>> parts_;
  int64_t used_ = 0;
};

// A chain of blocks.
struct Chain {
  Block* first = nullptr;
  Block* last = nullptr;
  int32_t used = Block::kEntries;  // of the last block
  int32_t full = -1;               // blocks before it

  int64_t count() const { return first ? int64_t{full} * Block::kEntries + used : 0; }
  void grow(Arena& arena, Call& call) {
    Block* block = arena.take(call);
    (first ? last->next : first) = block;
    last = block;
    used = 0;
    ++full;
  }
  template <typename Body>
  void each(Body&& body) const {
    for (Block* block = first; block; block = block->next) body(block, block == last ? used : Block::kEntries);
  }
};

// ------------------------------------------------------------------------------------------------ shuffles

template <typename Map, typename V, int... I>
NPUGRAD_INLINE V shuffled(V a, V b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Map::at(I)...);
#else
  return __builtin_shuffle(a, b, Ints{Map::at(I)...});
#endif
}
// Lane i is lane Map::at(i) of a and b, one behind the other.
template <typename Map, typename V>
NPUGRAD_INLINE V shuffled(V a, V b) {
  return shuffled<Map>(a, b, std::make_integer_sequence<int, kWidth>{});
}

// Both halves as one vector. By way of memory it would wait for both stores.
template <typename V, typename Half>
NPUGRAD_INLINE V joined(const Half (&halves)[2]) {
#if defined(__AVX512F__)
  const __m512i twice = _mm512_maskz_broadcast_i64x4(0xff, (__m256i)halves[0]);
  return (V)_mm512_maskz_inserti64x4(0xff, twice, (__m256i)halves[1], 1);
#elif defined(__AVX2__)
  return (V)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)halves[0]), (__m128i)halves[1], 1);
#else
  V found;
  std::memcpy(&found, halves, sizeof found);
  return found;
#endif
}

// Lanes come in quads, one for each sample of a vector.
template <int Lane>
struct QuadSplat {
  static constexpr int at(int i) { return (i & ~3) + Lane; }
};
template <int Half>  // of each quad: lanes of a and b in turns
struct QuadZip {
  static constexpr int at(int i) { return (i & ~3) + 2 * Half + (i & 3) / 2 + (i & 1) * kWidth; }
};
template <int Half>  // of each quad: two lanes of a, then two of b
struct QuadPair {
  static constexpr int at(int i) { return (i & ~3) + 2 * Half + (i & 1) + ((i & 3) / 2) * kWidth; }
};
template <int Half>  // half of a, then half of b
struct Halves2 {
  static constexpr int at(int i) { return i % (kWidth / 2) + Half * (kWidth / 2) + (i / (kWidth / 2)) * kWidth; }
};
template <int Odd>  // every second quad of a, then of b
struct EverySecond {
  static constexpr int at(int i) { return (2 * (i / 4) + Odd) * 4 + i % 4; }
};

// Of two vectors as one row: lanes of its half, taken from a and b in turns.
template <int Half>
struct Zip {
  static constexpr int at(int i) { return Half * (kWidth / 2) + i / 2 + (i & 1) * kWidth; }
};
template <int Half>  // the same, two lanes at a time
struct ZipPairs {
  static constexpr int at(int i) { return Half * (kWidth / 2) + i / 4 * 2 + (i & 1) + (i & 2) / 2 * kWidth; }
};
template <int Odd>  // every second lane of the row
struct Unzip {
  static constexpr int at(int i) { return 2 * i + Odd; }
};

// Quad by quad the sums of a, of b, of c and of d.
NPUGRAD_INLINE Floats quad_sums(Floats a, Floats b, Floats c, Floats d) {
  const Floats t = shuffled<QuadZip<0>>(a, b) + shuffled<QuadZip<1>>(a, b);
  const Floats u = shuffled<QuadZip<0>>(c, d) + shuffled<QuadZip<1>>(c, d);
  return shuffled<QuadPair<0>>(t, u) + shuffled<QuadPair<1>>(t, u);
}

constexpr int kQuads = kWidth / 4;

// Quad i of the result is the sum of the quads of v[i].
NPUGRAD_INLINE Floats sums_of_quads(const Floats (&v)[kQuads]) {
  if constexpr (kQuads == 1) {
    return v[0];
  } else if constexpr (kQuads == 2) {
    return shuffled<Halves2<0>>(v[0], v[1]) + shuffled<Halves2<1>>(v[0], v[1]);
  } else {
    const Floats t = shuffled<Halves2<0>>(v[0], v[1]) + shuffled<Halves2<1>>(v[0], v[1]);
    const Floats u = shuffled<Halves2<0>>(v[2], v[3]) + shuffled<Halves2<1>>(v[2], v[3]);
    return shuffled<EverySecond<0>>(t, u) + shuffled<EverySecond<1>>(t, u);
  }
}

template <int... I>
NPUGRAD_INLINE Floats quads(float a, float b, float c, float d, std::integer_sequence<int, I...>) {
  return Floats{(I % 4 == 0 ? a : I % 4 == 1 ? b : I % 4 == 2 ? c : d)...};
}
NPUGRAD_INLINE Floats quads(float a, float b, float c, float d) {
  return quads(a, b, c, d, std::make_integer_sequence<int, kWidth>{});
}

// ------------------------------------------------------------------------------------------------- samples

constexpr int kFetch = 8;  // entries whose query is fetched before their turn

// A band in scratch memory: rows of `columns` floats, a multiple of the vector width, zeros beyond the channels.
struct BandRows {
  const float* value;
  float* grad;
  const float* queries;  // gradient of the output, a row for each query
  int64_t columns, pitch;
  float height, width;
};

// The first `count` entries of a block, a multiple of kQuads. Vectors is columns / kWidth, 0 for any.
template <int Vectors>
void add_entries(const BandRows& band, Block* block, int count) {
  const int64_t vectors = Vectors ? Vectors : band.columns / kWidth;
  const int64_t columns = vectors * kWidth, below = band.pitch * columns;
  const Floats sign_x = quads(-1, 1, -1, 1), sign_y = quads(-1, -1, 1, 1);
  const Floats one_x = quads(1, 0, 1, 0), one_y = quads(1, 1, 0, 0);
  const Block* next = block->next ? block->next : block;
  for (int i = 0; i < count; i += kQuads) {
    Entry* entries = block->entries + i;
    fetch(next->entries + i, kQuads * sizeof(Entry));
    fetch(next->queries + i, 1);
    for (int j = 0; j < kQuads; ++j) {
      const float* query = band.queries + block->queries[std::min(i + kFetch + j, count - 1)] * columns;
#pragma GCC unroll 8
      for (int64_t k = 0; k < columns; k += 16) __builtin_prefetch(query + k);
    }
    const Floats packed = load(&entries->low_x);
    const Floats low_x = shuffled<QuadSplat<0>>(packed, packed), low_y = shuffled<QuadSplat<1>>(packed, packed);
    const Floats weight = shuffled<QuadSplat<2>>(packed, packed);
    const Floats along_x = low_x * sign_x + one_x, along_y = low_y * sign_y + one_y;
    const Floats share = along_x * along_y;
    alignas(64) float shares[kWidth];
    store(shares, share * weight);
    Floats dots[kQuads];
#pragma GCC unroll 4
    for (int j = 0; j < kQuads; ++j) {
      const float* query = band.queries + block->queries[i + j] * columns;
      const int64_t at = entries[j].key * columns;
      const float *v0 = band.value + at, *v1 = v0 + below;
      float *g0 = band.grad + at, *g1 = g0 + below;
      const Floats s0 = splat(shares[4 * j]), s1 = splat(shares[4 * j + 1]), s2 = splat(shares[4 * j + 2]),
                   s3 = splat(shares[4 * j + 3]);
      Floats d0 = {}, d1 = {}, d2 = {}, d3 = {};
#pragma GCC unroll 8
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t k = v * kWidth;
        const Floats g = load(query + k);
        d0 += g * load(v0 + k);
        d1 += g * load(v0 + columns + k);
        d2 += g * load(v1 + k);
        d3 += g * load(v1 + columns + k);
        const Floats n0 = load(g0 + k) + s0 * g, n1 = load(g0 + columns + k) + s1 * g;
        const Floats n2 = load(g1 + k) + s2 * g, n3 = load(g1 + columns + k) + s3 * g;
        store(g0 + k, n0);
        store(g0 + columns + k, n1);
        store(g1 + k, n2);
        store(g1 + columns + k, n3);
      }
      dots[j] = quad_sums(d0, d1, d2, d3);
    }
    const Floats dot = sums_of_quads(dots);
    const Floats by_x = sign_x * along_y * dot * (weight * band.width);
    const Floats by_y = sign_y * along_x * dot * (weight * band.height);
    store(&entries->low_x, quad_sums(share * dot, by_x, by_y, Floats{}));
  }
}

// The first `count` stubs of a block: single corners of samples of other bands.
inline void add_stubs(const BandRows& band, const Block* block, int count) {
  for (int i = 0; i < count; ++i) {
    const float* query = band.queries + block->queries[i] * band.columns;
    float* grad = band.grad + block->entries[i].key * band.columns;
    const Floats share = splat(block->entries[i].weight);
    for (int64_t k = 0; k < band.columns; k += kWidth) store(grad + k, load(grad + k) + share * load(query + k));
  }
}

using AddEntries = void (*)(const BandRows&, Block*, int);
inline AddEntries entries_adder(int64_t columns) {
  switch (columns / kWidth) {
    case 1: return add_entries<1>;
    case 2: return add_entries<2>;
    case 3: return add_entries<3>;
    case 4: return add_entries<4>;
    case 6: return add_entries<6>;
    case 8: return add_entries<8>;
    default: return add_entries<0>;
  }
}

}  // namespace npugrad
#endif
