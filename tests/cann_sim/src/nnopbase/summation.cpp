#include "summation.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>

namespace cann_sim {
namespace {

std::atomic<uint64_t> launches{0};

}  // namespace

Summation::Summation(bool in_order) : in_order_(in_order), launch_(++launches) {}

std::vector<size_t> Summation::order(size_t count) const {
  std::vector<size_t> parts(count);
  std::iota(parts.begin(), parts.end(), size_t{0});
  if (in_order_) return parts;
  std::minstd_rand random(static_cast<uint32_t>(launch_ * 2654435761U + 1));
  std::shuffle(parts.begin(), parts.end(), random);
  return parts;
}

}  // namespace cann_sim
