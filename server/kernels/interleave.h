// Planes of channels to pixels with their channels side by side, and back, in registers.
//
// L vectors of kWidth pixels, one vector for each channel, hold the same numbers as L * kWidth floats in a row, the L
// channels of each pixel side by side. L is a power of 2; log2(L) stages of shuffles lead from one to the other.
#ifndef NPUGRAD_INTERLEAVE_H
#define NPUGRAD_INTERLEAVE_H

#include <utility>

#include "simd.h"

namespace npugrad {

// GCC knows the words of Clang from version 12 on.
#if defined(__clang__) || __GNUC__ >= 12
#define NPUGRAD_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define NPUGRAD_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

using Lanes = std::make_integer_sequence<int, kWidth>;

// a0 b0 a1 b1 ... of the first halves of two vectors, or of the second ones.
template <int... I>
NPUGRAD_INLINE Floats merged(Floats a, Floats b, std::integer_sequence<int, I...>, bool second) {
  return second ? NPUGRAD_SHUFFLE(a, b, ((I % 2) * kWidth + kWidth / 2 + I / 2)...)
                : NPUGRAD_SHUFFLE(a, b, ((I % 2) * kWidth + I / 2)...);
}
NPUGRAD_INLINE Floats merge_first(Floats a, Floats b) { return merged(a, b, Lanes{}, false); }
NPUGRAD_INLINE Floats merge_second(Floats a, Floats b) { return merged(a, b, Lanes{}, true); }

// Lanes 0, 2, 4 ... of two vectors in a row, or 1, 3, 5 ...
template <int... I>
NPUGRAD_INLINE Floats picked(Floats a, Floats b, std::integer_sequence<int, I...>, bool odd) {
  return odd ? NPUGRAD_SHUFFLE(a, b, (2 * I + 1)...) : NPUGRAD_SHUFFLE(a, b, (2 * I)...);
}
NPUGRAD_INLINE Floats pick_even(Floats a, Floats b) { return picked(a, b, Lanes{}, false); }
NPUGRAD_INLINE Floats pick_odd(Floats a, Floats b) { return picked(a, b, Lanes{}, true); }

// Sums of neighbours of two vectors in a row.
NPUGRAD_INLINE Floats add_pairs(Floats a, Floats b) { return pick_even(a, b) + pick_odd(a, b); }

// Two vectors as one of twice the width, and its halves.
template <typename T, int N, int... I>
NPUGRAD_INLINE Vec<T, 2 * N> joined(Vec<T, N> a, Vec<T, N> b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, I...);
#else
  Vec<T, 2 * N> found;
  std::memcpy(&found, &a, sizeof a);
  std::memcpy(reinterpret_cast<char*>(&found) + sizeof a, &b, sizeof b);
  return found;
#endif
}
template <typename T, int N>
NPUGRAD_INLINE Vec<T, 2 * N> joined(Vec<T, N> a, Vec<T, N> b) {
  return joined<T, N>(a, b, std::make_integer_sequence<int, 2 * N>{});
}
template <int... I>
NPUGRAD_INLINE HalfFloats half_of(Floats v, bool second, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return second ? __builtin_shufflevector(v, v, (kWidth / 2 + I)...) : __builtin_shufflevector(v, v, I...);
#else
  HalfFloats halves[2];
  std::memcpy(halves, &v, sizeof v);
  return halves[second];
#endif
}
NPUGRAD_INLINE HalfFloats half_of(Floats v, bool second) {
  return half_of(v, second, std::make_integer_sequence<int, kWidth / 2>{});
}

template <int L, int Stage = 1>
NPUGRAD_INLINE void interleave(Floats (&v)[L]) {
  if constexpr (Stage < L) {
    Floats next[L];
#pragma GCC unroll 16
    for (int i = 0; i < L / 2; ++i) {
      next[2 * i] = merge_first(v[i], v[i + L / 2]);
      next[2 * i + 1] = merge_second(v[i], v[i + L / 2]);
    }
    interleave<L, 2 * Stage>(next);
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) v[i] = next[i];
  }
}

template <int L, int Stage = 1>
NPUGRAD_INLINE void deinterleave(Floats (&v)[L]) {
  if constexpr (Stage < L) {
    Floats next[L];
#pragma GCC unroll 16
    for (int i = 0; i < L / 2; ++i) {
      next[i] = pick_even(v[2 * i], v[2 * i + 1]);
      next[i + L / 2] = pick_odd(v[2 * i], v[2 * i + 1]);
    }
    deinterleave<L, 2 * Stage>(next);
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) v[i] = next[i];
  }
}

