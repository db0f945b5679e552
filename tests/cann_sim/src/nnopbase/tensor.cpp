#include "tensor.h"

#include <cstring>

#include "../model/api.h"
#include "../model/context.h"
#include "../model/memory.h"
#include "../model/single.h"
#include "numbers.h"

namespace cann_sim {
namespace {

constexpr uintptr_t kAlignment = 32;

// A view of device memory that an operator could work on. What depends on sizes is checked at launch: phase 1
// alone is also used to ask for the workspace, with addresses of something smaller.
void check_address(const void* data, const char* user) {
  if (!data) return;
  if (kind_of(data) != Kind::Device) {
    violation("host-pointer", format("%s: %p is no device address", user, data));
  }
  if (reinterpret_cast<uintptr_t>(data) % kAlignment) {
    violation("alignment", format("%s: %p is not a multiple of 32", user, data));
  }
  access(data, 0, false, "the tensor", user);
}

template <typename T>
T load(const std::string& bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

template <typename Object>
std::shared_ptr<Object> find(const HandleTable<Object>& table, const void* handle, const char* user) {
  if (!handle) return nullptr;
  const std::lock_guard<std::mutex> lock(handles().mutex);
  return table.get(handle, user);
}

template <typename Object>
void* keep(const char* user, HandleTable<Object>& table, Object object) {
  if (!enter_pointer(user)) return nullptr;
  const std::lock_guard<std::mutex> lock(handles().mutex);
  return table.add(std::make_shared<Object>(std::move(object)));
}

template <typename Object>
int destroy(const char* user, HandleTable<Object>& table, const void* handle) {
  if (const int code = enter(user)) return code;
  const std::lock_guard<std::mutex> lock(handles().mutex);
  if (handle) table.remove(handle, user);
  return 0;
}

}  // namespace

size_t item_size(int dtype) {
  switch (dtype) {
    case kInt8:
    case kUint8:
    case kBool: return 1;
    case kInt16:
    case kUint16:
    case kFloat16:
    case kBfloat16: return 2;
    case kFloat:
    case kInt32:
    case kUint32: return 4;
    case kInt64:
    case kUint64:
    case kDouble: return 8;
    default: return 0;
  }
}

bool is_dense(int format) {
  for (const int dense : {kNchw, kNhwc, kNd, kNdhwc, kNcdhw, kNc, kNcl}) {
    if (format == dense) return true;
  }
  return false;
}

int64_t Tensor::elements() const {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

int64_t Tensor::span() const {
  if (is_empty()) return 0;
  int64_t last = 0;
  for (size_t axis = 0; axis < shape.size(); ++axis) last += (shape[axis] - 1) * strides[axis];
  return last + 1;
}

double Scalar::value() const {
  switch (dtype) {
    case kDouble: return load<double>(bytes);
    case kFloat: return load<float>(bytes);
    case kFloat16: return from_float16(load<uint16_t>(bytes));
    case kBfloat16: return from_bfloat16(load<uint16_t>(bytes));
    default: violation("dtype", format("an operator cannot read a scalar of dtype %d", dtype));
  }
}

Handles& handles() { return single<Handles>(); }

std::shared_ptr<Tensor> find_tensor(const aclTensor* handle, const char* user) {
  return find(handles().tensors, handle, user);
}

std::shared_ptr<std::vector<bool>> find_bool_array(const aclBoolArray* handle, const char* user) {
  return find(handles().bool_arrays, handle, user);
}

std::shared_ptr<Shape> find_int_array(const aclIntArray* handle, const char* user) {
  return find(handles().int_arrays, handle, user);
}

std::shared_ptr<std::vector<float>> find_float_array(const aclFloatArray* handle, const char* user) {
  return find(handles().float_arrays, handle, user);
}

std::shared_ptr<Scalar> find_scalar(const aclScalar* handle, const char* user) {
  return find(handles().scalars, handle, user);
}

}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

aclTensor* aclCreateTensor(const int64_t* shape, uint64_t rank, int dtype, const int64_t* strides,
                           int64_t offset, int storage_format, const int64_t* storage, uint64_t storage_rank,
                           void* data) {
  const char* const user = "aclCreateTensor";
  if (!enter_pointer(user)) return nullptr;
  auto tensor = std::make_shared<Tensor>();
  tensor->shape.assign(shape, shape + rank);
  tensor->dtype = dtype;
  tensor->offset = offset;
  tensor->format = storage_format;
  tensor->storage.assign(storage, storage + storage_rank);
  tensor->data = data;
  for (const int64_t size : tensor->shape) {
    if (size >= 0) continue;
    add_message(user, "a size is negative");
    return nullptr;
  }
  tensor->strides.resize(rank);
  int64_t step = 1;  // without strides the view is row-major
  for (size_t axis = rank; axis-- > 0; step *= tensor->shape[axis]) {
    tensor->strides[axis] = strides ? strides[axis] : step;
  }
  for (const int64_t stride : tensor->strides) {
    if (stride < 0) violation("strides", format("%s: a stride is negative", user));
  }
  check_address(data, user);
  const std::lock_guard<std::mutex> lock(handles().mutex);
  return static_cast<aclTensor*>(handles().tensors.add(tensor));
}

int aclDestroyTensor(const aclTensor* handle) {
  return destroy("aclDestroyTensor", handles().tensors, handle);
}

aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return static_cast<aclBoolArray*>(
      keep("aclCreateBoolArray", handles().bool_arrays, std::vector<bool>(values, values + size)));
}

int aclDestroyBoolArray(const aclBoolArray* handle) {
  return destroy("aclDestroyBoolArray", handles().bool_arrays, handle);
}

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return static_cast<aclIntArray*>(
      keep("aclCreateIntArray", handles().int_arrays, Shape(values, values + size)));
}

int aclDestroyIntArray(const aclIntArray* handle) {
  return destroy("aclDestroyIntArray", handles().int_arrays, handle);
}

aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return static_cast<aclFloatArray*>(
      keep("aclCreateFloatArray", handles().float_arrays, std::vector<float>(values, values + size)));
}

int aclDestroyFloatArray(const aclFloatArray* handle) {
  return destroy("aclDestroyFloatArray", handles().float_arrays, handle);
}

aclScalar* aclCreateScalar(void* value, int dtype) {
  const char* const bytes = static_cast<const char*>(value);
  return static_cast<aclScalar*>(
      keep("aclCreateScalar", handles().scalars, Scalar{dtype, std::string(bytes, item_size(dtype))}));
}

int aclDestroyScalar(const aclScalar* handle) {
  return destroy("aclDestroyScalar", handles().scalars, handle);
}

}  // extern "C"
