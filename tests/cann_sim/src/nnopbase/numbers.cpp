#include "numbers.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace cann_sim {
namespace {

// A small binary float: one sign bit, then exponent, then mantissa.
struct Layout {
  int mantissa_bits;
  int bias;      // of the exponent
  int infinity;  // exponent field of infinities and NaN
};

constexpr Layout kFloat16Layout{10, 15, 31};
constexpr Layout kBfloat16Layout{7, 127, 255};

double decode(uint16_t bits, const Layout& layout) {
  const int exponent = (bits & 0x7FFF) >> layout.mantissa_bits;
  const int mantissa = bits & ((1 << layout.mantissa_bits) - 1);
  double value;
  if (exponent == layout.infinity) {
    value = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - layout.bias - layout.mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << layout.mantissa_bits), exponent - layout.bias - layout.mantissa_bits);
  }
  return bits & 0x8000 ? -value : value;
}

uint16_t encode(double value, const Layout& layout) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const int infinity = layout.infinity << layout.mantissa_bits;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | infinity | (1 << (layout.mantissa_bits - 1)));
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | infinity);
  if (magnitude == 0) return static_cast<uint16_t>(sign);
  int exponent;
  std::frexp(magnitude, &exponent);
  // The unit in the last place of this value; subnormal numbers share the one of the smallest normal number.
  int ulp = exponent - 1 - layout.mantissa_bits;
  const int smallest = 1 - layout.bias - layout.mantissa_bits;
  if (ulp < smallest) ulp = smallest;
  // Exact before rounding: scaling by a power of two. nearbyint rounds to even. A carry runs into the
  // exponent field.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -ulp)));
  const int bits = ((ulp - smallest) << layout.mantissa_bits) + units;
  return static_cast<uint16_t>(sign | (bits < infinity ? bits : infinity));
}

}  // namespace

double from_float16(uint16_t bits) { return decode(bits, kFloat16Layout); }

double from_bfloat16(uint16_t bits) { return decode(bits, kBfloat16Layout); }

uint16_t to_float16(double value) { return encode(value, kFloat16Layout); }

uint16_t to_bfloat16(double value) { return encode(value, kBfloat16Layout); }

}  // namespace cann_sim
