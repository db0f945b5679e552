// Vectors of the variant's native width, and conversions between the floating-point types.
//
// Written with the vector extensions of GCC and Clang: + - * / and comparisons are elementwise. Intrinsics only where
// those have no word for it. A multiplication whose result is added becomes one fused operation where the variant has
// it (-ffp-contract=fast), so variants differ in last bits; each one repeats its own.
#ifndef NPUGRAD_SIMD_H
#define NPUGRAD_SIMD_H

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define NPUGRAD_INLINE inline __attribute__((always_inline))

namespace npugrad {

#if defined(__AVX512F__)
constexpr const char* kVariant = "avx512";
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr const char* kVariant = "avx2";
constexpr int kWidth = 8;
#elif defined(__aarch64__)
constexpr const char* kVariant = "neon";
constexpr int kWidth = 4;
#else
constexpr const char* kVariant = "baseline";
constexpr int kWidth = 4;
#endif

// Vectors of N elements; N is a power of 2. The kernels mostly take the native width, kWidth floats.
template <typename T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
  typedef T unaligned __attribute__((vector_size(N * sizeof(T)), aligned(1), may_alias));
};
template <typename T, int N>
using Vec = typename VectorOf<T, N>::type;

using Floats = Vec<float, kWidth>;
using Ints = Vec<int32_t, kWidth>;
using Words = Vec<uint32_t, kWidth>;
using Halves = Vec<uint16_t, kWidth>;
using Doubles = Vec<double, kWidth>;           // as many as floats: two registers
using HalfDoubles = Vec<double, kWidth / 2>;   // one register
using HalfFloats = Vec<float, kWidth / 2>;

// 16-bit floating-point types as they lie in memory.
struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

template <typename To, typename From>
NPUGRAD_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename T>
NPUGRAD_INLINE Vec<T, kWidth> load_raw(const void* p) {
  return *static_cast<const typename VectorOf<T, kWidth>::unaligned*>(p);
}
template <typename T>
NPUGRAD_INLINE void store_raw(void* p, Vec<T, kWidth> v) {
  *static_cast<typename VectorOf<T, kWidth>::unaligned*>(p) = v;
}
NPUGRAD_INLINE Floats splat(float value) { return value - Floats{}; }
NPUGRAD_INLINE Words splat(uint32_t value) { return value - Words{}; }

// Lane by lane a where the mask is all ones, b where it is all zeros; comparisons make such masks.
NPUGRAD_INLINE Words select(Ints mask, Words a, Words b) { return mask ? a : b; }
NPUGRAD_INLINE Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }

// ---------------------------------------------------------------------------------- conversions of 16-bit types
//
// Rounding is to nearest even, overflow gives infinity, subnormals are kept. A NaN stays one: its sign and the upper
// bits of its payload are kept and the quiet bit is set, as hardware does.

NPUGRAD_INLINE Floats floats_of_bfloat16(Halves h) { return (Floats)(__builtin_convertvector(h, Words) << 16); }

NPUGRAD_INLINE Halves bfloat16_of_floats(Floats f) {
  const Words x = (Words)f;
  const Words rounded = (x + 0x7fffu + ((x >> 16) & 1u)) >> 16;
  const Words quiet = (x >> 16) | 0x40u;
  return __builtin_convertvector(select(f != f, quiet, rounded), Halves);
}

// In integer arithmetic, for variants without such instructions; every variant has it, for tests.
NPUGRAD_INLINE Floats floats_of_float16_bits(Halves h) {
  const Words w = __builtin_convertvector(h, Words);
  const Words sign = (w & 0x8000u) << 16, shifted = (w & 0x7fffu) << 13;
  const Words normal = shifted + (112u << 23);
  // All ones in the exponent stay so; the quiet bit is set where the mantissa is not 0.
  const Words special = (shifted + (224u << 23)) | ((Words)((shifted & 0x007fffffu) > 0u) & 0x00400000u);
  // A subnormal is its mantissa times 2^-24: put it into a number with exponent 2^-14 and subtract that.
  const Words subnormal = (Words)((Floats)(shifted + (113u << 23)) - (Floats)splat(113u << 23));
  Words found = select(shifted >= (0x7c00u << 13), special, normal);
  found = select(shifted < (0x0400u << 13), subnormal, found);
  return (Floats)(found | sign);
}

