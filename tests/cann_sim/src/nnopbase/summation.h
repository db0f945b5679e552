// How a kernel sums: deterministic kernels in one order, the others as their cores come along.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cann_sim {

class Summation {
 public:
  // Without `in_order` this launch has an order of its own, which only the number of launches before decides.
  explicit Summation(bool in_order);

  // The order in which `count` parts come.
  std::vector<size_t> order(size_t count) const;

  // Adds a term: in double, which rounds away what the order makes, or in float as atomic additions do.
  void add(double& sum, double term) const {
    sum = in_order_ ? sum + term : static_cast<double>(static_cast<float>(sum) + static_cast<float>(term));
  }

  // Adds a multiple of a row to another one.
  void add(double* sums, double factor, const double* row, size_t count) const {
#pragma GCC ivdep
    for (size_t i = 0; i < count; ++i) add(sums[i], factor * row[i]);
  }

  // The same order, but without rounding to float.
  Summation in_double() const {
    Summation made = *this;
    made.in_order_ = true;
    return made;
  }

  // What the order of this launch is drawn from; 0 in order.
  uint64_t seed() const { return in_order_ ? 0 : launch_; }

 private:
  bool in_order_;
  uint64_t launch_;
};

}  // namespace cann_sim
