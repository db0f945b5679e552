// Parts of group_norm_backward: the sums and the gradient of one block of pixels, and the pages of the result.
//
// Lines: where grad_out and input are 2^27 + 4096 bytes apart, which is how NumPy lays arrays of 128 MiB, loads that cross
// lines are slow on Zen 4, as if its first-level cache held a line of the one or its counterpart of the other, not both.
// Such loads come to each line twice, so grad_out is loaded one step before the input that belongs to it: between the
// two times nobody comes to the counterpart.
#ifndef NPUGRAD_GROUP_NORM_BLOCKS_H
#define NPUGRAD_GROUP_NORM_BLOCKS_H

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "runtime.h"

namespace npugrad {

// Two vectors that are loaded and stored together. Of bfloat16 the one has the elements at even places, the other
// those at odd places, which spares widening and narrowing: whoever uses pairs does not care for the places.
struct Pair {
  Floats a, b;
};
// As it lies in memory, which for bfloat16 is one register, and what it stands for.
template <typename T>
NPUGRAD_INLINE Pair load_packed(const T* p) {
  return {load(p), load(p + kWidth)};
}
NPUGRAD_INLINE Words load_packed(const bfloat16* p) { return load_raw<uint32_t>(p); }
NPUGRAD_INLINE Pair unpack(Pair v) { return v; }
NPUGRAD_INLINE Pair unpack(Words w) { return {(Floats)(w << 16), (Floats)(w & 0xffff0000u)}; }
template <typename T>
using Packed = decltype(load_packed(static_cast<const T*>(nullptr)));
template <typename T>
NPUGRAD_INLINE Pair load_pair(const T* p) {
  return unpack(load_packed(p));
}
// Of numbers that are finite; others give anything.
NPUGRAD_INLINE Words bfloat16_pair(Pair v) {
  const Words a = (Words)v.a, b = (Words)v.b;
  const Words low = (a + 0x7fffu + ((a >> 16) & 1u)) >> 16, high = b + 0x7fffu + ((b >> 16) & 1u);
  return low | (high & 0xffff0000u);
}
template <bool Stream, typename T>
NPUGRAD_INLINE void store_pair(T* p, Pair v) {
  if constexpr (Stream) {
    stream(p, v.a);
    stream(p + kWidth, v.b);
  } else {
    store(p, v.a);
    store(p + kWidth, v.b);
  }
}
template <bool Stream>
NPUGRAD_INLINE void store_pair(bfloat16* p, Pair v) {
  const Words w = bfloat16_pair(v);
#if defined(__x86_64__)
  if constexpr (Stream) return stream_raw<sizeof w>(p, w);
#endif
  store_raw<uint32_t>(p, w);
}

// Elements before the first one at the start of a line of the cache.
template <typename T>
NPUGRAD_INLINE int64_t line_start(const T* p) {
  return static_cast<int64_t>(-reinterpret_cast<uintptr_t>(p) % 64 / sizeof(T));
}

// Of a vector of zeros and NaNs.
NPUGRAD_INLINE bool any_nan(Floats v) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q)) != 0;
#else
  return !all_finite(v);
#endif
}

// Over the pixels of a channel of a sample.
struct Sums {
  double grad = 0, product = 0;
  void operator+=(const Sums& other) {
    grad += other.grad;
    product += other.product;
  }
};

// What is the same for all pixels of a channel of a sample.
struct Row {
  double mean, rstd, gamma, c1, c2;
};

template <typename T>
__attribute__((noinline)) Sums sums_again(const T* grad, const T* input, int64_t count, const Row& row) {
  Sums found;
  for (int64_t i = 0; i < count; ++i) {
    const double g = to_float(grad[i]);
    found.grad += g;
    if (input) found.product += g * ((to_float(input[i]) - row.mean) * row.rstd);
  }
  return found;
}

// Sums of a block of pixels in float32, beyond in float64; without `input` only those of grad_out.
template <typename T>
NPUGRAD_INLINE Sums sums_of_block(const T* grad, const T* input, int64_t count, const Row& row) {
  constexpr int kPairs = 2;
  const Floats mean = splat(static_cast<float>(row.mean)), rstd = splat(static_cast<float>(row.rstd));
  constexpr int64_t kStep = kPairs * 2 * kWidth;
  Pair grads[kPairs] = {}, products[kPairs] = {};
  Packed<T> next[kPairs] = {};
  const auto load_next = [&](int64_t at) {
#pragma GCC unroll 2
    for (int k = 0; k < kPairs; ++k) next[k] = load_packed(grad + at + k * 2 * kWidth);
  };
  int64_t i = 0;
  if (input) {
    if (kStep <= count) load_next(0);
    for (; i + kStep <= count; i += kStep) {
      const Packed<T> now[kPairs] = {next[0], next[1]};
      if (i + 2 * kStep <= count) load_next(i + kStep);  // see "Lines" above
#pragma GCC unroll 2
      for (int k = 0; k < kPairs; ++k) {
        const Pair g = unpack(now[k]), x = load_pair(input + i + k * 2 * kWidth);
        grads[k].a += g.a;
        grads[k].b += g.b;
        products[k].a += g.a * ((x.a - mean) * rstd);
        products[k].b += g.b * ((x.b - mean) * rstd);
      }
    }
    for (; i < count; i += kWidth) {
      const int64_t left = count - i;
      const Floats g = left >= kWidth ? load(grad + i) : load_part(grad + i, left);
      // Lanes beyond the end read 0 from grad_out, but 0 times infinity is no number.
      const Floats x = left >= kWidth ? load(input + i) : load_part(input + i, left);
      grads[0].a += g;
      products[0].a += g * ((x - mean) * rstd);
    }
  } else {
    for (; i + kWidth <= count; i += kWidth) grads[0].a += load(grad + i);
    if (i < count) grads[0].a += load_part(grad + i, count - i);
  }
  Sums found;
  found.grad = sum((grads[0].a + grads[0].b) + (grads[1].a + grads[1].b));
  if (input) found.product = sum((products[0].a + products[0].b) + (products[1].a + products[1].b));
  if (std::isfinite(found.grad + found.product)) return found;
  // Only what is not finite: no bit of the one may depend on what the other is made of.
  const Sums again = sums_again(grad, input, count, row);
  if (!std::isfinite(found.grad)) found.grad = again.grad;
  if (!std::isfinite(found.product)) found.product = again.product;
  return found;
}