NPUGRAD_INLINE Halves float16_of_floats_bits(Floats f) {
  const Words x = (Words)f, sign = (x >> 16) & 0x8000u, abs = x & 0x7fffffffu;
  const Words normal = (abs - (112u << 23) + 0x0fffu + ((abs >> 13) & 1u)) >> 13;
  // Adding 0.5 leaves the subnormal's bits, rounded to nearest even, at the low end of the mantissa.
  const Words subnormal = (Words)((Floats)abs + 0.5f) - 0x3f000000u;
  Words found = select(abs < (113u << 23), subnormal, normal);
  found = select(abs >= 0x477ff000u, splat(0x7c00u), found);  // 65520 and above round to infinity
  found = select(abs > 0x7f800000u, ((abs >> 13) & 0x03ffu) | 0x7e00u, found);
  return __builtin_convertvector(found | sign, Halves);
}

#if defined(__AVX512F__)
// Masked forms: the plain ones make GCC warn of a value that it leaves undefined on purpose.
NPUGRAD_INLINE Floats floats_of_float16(Halves h) { return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h); }
NPUGRAD_INLINE Halves float16_of_floats(Floats f) {
  return (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
NPUGRAD_INLINE Floats floats_of_float16(Halves h) { return (Floats)_mm256_cvtph_ps((__m128i)h); }
NPUGRAD_INLINE Halves float16_of_floats(Floats f) {
  return (Halves)_mm256_cvtps_ph((__m256)f, _MM_FROUND_TO_NEAREST_INT);
}
#elif defined(__aarch64__)
NPUGRAD_INLINE Floats floats_of_float16(Halves h) {
  return (Floats)vcvt_f32_f16(bit_cast<float16x4_t>(h));
}
NPUGRAD_INLINE Halves float16_of_floats(Floats f) {
  return bit_cast<Halves>(vcvt_f16_f32((float32x4_t)f));
}
#else
NPUGRAD_INLINE Floats floats_of_float16(Halves h) { return floats_of_float16_bits(h); }
NPUGRAD_INLINE Halves float16_of_floats(Floats f) { return float16_of_floats_bits(f); }
#endif

// ------------------------------------------------------------------------------------------- loads and stores
//
// Of float, float16 and bfloat16 as float vectors, at any address. `_part` takes the first n < kWidth elements, touches
// no others, and reads the rest as 0.

NPUGRAD_INLINE Floats load(const float* p) { return load_raw<float>(p); }
NPUGRAD_INLINE Floats load(const float16* p) { return floats_of_float16(load_raw<uint16_t>(p)); }
NPUGRAD_INLINE Floats load(const bfloat16* p) { return floats_of_bfloat16(load_raw<uint16_t>(p)); }

NPUGRAD_INLINE void store(float* p, Floats v) { store_raw<float>(p, v); }
NPUGRAD_INLINE void store(float16* p, Floats v) { store_raw<uint16_t>(p, float16_of_floats(v)); }
NPUGRAD_INLINE void store(bfloat16* p, Floats v) { store_raw<uint16_t>(p, bfloat16_of_floats(v)); }

#if defined(__AVX512F__)
NPUGRAD_INLINE Floats load_part(const float* p, int64_t n) {
  return (Floats)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}
NPUGRAD_INLINE void store_part(float* p, Floats v, int64_t n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
}
NPUGRAD_INLINE Halves load_halves_part(const void* p, int64_t n) {
  return (Halves)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
}
NPUGRAD_INLINE void store_halves_part(void* p, Halves v, int64_t n) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << n) - 1), (__m256i)v);
}
#else
template <typename V, typename E>
NPUGRAD_INLINE V load_elements(const E* p, int64_t n) {
  E lanes[kWidth] = {};
  for (int i = 0; i < kWidth - 1; ++i)
    if (i < n) lanes[i] = p[i];
  V found;
  std::memcpy(&found, lanes, sizeof found);
  return found;
}
template <typename V, typename E>
NPUGRAD_INLINE void store_elements(E* p, V v, int64_t n) {
  E lanes[kWidth];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int i = 0; i < kWidth - 1; ++i)
    if (i < n) p[i] = lanes[i];
}
NPUGRAD_INLINE Floats load_part(const float* p, int64_t n) { return load_elements<Floats>(p, n); }
NPUGRAD_INLINE void store_part(float* p, Floats v, int64_t n) { store_elements(p, v, n); }
NPUGRAD_INLINE Halves load_halves_part(const void* p, int64_t n) {
  return load_elements<Halves>(static_cast<const uint16_t*>(p), n);
}
NPUGRAD_INLINE void store_halves_part(void* p, Halves v, int64_t n) {
  store_elements(static_cast<uint16_t*>(p), v, n);
}
#endif
NPUGRAD_INLINE Floats load_part(const float16* p, int64_t n) { return floats_of_float16(load_halves_part(p, n)); }
NPUGRAD_INLINE Floats load_part(const bfloat16* p, int64_t n) { return floats_of_bfloat16(load_halves_part(p, n)); }
NPUGRAD_INLINE void store_part(float16* p, Floats v, int64_t n) { store_halves_part(p, float16_of_floats(v), n); }
NPUGRAD_INLINE void store_part(bfloat16* p, Floats v, int64_t n) { store_halves_part(p, bfloat16_of_floats(v), n); }

