#include "kernel_run.h"

#include <cmath>
#include <cstring>

#include "../model/faults.h"
#include "../model/violation.h"
#include "numbers.h"

namespace cann_sim {
namespace {

template <typename T>
T load(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

template <typename T>
void store(char* bytes, T value) {
  std::memcpy(bytes, &value, sizeof value);
}

double load_number(const char* bytes, int dtype) {
  switch (dtype) {
    case kFloat: return load<float>(bytes);
    case kDouble: return load<double>(bytes);
    case kFloat16: return from_float16(load<uint16_t>(bytes));
    case kBfloat16: return from_bfloat16(load<uint16_t>(bytes));
    case kBool:
    case kUint8: return load<uint8_t>(bytes);
    case kInt32: return load<int32_t>(bytes);
    case kInt64: return static_cast<double>(load<int64_t>(bytes));
    default: violation("dtype", format("a kernel cannot read dtype %d", dtype));
  }
}

void store_number(char* bytes, int dtype, double value) {
  switch (dtype) {
    case kFloat: return store(bytes, static_cast<float>(value));
    case kDouble: return store(bytes, value);
    case kFloat16: return store(bytes, to_float16(value));
    case kBfloat16: return store(bytes, to_bfloat16(value));
    default: violation("dtype", format("a kernel cannot write dtype %d", dtype));
  }
}

// Calls visit(byte offset, number of the element) for each element of a view in row-major order.
template <typename Visit>
void for_each_element(const Tensor& tensor, Visit visit) {
  if (tensor.is_empty()) return;
  const size_t rank = tensor.shape.size();
  const auto item = static_cast<int64_t>(item_size(tensor.dtype));
  Shape index(rank, 0);
  int64_t position = 0;
  const auto elements = static_cast<size_t>(tensor.elements());
  for (size_t element = 0; element < elements; ++element) {
    visit(position * item, element);
    for (size_t axis = rank; axis-- > 0;) {
      position += tensor.strides[axis];
      if (++index[axis] < tensor.shape[axis]) break;
      position -= tensor.strides[axis] * tensor.shape[axis];
      index[axis] = 0;
    }
  }
}

}  // namespace

const Operand& KernelRun::find(const char* name) const {
  for (const Operand& operand : operands_) {
    if (operand.name == name) return operand;
  }
  violation("kernel", op_ + " has no operand " + name);
}

bool KernelRun::has(const char* name) const {
  for (const Operand& operand : operands_) {
    if (operand.name == name) return true;
  }
  return false;
}

const Shape& KernelRun::shape(const char* name) const { return find(name).tensor.shape; }

int KernelRun::dtype(const char* name) const { return find(name).tensor.dtype; }

std::vector<double> KernelRun::read(const char* name) const {
  const Operand& operand = find(name);
  const Tensor& tensor = operand.tensor;
  std::vector<double> values(static_cast<size_t>(tensor.elements()));
  if (values.empty()) return values;
  const char* const bytes = resolve(operand.memory, op_);
  for_each_element(
      tensor, [&](int64_t at, size_t element) { values[element] = load_number(bytes + at, tensor.dtype); });
  return values;
}

std::vector<int64_t> KernelRun::read_integers(const char* name) const {
  const Operand& operand = find(name);
  const Tensor& tensor = operand.tensor;
  std::vector<int64_t> values(static_cast<size_t>(tensor.elements()));
  if (values.empty()) return values;
  const char* const bytes = resolve(operand.memory, op_);
  for_each_element(tensor, [&](int64_t at, size_t element) {
    values[element] = tensor.dtype == kInt32 ? load<int32_t>(bytes + at) : load<int64_t>(bytes + at);
  });
  return values;
}

void KernelRun::write(const char* name, const std::vector<double>& values) const {
  const Operand& operand = find(name);
  const Tensor& tensor = operand.tensor;
  if (values.size() != static_cast<size_t>(tensor.elements())) {
    violation("kernel", format("%s computed %zu elements of %s, which has %lld", op_.c_str(), values.size(),
                               name, static_cast<long long>(tensor.elements())));
  }
  if (values.empty()) return;
  char* const bytes = resolve(operand.memory, op_);
  for_each_element(tensor, [&](int64_t at, size_t element) {
    store_number(bytes + at, tensor.dtype, values[element]);
  });
}

void KernelRun::add(const char* name, const std::vector<double>& values) const {
  if (!settings()->accumulate) return write(name, values);
  std::vector<double> sums = read(name);
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
  write(name, sums);
}

}  // namespace cann_sim
