// What a kernel sees of its operands: dense arrays in row-major order, whatever strides and dtypes the views
// have.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../model/memory.h"
#include "summation.h"
#include "tensor.h"

namespace cann_sim {

// An operand of a launch: a copy of its tensor, since that may be destroyed once phase 2 has returned.
struct Operand {
  std::string name;
  bool is_output = false;
  Tensor tensor;
  Access memory;  // all bytes from the first to the last element of the view
};

class KernelRun {
 public:
  KernelRun(std::string op, std::vector<Operand> operands, Summation summation)
      : summation(summation), op_(std::move(op)), operands_(std::move(operands)) {}

  // How it sums what other kernels add with atomic operations.
  const Summation summation;

  bool has(const char* name) const { return look_for(name); }
  const Shape& shape(const char* name) const { return find(name).tensor.shape; }
  int dtype(const char* name) const { return find(name).tensor.dtype; }
  int64_t elements(const char* name) const { return find(name).tensor.elements(); }

  // From now on an axis of this operand, if it is there, is its last one.
  void move_to_end(const char* name, size_t axis);

  std::vector<double> read(const char* name) const;
  std::vector<int64_t> read_integers(const char* name) const;

  // Rounds once to the dtype of the output.
  void write(const char* name, const std::vector<double>& values) const;

  // The same for an output that such kernels add into, counting on zeros; they do here if the plan says
  // accumulate=1.
  void add(const char* name, const std::vector<double>& values) const;

  // Elements as they are in memory, one behind the other.
  std::string read_bytes(const char* name) const;
  void write_bytes(const char* name, const char* bytes) const;

 private:
  const Operand* look_for(const char* name) const;
  const Operand& find(const char* name) const;

  std::string op_;
  std::vector<Operand> operands_;
};

}  // namespace cann_sim