// ------------------------------------------------------------------------------------------ non-temporal stores
//
// Past the cache: they spare reading what is overwritten, and evict nothing. `p` is aligned to one whole vector of its
// type, which `aligned_start` helps to reach. A task that streams ends with `stream_fence`.

#if defined(__x86_64__)
template <int Bytes, typename V>
NPUGRAD_INLINE void stream_raw(void* p, V v) {
  if constexpr (Bytes == 8) {
    _mm_stream_si64(static_cast<long long*>(p), bit_cast<long long>(v));
  } else if constexpr (Bytes == 16) {
    _mm_stream_si128(static_cast<__m128i*>(p), bit_cast<__m128i>(v));
  }
#if defined(__AVX2__)
  if constexpr (Bytes == 32) _mm256_stream_si256(static_cast<__m256i*>(p), bit_cast<__m256i>(v));
#endif
#if defined(__AVX512F__)
  if constexpr (Bytes == 64) _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bit_cast<__m512i>(v));
#endif
}
NPUGRAD_INLINE void stream(float* p, Floats v) { stream_raw<sizeof v>(p, v); }
NPUGRAD_INLINE void stream(float16* p, Floats v) { stream_raw<sizeof(Halves)>(p, float16_of_floats(v)); }
NPUGRAD_INLINE void stream(bfloat16* p, Floats v) { stream_raw<sizeof(Halves)>(p, bfloat16_of_floats(v)); }
NPUGRAD_INLINE void stream_fence() { _mm_sfence(); }
#else
template <typename T>
NPUGRAD_INLINE void stream(T* p, Floats v) {
  store(p, v);
}
NPUGRAD_INLINE void stream_fence() {}
#endif

// Elements before the first one that `stream` may begin at.
template <typename T>
NPUGRAD_INLINE int64_t aligned_start(const T* p) {
  const uintptr_t bytes = kWidth * sizeof(T);
  return static_cast<int64_t>((bytes - reinterpret_cast<uintptr_t>(p) % bytes) % bytes / sizeof(T));
}

// ---------------------------------------------------------------------------------------------- reductions

// In a fixed order, in float64: halves are added as vectors until two lanes are left.
template <int N>
NPUGRAD_INLINE double sum_doubles(Vec<double, N> v) {
  if constexpr (N == 2) {
    return v[0] + v[1];
  } else {
    Vec<double, N / 2> halves[2];
    std::memcpy(halves, &v, sizeof v);
    return sum_doubles<N / 2>(halves[0] + halves[1]);
  }
}
NPUGRAD_INLINE double sum(Floats v) { return sum_doubles<kWidth>(__builtin_convertvector(v, Doubles)); }
NPUGRAD_INLINE bool all_finite(Floats v) {
  // x - x is 0 for finite numbers, and NaN for others.
  const double bad = sum(v - v);
  return bad == 0;
}

// Whether any lane of a mask is set.
NPUGRAD_INLINE bool any_set(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#elif defined(__x86_64__)
  return _mm_movemask_epi8((__m128i)mask) != 0;
#elif defined(__aarch64__)
  return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
  bool found = false;
  for (int i = 0; i < kWidth; ++i) found |= mask[i] != 0;
  return found;
#endif
}

// ------------------------------------------------------------------------------------------- single elements

NPUGRAD_INLINE float to_float(float v) { return v; }
NPUGRAD_INLINE float to_float(bfloat16 v) { return bit_cast<float>(static_cast<uint32_t>(v.bits) << 16); }
NPUGRAD_INLINE float to_float(float16 v) { return load_part(&v, 1)[0]; }

template <typename T>
NPUGRAD_INLINE T from_float(float v) {
  if constexpr (sizeof(T) == sizeof v) return v;  // reading back part of a vector waits until it is written
  T found;
  store_part(&found, splat(v), 1);
  return found;
}

// float64 rounded once: by way of a float32 that keeps in its last bit whether anything was lost.
template <typename T>
NPUGRAD_INLINE T from_double(double v) {
  float narrow = static_cast<float>(v);
  if constexpr (sizeof(T) == 2) {
    const double back = narrow;
    if (back != v && back - back == 0.0) {
      uint32_t bits = bit_cast<uint32_t>(narrow);
      if ((back < 0 ? -back : back) > (v < 0 ? -v : v)) --bits;
      narrow = bit_cast<float>(bits | 1u);
    }
  }
  return from_float<T>(narrow);
}

}  // namespace npugrad
#endif
