#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace cann_sim {
namespace {

// A small binary float: one sign bit, then exponent, then mantissa.
struct Layout {
  int mantissa_bits;
  int bias;      // of the exponent
  int infinity;  // bits of infinity; NaN have more

  constexpr Layout(int mantissa, int exponent_bias)
      : mantissa_bits(mantissa), bias(exponent_bias), infinity((2 * exponent_bias + 1) << mantissa) {}
};

constexpr Layout kFloat16Layout{10, 15};
constexpr Layout kBfloat16Layout{7, 127};
constexpr int kMantissaBits = 52, kBias = 1023;  // of a double

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

double decode(uint16_t bits, const Layout& layout) {
  const int magnitude = bits & 0x7FFF;
  double value;
  if (magnitude > layout.infinity) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (magnitude == layout.infinity) {
    value = std::numeric_limits<double>::infinity();
  } else {
    // With its fields in place only the bias is another; this holds for subnormal numbers, too.
    const auto rebias = bits_as<double>(static_cast<uint64_t>(2 * kBias - layout.bias) << kMantissaBits);
    value =
        rebias * bits_as<double>(static_cast<uint64_t>(magnitude) << (kMantissaBits - layout.mantissa_bits));
  }
  return bits & 0x8000 ? -value : value;
}

uint16_t encode(double value, const Layout& layout) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) {
    return static_cast<uint16_t>(sign | layout.infinity | (1 << (layout.mantissa_bits - 1)));
  }
  const double magnitude = std::fabs(value);
  const auto power = [](int exponent) {
    return bits_as<double>(static_cast<uint64_t>(kBias + exponent) << kMantissaBits);
  };
  int64_t rounded;
  if (magnitude < power(1 - layout.bias)) {
    // Subnormal numbers share a unit in the last place: that of the double behind this power of two.
    const double shift = power(kMantissaBits + 1 - layout.bias - layout.mantissa_bits);
    rounded = bits_as<int64_t>(magnitude + shift) - bits_as<int64_t>(shift);
  } else {
    // Half a unit is added, less one bit where the last place is even; a carry runs into the exponent.
    const int dropped = kMantissaBits - layout.mantissa_bits;
    const auto all = bits_as<int64_t>(magnitude);
    const int64_t even = (all >> dropped) & 1;
    rounded = ((all + (int64_t{1} << (dropped - 1)) - 1 + even) >> dropped) -
              (static_cast<int64_t>(kBias - layout.bias) << layout.mantissa_bits);
  }
  return static_cast<uint16_t>(sign | std::min<int64_t>(rounded, layout.infinity));
}

}  // namespace

double from_float16(uint16_t bits) { return decode(bits, kFloat16Layout); }

double from_bfloat16(uint16_t bits) { return decode(bits, kBfloat16Layout); }

uint16_t to_float16(double value) { return encode(value, kFloat16Layout); }

uint16_t to_bfloat16(double value) { return encode(value, kBfloat16Layout); }

}  // namespace cann_sim
