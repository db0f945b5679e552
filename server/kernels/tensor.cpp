#include <algorithm>
#include <cstring>

#include "runtime.h"

namespace npugrad {

size_t itemsize(int32_t dtype) {
  switch (dtype) {
    case NPUGRAD_INT8:
    case NPUGRAD_UINT8:
    case NPUGRAD_BOOL: return 1;
    case NPUGRAD_FLOAT16:
    case NPUGRAD_BFLOAT16:
    case NPUGRAD_INT16:
    case NPUGRAD_UINT16: return 2;
    case NPUGRAD_FLOAT32:
    case NPUGRAD_INT32:
    case NPUGRAD_UINT32: return 4;
    case NPUGRAD_FLOAT64:
    case NPUGRAD_INT64:
    case NPUGRAD_UINT64: return 8;
    default: throw Unsupported();
  }
}

bool is_float(int32_t dtype) {
  return dtype == NPUGRAD_FLOAT32 || dtype == NPUGRAD_FLOAT16 || dtype == NPUGRAD_BFLOAT16;
}

Tensor::Tensor(const npugrad_tensor* tensor) : tensor_(tensor) {
  if (!tensor) return;
  require(reinterpret_cast<uintptr_t>(tensor->data) % itemsize(tensor->dtype) == 0);
  count_ = 1;
  bool empty = false;
  for (int i = 0; i < tensor->rank; ++i) {
    require(tensor->shape[i] >= 0 && tensor->strides[i] >= 0);
    empty |= tensor->shape[i] == 0;
  }
  if (empty) {
    count_ = 0;
    return;
  }
  for (int i = tensor->rank - 1; i >= 0; --i) {
    contiguous_ &= tensor->shape[i] == 1 || tensor->strides[i] == count_;
    require(!__builtin_mul_overflow(count_, tensor->shape[i], &count_));
  }
}

namespace {

template <typename E>
void copy_strided(const char* from, int64_t stride, int64_t count, char* to) {
  const E* source = reinterpret_cast<const E*>(from);
  E* target = reinterpret_cast<E*>(to);
  for (int64_t i = 0; i < count; ++i) target[i] = source[i * stride];
}

void copy_row(const char* from, int64_t stride, int64_t count, size_t size, char* to) {
  if (stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(count) * size);
    return;
  }
  switch (size) {
    case 1: return copy_strided<uint8_t>(from, stride, count, to);
    case 2: return copy_strided<uint16_t>(from, stride, count, to);
    case 4: return copy_strided<uint32_t>(from, stride, count, to);
    default: return copy_strided<uint64_t>(from, stride, count, to);
  }
}

constexpr int kMaxRank = 64;

}  // namespace

void Tensor::gather(int64_t start, int64_t count, size_t size, void* buffer) const {
  if (count <= 0) return;
  // Axes of size 1 are left out, and neighbours that lie as one axis are taken as one.
  int64_t shape[kMaxRank], stride[kMaxRank], place[kMaxRank];
  int rank = 0;
  require(tensor_->rank <= kMaxRank);
  for (int i = 0; i < tensor_->rank; ++i) {
    if (tensor_->shape[i] == 1) continue;
    if (rank && stride[rank - 1] == tensor_->strides[i] * tensor_->shape[i]) {
      shape[rank - 1] *= tensor_->shape[i];
      stride[rank - 1] = tensor_->strides[i];
    } else {
      shape[rank] = tensor_->shape[i];
      stride[rank++] = tensor_->strides[i];
    }
  }
  if (!rank) {
    shape[0] = stride[0] = 1;
    rank = 1;
  }
  int64_t rest = start, offset = 0;
  for (int i = rank - 1; i >= 0; --i) {
    place[i] = rest % shape[i];
    rest /= shape[i];
    offset += place[i] * stride[i];
  }
  const char* data = static_cast<const char*>(tensor_->data);
  char* to = static_cast<char*>(buffer);
  const int last = rank - 1;
  for (;;) {
    const int64_t length = std::min(count, shape[last] - place[last]);
    copy_row(data + offset * static_cast<int64_t>(size), stride[last], length, size, to);
    to += length * static_cast<int64_t>(size);
    if (!(count -= length)) return;
    offset -= place[last] * stride[last];
    place[last] = 0;
    int i = last - 1;
    for (; i >= 0 && ++place[i] == shape[i]; --i) {
      offset -= (shape[i] - 1) * stride[i];
      place[i] = 0;
    }
    offset += stride[std::max(i, 0)];
  }
}

void Tensor::read(int64_t start, int64_t count, double* buffer) const {
  with_float_type(dtype(), [&](auto type) {
    using T = decltype(type);
    T part[256];
    while (count > 0) {
      const int64_t length = std::min<int64_t>(count, 256);
      const T* values = run<T>(start, length, part);
      for (int64_t i = 0; i < length; ++i) buffer[i] = to_float(values[i]);
      start += length, count -= length, buffer += length;
    }
  });
}

void Tensor::write(int64_t start, int64_t count, const double* values) const {
  with_float_type(dtype(), [&](auto type) {
    using T = decltype(type);
    T* target = data<T>() + start;
    for (int64_t i = 0; i < count; ++i) target[i] = from_double<T>(values[i]);
  });
}

void Tensor::zero() const {
  if (count_) std::memset(tensor_->data, 0, static_cast<size_t>(count_) * itemsize(dtype()));
}

}  // namespace npugrad
