// Arithmetic on the blocks that Floyd attention is cut into: 32 keys by 32 elements of their vectors, in float32.
#ifndef NPUGRAD_FLOYD_BLOCKS_H
#define NPUGRAD_FLOYD_BLOCKS_H

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "simd.h"

namespace npugrad {
namespace floyd {

constexpr int kBlock = 32;                     // edge of a block
constexpr int kVectors = kBlock / kWidth;      // vectors in one of its rows
// Floats from block to block. Streams that run through several blocks side by side would share a set of the cache
// if it were a power of 2.
constexpr int kBlockStep = kBlock * kBlock + 16;

constexpr int kLine = 64;  // bytes of a line of the cache
constexpr int kLineVectors = kLine / static_cast<int>(sizeof(Floats));

// Values that the compiler would otherwise load again wherever they are used.
#if defined(__AVX512F__)
#define NPUGRAD_IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__x86_64__)
#define NPUGRAD_IN_REGISTER(v) __asm__("" : "+x"(v))
#elif defined(__aarch64__)
#define NPUGRAD_IN_REGISTER(v) __asm__("" : "+w"(v))
#else
#define NPUGRAD_IN_REGISTER(v) (void)(v)
#endif

// ------------------------------------------------------------------------------------------------ elementwise

// e to the x, to about one unit in the last place; 0 below what float32 holds as a normal number, infinity above.
NPUGRAD_INLINE Floats exp(Floats x) {
  const Floats low = splat(-104.0f), high = splat(89.0f), shift = splat(12582912.0f);  // 1.5 * 2^23
  const Floats above = low > x ? low : x, bounded = high < above ? high : above;       // a NaN stays
  const Floats shifted = bounded * 1.44269504088896341f + shift, n = shifted - shift;
  const Floats r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
  // The form with a mask spares GCC a warning about the other one.
  return (Floats)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  // 2^n in two factors: n may be 128.
  const Floats power = (Floats)(((Words)shifted - (0x4b400000u - 126u)) << 23);
  const Floats found = x < -86.6f ? Floats{} : p * power * 2.0f;
  return x == x ? found : x;
#endif
}

// ---------------------------------------------------------------------------------------------------- packing

// An element; operands need not be aligned to theirs.
template <typename T>
NPUGRAD_INLINE T read(const T* p) {
  T value;
  std::memcpy(static_cast<void*>(&value), static_cast<const void*>(p), sizeof value);
  return value;
}

// Elements p[0], p[stride], ..., n of them, 0 beyond; n may be any number.
template <typename T>
NPUGRAD_INLINE Floats load_strided(const T* p, int64_t stride, int64_t n) {
  if (n <= 0) return Floats{};
  if (stride == 1) return n >= kWidth ? load(p) : load_part(p, n);
  T lanes[kWidth] = {};
  for (int64_t i = 0; i < std::min<int64_t>(n, kWidth); ++i) lanes[i] = read(p + i * stride);
  return load(lanes);
}

template <int Half, size_t... I>
NPUGRAD_INLINE Floats interleave(Floats a, Floats b, std::index_sequence<I...>) {
  constexpr int kStart = Half * kWidth / 2;
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, static_cast<int>(kStart + I / 2 + I % 2 * kWidth)...);
#else
  return __builtin_shuffle(a, b, Ints{static_cast<int>(kStart + I / 2 + I % 2 * kWidth)...});
#endif
}

// Transposes kWidth vectors: each step interleaves the first half of the rows with the second.
NPUGRAD_INLINE void transpose(Floats (&rows)[kWidth]) {
  constexpr auto kLanes = std::make_index_sequence<kWidth>();
#pragma GCC unroll 4
  for (int step = 1; step < kWidth; step *= 2) {
    Floats next[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < kWidth / 2; ++i) {
      next[2 * i] = interleave<0>(rows[i], rows[i + kWidth / 2], kLanes);
      next[2 * i + 1] = interleave<1>(rows[i], rows[i + kWidth / 2], kLanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) rows[i] = next[i];
  }
}

// Copies a row of at most kBlock elements.
template <typename T>
NPUGRAD_INLINE void pack_row(const T* from, int64_t stride, int64_t columns, float* to) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v)
    store(to + v * kWidth, load_strided(from + v * kWidth * stride, stride, columns - v * kWidth));
}

// Transposes a block.
inline void transpose_block(const float* from, float* to) {
  for (int row = 0; row < kBlock; row += kWidth) {
    for (int column = 0; column < kBlock; column += kWidth) {
      Floats rows[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) rows[i] = load(from + (row + i) * kBlock + column);
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) store(to + (column + i) * kBlock + row, rows[i]);
    }
  }
}

// Rounds a row of at most kBlock elements, times a factor, into the operand's type.
template <typename T>
NPUGRAD_INLINE void write_row(const float* from, float factor, int64_t columns, T* to) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = columns - v * kWidth;
    const Floats value = load(from + v * kWidth) * factor;
    if (left >= kWidth) {
      store(to + v * kWidth, value);
    } else if (left > 0) {
      store_part(to + v * kWidth, value, left);
    }
  }
}