// `count` pixels of `channels` <= L planes, whose pixels lie `pixel` apart and which lie `plane` apart, side by side
// as float32; the channels beyond are 0. Up to kWidth pixels beyond the end become 0 as well, or stay.
template <int L, bool Full, typename T>
NPUGRAD_INLINE void pixels_of_rows(const T* from, int64_t plane, int channels, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    Floats v[L];
#pragma GCC unroll 16
    for (int c = 0; c < L; ++c) v[c] = Full || c < channels ? load(from + c * plane + i) : Floats{};
    interleave<L>(v);
#pragma GCC unroll 16
    for (int c = 0; c < L; ++c) store(to + i * L + c * kWidth, v[c]);
  }
  if (i == count) return;
  Floats v[L];
#pragma GCC unroll 16
  for (int c = 0; c < L; ++c) v[c] = Full || c < channels ? load_part(from + c * plane + i, count - i) : Floats{};
  interleave<L>(v);
#pragma GCC unroll 16
  for (int c = 0; c < L; ++c) store(to + i * L + c * kWidth, v[c]);
}

// The same where the channels of a pixel lie side by side already.
template <int L, typename T>
NPUGRAD_INLINE void pixels_of_pixels(const T* from, int64_t pixel, int channels, int64_t count, float* to) {
  constexpr int kLanes = L < kWidth ? L : kWidth;
  for (int64_t i = 0; i < count; ++i)
    for (int c = 0; c < L; c += kLanes) {
      const T* p = from + i * pixel + c;
      const int left = channels - c;
      const Floats v = left >= kWidth ? load(p) : left > 0 ? load_part(p, left) : Floats{};
      std::memcpy(to + i * L + c, &v, kLanes * sizeof(float));
    }
}

template <int L, typename T>
inline void to_pixels(const T* from, int64_t plane, int64_t pixel, int channels, int64_t count, float* to) {
  if (pixel == 1) {
    if (channels == L) return pixels_of_rows<L, true>(from, plane, channels, count, to);
    return pixels_of_rows<L, false>(from, plane, channels, count, to);
  }
  if (plane == 1) return pixels_of_pixels<L>(from, pixel, channels, count, to);
  for (int64_t i = 0; i < count; ++i)
    for (int c = 0; c < L; ++c) to[i * L + c] = c < channels ? to_float(from[c * plane + i * pixel]) : 0.0f;
}

// Back: `count` pixels into planes `plane` apart, whose pixels lie side by side. The pixels become 0. Stream: whole
// vectors bypass the cache.
template <int L, bool Stream = false, typename T>
inline void from_pixels(float* from, int64_t count, T* to, int64_t plane, int channels) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    Floats v[L];
#pragma GCC unroll 16
    for (int c = 0; c < L; ++c) v[c] = load(from + i * L + c * kWidth);
#pragma GCC unroll 16
    for (int c = 0; c < L; ++c) store(from + i * L + c * kWidth, Floats{});
    deinterleave<L>(v);
#pragma GCC unroll 16
    for (int c = 0; c < L; ++c) {
      if (c >= channels) continue;
      if constexpr (Stream) {
        stream(to + c * plane + i, v[c]);
      } else {
        store(to + c * plane + i, v[c]);
      }
    }
  }
  if (i == count) return;
  Floats v[L];
#pragma GCC unroll 16
  for (int c = 0; c < L; ++c) v[c] = load(from + i * L + c * kWidth);
  std::memset(from + i * L, 0, static_cast<size_t>((count - i) * L) * sizeof(float));
  deinterleave<L>(v);
#pragma GCC unroll 16
  for (int c = 0; c < L; ++c)
    if (c < channels) store_part(to + c * plane + i, v[c], count - i);
}

// The same of the second half of each pixel of L floats, which stays as it is.
template <int L, typename T>
inline void from_second_halves(const float* from, int64_t count, T* to, int64_t plane, int channels) {
  for (int64_t i = 0; i < count; i += kWidth) {
    Floats v[L];
#pragma GCC unroll 16
    for (int c = 0; c < L; ++c) v[c] = load(from + i * L + c * kWidth);
    deinterleave<L>(v);
#pragma GCC unroll 8
    for (int c = 0; c < L / 2; ++c) {
      if (c >= channels) continue;
      if (count - i >= kWidth) {
        store(to + c * plane + i, v[L / 2 + c]);
      } else {
        store_part(to + c * plane + i, v[L / 2 + c], count - i);
      }
    }
  }
}

}  // namespace npugrad
#endif
