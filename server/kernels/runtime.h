// What an operator's kernel is written with: the call's operands, its tasks, scratch memory.
#ifndef NPUGRAD_RUNTIME_H
#define NPUGRAD_RUNTIME_H

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "abi.h"
#include "pool.h"
#include "scratch.h"
#include "simd.h"

namespace npugrad {

// Thrown by a kernel before it writes anything.
struct Unsupported : std::exception {};
struct Invalid : std::exception {};

inline void require(bool holds) {
  if (!holds) throw Invalid();
}

// A product of sizes that must fit 63 bits.
inline int64_t product(std::initializer_list<int64_t> sizes) {
  int64_t found = 1;
  bool overflow = false, empty = false;
  for (int64_t size : sizes) {
    require(size >= 0);
    empty |= size == 0;
    overflow |= __builtin_mul_overflow(found, size, &found);
  }
  require(empty || !overflow);
  return empty ? 0 : found;
}

// A tensor of the call. Its elements are counted in row-major order of its shape, whatever its strides.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(const npugrad_tensor* tensor);

  bool given() const { return tensor_ != nullptr; }
  int32_t dtype() const { return tensor_->dtype; }
  int32_t rank() const { return tensor_->rank; }
  int64_t shape(int i) const { return tensor_->shape[i]; }
  int64_t stride(int i) const { return tensor_->strides[i]; }
  int64_t count() const { return count_; }
  bool contiguous() const { return contiguous_; }
  template <typename T>
  T* data() const {
    return static_cast<T*>(tensor_->data);
  }

  // The run of `count` elements from `start` on: in place if the tensor is contiguous, else gathered into `buffer`.
  template <typename T>
  const T* run(int64_t start, int64_t count, T* buffer) const {
    if (contiguous_) return data<const T>() + start;
    gather(start, count, sizeof(T), buffer);
    return buffer;
  }
  // The same, converted to float64; for float32, float16 and bfloat16.
  void read(int64_t start, int64_t count, double* buffer) const;
  // Rounds float64 values into the elements of a contiguous tensor from `start` on.
  void write(int64_t start, int64_t count, const double* values) const;
  void zero() const;

 private:
  void gather(int64_t start, int64_t count, size_t itemsize, void* buffer) const;

  const npugrad_tensor* tensor_ = nullptr;
  int64_t count_ = 0;
  bool contiguous_ = true;
};

size_t itemsize(int32_t dtype);  // throws Unsupported for one that no kernel takes
bool is_float(int32_t dtype);    // float32, float16 or bfloat16

// Calls body(T{}) with the type of a dtype: float, float16 or bfloat16.
template <typename Body>
void with_float_type(int32_t dtype, Body&& body) {
  switch (dtype) {
    case NPUGRAD_FLOAT32: return body(float{});
    case NPUGRAD_FLOAT16: return body(float16{});
    case NPUGRAD_BFLOAT16: return body(bfloat16{});
    default: throw Unsupported();
  }
}

// One call in progress.
class Call {
 public:
  Call(Pool& pool, Scratch& scratch, const npugrad_call& call, bool float64_coordinates)
      : pool_(pool), scratch_(scratch), call_(call), poll_(call.poll, call.user),
        float64_coordinates_(float64_coordinates) {}

  Tensor tensor(int index) const {
    require(index < call_.tensor_count);
    return Tensor(call_.tensors[index]);
  }
  int64_t integer(int index) const {
    require(index < call_.integer_count);
    return call_.integers[index];
  }
  double real(int index) const {
    require(index < call_.real_count);
    return call_.reals[index];
  }
  bool boolean(int index) const {
    require(index < call_.bool_count);
    return call_.bools[index] != 0;
  }

  bool float64_coordinates() const { return float64_coordinates_; }
  // How many tasks run at once. Nothing that a result depends on may follow from it.
  int threads() const { return pool_.threads(); }
  // See Pool::run.
  template <typename Body>
  void parallel(int64_t tasks, const Body& body) {
    pool_.run(tasks, poll_, std::function<void(int64_t, int)>(std::cref(body)));
  }
  template <typename T>
  Buffer<T> scratch(int64_t count) {
    return Buffer<T>(scratch_, count);
  }

 private:
  Pool& pool_;
  Scratch& scratch_;
  const npugrad_call& call_;
  Poll poll_;
  const bool float64_coordinates_;
};

// Runs a kernel and turns what it throws into a status; no exception may cross the C interface.
int32_t guarded(npugrad_context* context, const npugrad_call* call, void (*kernel)(Call&));

constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Part `index` of a range that is cut into parts of `size`.
struct Span {
  int64_t begin, end;
  Span(int64_t index, int64_t size, int64_t total)
      : begin(index * size), end(total - begin < size ? total : begin + size) {}
  int64_t size() const { return end - begin; }
};

}  // namespace npugrad
#endif