// Memory that will be used soon, in the order in which it is.
class Ahead {
 public:
  void reserve(int64_t runs) { runs_.reserve(static_cast<size_t>(runs)); }
  void clear() {
    runs_.clear();
    next_ = 0;
  }
  void add(const void* start, int64_t bytes) {
    if (bytes > 0) runs_.push_back({reinterpret_cast<uintptr_t>(start), bytes});
  }
  // The next piece of kBlock lines, the last one of a run of fewer; when there is none, any memory.
  uintptr_t take() {
    if (next_ == runs_.size()) return reinterpret_cast<uintptr_t>(this);
    Run& run = runs_[next_];
    const uintptr_t start = run.start;
    run.start += kBlock * kLine;
    if ((run.bytes -= kBlock * kLine) <= 0) ++next_;
    return start;
  }

 private:
  struct Run {
    uintptr_t start;
    int64_t bytes;
  };
  std::vector<Run> runs_;
  size_t next_ = 0;
};

// --------------------------------------------------------------------------------------------------- products
//
// Accumulators stay in registers over the sum, which is added to what is there at its end: most roundings then are
// those of small numbers. Sizes are chosen so that they fit, and that loads do not
// outnumber the multiplications by more than the load units can serve.

#if defined(__AVX512F__) || defined(__aarch64__)  // 32 registers
constexpr int kPairRows = 4, kPairColumns = 2, kPairVectors = 2;
constexpr int kProductRows = 8, kProductVectors = 2;
#else
constexpr int kPairRows = 2, kPairColumns = 2, kPairVectors = 2;
constexpr int kProductRows = 4, kProductVectors = 2;
#endif

// target[i][j][:] (+)= sum over l of a[i][j][l] * (b[i][l][:] + c[j][l][:]), i < kPairRows, j < kPairColumns.
//
// Two products in one: where the processor adds beside its multipliers, the sum of b and c costs nothing, and half of
// the multiplications are saved. a[i][j] is `RowStep` floats from a[i + 1][j] and kBlock from a[i][j + 1]. Meanwhile
// `length` lines of the cache are fetched from `ahead` on.
template <int RowStep, bool Add>
NPUGRAD_INLINE void pair_product(
    int64_t length, const float* a, const float* b, const float* c, float* target, int64_t row_step,
    int64_t column_step, uintptr_t ahead) {
  for (int v0 = 0; v0 < kVectors; v0 += kPairVectors) {
    Floats sums[kPairRows][kPairColumns][kPairVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kPairRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kPairColumns; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kPairVectors; ++v)
          sums[i][j][v] = Floats{};
    const float *bs = b + v0 * kWidth, *cs = c + v0 * kWidth;
    for (int64_t l = 0; l < length; ++l) {
      if (!v0) __builtin_prefetch(reinterpret_cast<const void*>(ahead + static_cast<uintptr_t>(l) * kLine), 0, 2);
      Floats left[kPairRows][kPairVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kPairRows; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kPairVectors; ++v) {
          left[i][v] = load(bs + i * kBlockStep + l * kBlock + v * kWidth);
          NPUGRAD_IN_REGISTER(left[i][v]);
        }
#pragma GCC unroll 4
      for (int j = 0; j < kPairColumns; ++j) {
        Floats right[kPairVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kPairVectors; ++v) {
          right[v] = load(cs + j * kBlockStep + l * kBlock + v * kWidth);
          NPUGRAD_IN_REGISTER(right[v]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kPairRows; ++i) {
          Floats factor = splat(a[i * RowStep + j * kBlock + l]);
          NPUGRAD_IN_REGISTER(factor);
#pragma GCC unroll 4
          for (int v = 0; v < kPairVectors; ++v) sums[i][j][v] += (left[i][v] + right[v]) * factor;
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPairRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kPairColumns; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kPairVectors; ++v) {
          float* to = target + i * row_step + j * column_step + (v0 + v) * kWidth;
          store(to, Add ? load(to) + sums[i][j][v] : sums[i][j][v]);
        }
  }
}

// target[r][:] (+)= sum over l of a[l][r] * b[l][:], for the rows of a block. Meanwhile the block `Next` floats further
// is fetched, and pieces of `ahead`.
template <int Step, int Next>
void add_product(int64_t length, const float* a, const float* b, float* target, bool fresh, Ahead& ahead) {
  for (int v0 = 0; v0 < kVectors; v0 += kProductVectors) {
    for (int r0 = 0; r0 < kBlock; r0 += kProductRows) {
      Floats sums[kProductRows][kProductVectors];
      float* corner = target + r0 * kBlock + v0 * kWidth;
#pragma GCC unroll 8
      for (int r = 0; r < kProductRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kProductVectors; v += kLineVectors)
          __builtin_prefetch(corner + Next + r * kBlock + v * kWidth, 1, 3);
#pragma GCC unroll 8
      for (int r = 0; r < kProductRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kProductVectors; ++v) sums[r][v] = Floats{};
      const float *as = a + r0, *bs = b + v0 * kWidth;
      const uintptr_t piece = ahead.take();
      for (int64_t l = 0; l < length; ++l) {
        __builtin_prefetch(reinterpret_cast<const void*>(piece + static_cast<uintptr_t>(l) * kLine), 0, 2);
        Floats row[kProductVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kProductVectors; ++v) {
          row[v] = load(bs + l * Step + v * kWidth);
          NPUGRAD_IN_REGISTER(row[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kProductRows; ++r) {
          const Floats factor = splat(as[l * Step + r]);
#pragma GCC unroll 4
          for (int v = 0; v < kProductVectors; ++v) sums[r][v] += row[v] * factor;
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kProductRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kProductVectors; ++v) {
          float* to = corner + r * kBlock + v * kWidth;
          store(to, fresh ? sums[r][v] : load(to) + sums[r][v]);
        }
    }
  }
}

}  // namespace floyd
}  // namespace npugrad
#endif
