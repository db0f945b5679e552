#include "kernel_run.h"

#include <algorithm>
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
    case kUint8: return store(bytes, static_cast<uint8_t>(value));
    default: violation("dtype", format("a kernel cannot write dtype %d", dtype));
  }
}

// Calls visit(its bytes, number of the element) for each element of an operand in row-major order.
template <typename Visit>
void for_each_element(const Operand& operand, const std::string& op, Visit visit) {
  const Tensor& tensor = operand.tensor;
  if (tensor.is_empty()) return;
  char* bytes = resolve(operand.memory, op);
  const auto item = static_cast<int64_t>(item_size(tensor.dtype));
  const size_t last = tensor.shape.empty() ? 0 : tensor.shape.size() - 1;
  const int64_t length = tensor.shape.empty() ? 1 : tensor.shape[last];
  const int64_t step = tensor.shape.empty() ? 0 : tensor.strides[last] * item;
  Shape index(last, 0);
  const auto elements = static_cast<size_t>(tensor.elements());
  for (size_t element = 0; element < elements;) {
    for (int64_t i = 0; i < length; ++i) visit(bytes + i * step, element++);
    for (size_t axis = last; axis-- > 0;) {
      bytes += tensor.strides[axis] * item;
      if (++index[axis] < tensor.shape[axis]) break;
      bytes -= tensor.strides[axis] * tensor.shape[axis] * item;
      index[axis] = 0;
    }
  }
}

}  // namespace

const Operand* KernelRun::look_for(const char* name) const {
  for (const Operand& operand : operands_) {
    if (operand.name == name) return &operand;
  }
  return nullptr;
}

const Operand& KernelRun::find(const char* name) const {
  if (const Operand* const found = look_for(name)) return *found;
  violation("kernel", op_ + " has no operand " + name);
}

void KernelRun::move_to_end(const char* name, size_t axis) {
  for (Operand& operand : operands_) {
    if (operand.name != name) continue;
    for (Shape* const each : {&operand.tensor.shape, &operand.tensor.strides}) {
      std::rotate(each->begin() + static_cast<int64_t>(axis), each->begin() + static_cast<int64_t>(axis) + 1,
                  each->end());
    }
  }
}

std::vector<double> KernelRun::read(const char* name) const {
  std::vector<double> values(static_cast<size_t>(elements(name)));
  const int type = dtype(name);
  for_each_element(find(name), op_, [&](const char* at, size_t i) { values[i] = load_number(at, type); });
  return values;
}

std::vector<int64_t> KernelRun::read_integers(const char* name) const {
  std::vector<int64_t> values(static_cast<size_t>(elements(name)));
  const bool is_narrow = dtype(name) == kInt32;
  for_each_element(find(name), op_, [&](const char* at, size_t i) {
    values[i] = is_narrow ? load<int32_t>(at) : load<int64_t>(at);
  });
  return values;
}

void KernelRun::write(const char* name, const std::vector<double>& values) const {
  if (values.size() != static_cast<size_t>(elements(name))) {
    violation("kernel", format("%s computed %zu elements of %s, which has %lld", op_.c_str(), values.size(),
                               name, static_cast<long long>(elements(name))));
  }
  const int type = dtype(name);
  for_each_element(find(name), op_, [&](char* at, size_t i) { store_number(at, type, values[i]); });
}

std::string KernelRun::read_bytes(const char* name) const {
  const size_t item = item_size(dtype(name));
  std::string bytes(static_cast<size_t>(elements(name)) * item, '\0');
  for_each_element(find(name), op_,
                   [&](const char* at, size_t i) { std::memcpy(&bytes[i * item], at, item); });
  return bytes;
}

void KernelRun::write_bytes(const char* name, const char* bytes) const {
  const size_t item = item_size(dtype(name));
  for_each_element(find(name), op_, [&](char* at, size_t i) { std::memcpy(at, bytes + i * item, item); });
}

void KernelRun::add(const char* name, const std::vector<double>& values) const {
  if (!settings()->accumulate) return write(name, values);
  std::vector<double> sums = read(name);
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
  write(name, sums);
}

}  // namespace cann_sim
