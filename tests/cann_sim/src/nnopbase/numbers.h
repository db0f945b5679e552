// float16 and bfloat16, to and from double with one rounding to nearest even.
#pragma once

#include <cstdint>

namespace cann_sim {

double from_float16(uint16_t bits);
double from_bfloat16(uint16_t bits);
uint16_t to_float16(double value);
uint16_t to_bfloat16(double value);

}  // namespace cann_sim
