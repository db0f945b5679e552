// Vectors rounded in one stated way, alike in every variant: to whole numbers, and of a product and sum in one operation.
#ifndef NPUGRAD_ROUNDING_H
#define NPUGRAD_ROUNDING_H

#include "interleave.h"

namespace npugrad {

// A product that is rounded before it is added to: keeps the compiler from fusing them.
template <typename V>
NPUGRAD_INLINE V rounded(V v) {
#if defined(__x86_64__) && defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

using Longs = Vec<int64_t, kWidth / 2>;
NPUGRAD_INLINE HalfDoubles splat_double(double value) { return value - HalfDoubles{}; }
NPUGRAD_INLINE HalfDoubles choose(Longs mask, HalfDoubles a, HalfDoubles b) { return mask ? a : b; }
NPUGRAD_INLINE HalfDoubles choose(Longs mask, double a, HalfDoubles b) { return choose(mask, splat_double(a), b); }
NPUGRAD_INLINE HalfDoubles absolute(HalfDoubles v) { return (HalfDoubles)((Longs)v & INT64_MAX); }
NPUGRAD_INLINE Floats absolute(Floats v) { return (Floats)((Ints)v & INT32_MAX); }
NPUGRAD_INLINE bool all_set(Ints mask) { return !any_set(~mask); }

// To nearest even, down, and towards zero; of doubles the first two, below 2^50.
#if defined(__AVX512F__)
template <int Mode>
NPUGRAD_INLINE Floats whole(Floats v) {
  return (Floats)_mm512_maskz_roundscale_ps(0xffff, (__m512)v, Mode | _MM_FROUND_NO_EXC);
}
template <int Mode>
NPUGRAD_INLINE HalfDoubles whole(HalfDoubles v) {
  return (HalfDoubles)_mm512_maskz_roundscale_pd(0xff, (__m512d)v, Mode | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__)
template <int Mode>
NPUGRAD_INLINE Floats whole(Floats v) {
  return (Floats)_mm256_round_ps((__m256)v, Mode | _MM_FROUND_NO_EXC);
}
template <int Mode>
NPUGRAD_INLINE HalfDoubles whole(HalfDoubles v) {
  return (HalfDoubles)_mm256_round_pd((__m256d)v, Mode | _MM_FROUND_NO_EXC);
}
#endif
#if defined(__AVX2__)
template <typename V>
NPUGRAD_INLINE V nearest_whole(V v) {
  return whole<_MM_FROUND_TO_NEAREST_INT>(v);
}
template <typename V>
NPUGRAD_INLINE V floor_whole(V v) {
  return whole<_MM_FROUND_TO_NEG_INF>(v);
}
NPUGRAD_INLINE Floats truncated(Floats v) { return whole<_MM_FROUND_TO_ZERO>(v); }
#elif defined(__aarch64__)
NPUGRAD_INLINE HalfDoubles nearest_whole(HalfDoubles v) { return (HalfDoubles)vrndnq_f64((float64x2_t)v); }
NPUGRAD_INLINE HalfDoubles floor_whole(HalfDoubles v) { return (HalfDoubles)vrndmq_f64((float64x2_t)v); }
NPUGRAD_INLINE Floats nearest_whole(Floats v) { return (Floats)vrndnq_f32((float32x4_t)v); }
NPUGRAD_INLINE Floats floor_whole(Floats v) { return (Floats)vrndmq_f32((float32x4_t)v); }
NPUGRAD_INLINE Floats truncated(Floats v) { return (Floats)vrndq_f32((float32x4_t)v); }
#else
constexpr double kWhole = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to whole numbers
NPUGRAD_INLINE HalfDoubles nearest_whole(HalfDoubles v) { return rounded(v + kWhole) - kWhole; }
NPUGRAD_INLINE HalfDoubles floor_whole(HalfDoubles v) {
  const HalfDoubles near = nearest_whole(v);
  return near - choose(near > v, 1.0, HalfDoubles{});
}
constexpr float kNoFractions = 8388608.0f;  // 2^23: from here on there are whole numbers only
NPUGRAD_INLINE Floats nearest_whole(Floats v) {
  const Words sign = (Words)v & 0x80000000u;
  const Floats near = rounded(absolute(v) + kNoFractions) - kNoFractions;
  return select(absolute(v) < kNoFractions, (Floats)((Words)near | sign), v);
}
NPUGRAD_INLINE Floats truncated(Floats v) {
  const Ints is_small = absolute(v) < kNoFractions;
  const Ints towards_zero = __builtin_convertvector(select(is_small, v, Floats{}), Ints);
  return select(is_small, __builtin_convertvector(towards_zero, Floats), v);
}
NPUGRAD_INLINE Floats floor_whole(Floats v) {
  const Floats towards_zero = truncated(v);
  return towards_zero - select(towards_zero > v, splat(1.0f), Floats{});
}
#endif

// a * b + c with one rounding. Where the variant has no such operation c must be -0.5, or the sum exact in float64.
NPUGRAD_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  HalfFloats halves[2];
#pragma GCC unroll 2
  for (int k = 0; k < 2; ++k) {
    const auto wide = [&](Floats v) { return __builtin_convertvector(half_of(v, k == 1), HalfDoubles); };
    const HalfDoubles product = wide(a) * wide(b);  // exact
    HalfDoubles sum = product + wide(c);
    // Where a float64 has no halves, the next one below rounds to float32 as the exact difference does.
    const Longs is_far = (absolute(product) >= 0x1p52) & (absolute(product) < __builtin_inf()) & (wide(c) == -0.5);
    const Longs below = (Longs)product + (product > 0.0 ? Longs{} - 1 : Longs{} + 1);
    sum = choose(is_far, (HalfDoubles)below, sum);
    halves[k] = __builtin_convertvector(sum, HalfFloats);
  }
  return joined<float, kWidth / 2>(halves[0], halves[1]);
#endif
}

}  // namespace npugrad
#endif