template <typename T>
__attribute__((noinline)) void grad_input_again(const T* grad, const T* input, T* out, int64_t count, const Row& row) {
  for (int64_t i = 0; i < count; ++i) {
    const double xh = (to_float(input[i]) - row.mean) * row.rstd;
    out[i] = from_double<T>(((to_float(grad[i]) * row.gamma - row.c1) - xh * row.c2) * row.rstd);
  }
}

// grad_input of a block of pixels. What lies `ahead` elements further is fetched into the cache meanwhile; 0: nothing.
template <bool Stream, typename T>
NPUGRAD_INLINE void grad_input_of_block(
    const T* grad, const T* input, T* out, int64_t count, const Row& row, int64_t ahead) {
  const Floats mean = splat(static_cast<float>(row.mean)), rstd = splat(static_cast<float>(row.rstd));
  const Floats a = splat(static_cast<float>(row.rstd * row.gamma));
  const Floats b = splat(static_cast<float>(row.rstd * row.c2)), c = splat(static_cast<float>(row.rstd * row.c1));
  Pair zero = {};  // becomes NaN with the first result that is not finite; two, as each waits for the one before
  const auto compute = [&](Floats g, Floats x, Floats& zero) {
    const Floats found = a * g - (b * ((x - mean) * rstd) + c);
    zero += found * 0.0f;
    return found;
  };
  const auto part = [&](int64_t i, int64_t n) {
    store_part(out + i, compute(load_part(grad + i, n), load_part(input + i, n), zero.a), n);
  };
  const auto pairs = [&](int64_t i, auto fetch) {
    Packed<T> next = {};
    if (i + 2 * kWidth <= count) next = load_packed(grad + i);
    for (; i + 2 * kWidth <= count; i += 2 * kWidth) {
      if constexpr (fetch) {
        constexpr int kLine = 64 / sizeof(T);
#pragma GCC unroll 2
        for (int k = 0; k < 2 * kWidth; k += kLine) {
          __builtin_prefetch(grad + ahead + i + k, 0, 2);
          __builtin_prefetch(input + ahead + i + k, 0, 2);
        }
      }
      const Pair g = unpack(next);
      if (i + 4 * kWidth <= count) next = load_packed(grad + i + 2 * kWidth);  // see "Lines" above
      const Pair x = load_pair(input + i);
      store_pair<Stream>(out + i, {compute(g.a, x.a, zero.a), compute(g.b, x.b, zero.b)});
    }
    return i;
  };
  // Pairs that bypass the cache go to whole lines: halves of lines, written one after the other, take half as long again.
  const int64_t start = Stream ? std::min(line_start(out), count) : 0;
  int64_t i = 0;
  for (; i + kWidth <= start; i += kWidth) store(out + i, compute(load(grad + i), load(input + i), zero.a));
  if (i < start) part(i, start - i);
  i = start;
  i = ahead ? pairs(i, std::true_type()) : pairs(i, std::false_type());
  for (; i + kWidth <= count; i += kWidth) store(out + i, compute(load(grad + i), load(input + i), zero.a));
  if (i < count) part(i, count - i);
  if (any_nan(zero.a + zero.b)) grad_input_again(grad, input, out, count, row);
}

// Memory that a large result lies in, as a task comes to it: group by group, in rising order within each.
//
// Linux clears a fresh huge page towards the place first touched: from a place near its end in rising order, which is
// twice as fast as in falling order. So the first store goes to the end of what a group has of each page. Over pages
// that were cleared just now and are still in the cache, ordinary stores are faster than non-temporal ones. Asking the
// system takes 2 us: not again where the page was found there last.
class alignas(64) ResultPages {
 public:
  explicit ResultPages(bool large) : large_(large) {}

  // What follows ends before `end`.
  void begin(char* end) {
    end_ = end;
    ready_ = nullptr;
  }
  // Before `bytes` from `p` on are written; true if they had better bypass the cache.
  bool streams(char* p, int64_t bytes) {
    if (!large_) return false;
    while (p + bytes > ready_) {
      const uintptr_t page = reinterpret_cast<uintptr_t>(std::max(p, ready_)) / kHuge;
      ready_ = std::min(reinterpret_cast<char*>((page + 1) * kHuge), end_);
      fresh_ = page != there_ && !resident(ready_ - 1);
      if (fresh_) {
        ready_[-1] = 0;
      } else {
        there_ = page;
      }
    }
    return !fresh_;
  }

 private:
  static constexpr uintptr_t kHuge = uintptr_t{1} << 21;

  static bool resident(const char* p) {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    unsigned char found = 1;
    void* start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) / page * page);
    return mincore(start, 1, &found) != 0 || (found & 1);
  }

  const bool large_;
  char *end_ = nullptr, *ready_ = nullptr;
  uintptr_t there_ = 0;  // the last page that was there
  bool fresh_ = false;
};

}  // namespace npugrad
#endif
