// What aclCreateTensor, aclCreateScalar and the functions that create arrays make.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../model/handles.h"

struct aclTensor;
struct aclBoolArray;
struct aclIntArray;
struct aclFloatArray;
struct aclScalar;

namespace cann_sim {

enum DType {
  kFloat = 0,
  kFloat16 = 1,
  kInt8 = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 6,
  kUint16 = 7,
  kUint32 = 8,
  kInt64 = 9,
  kUint64 = 10,
  kDouble = 11,
  kBool = 12,
  kBfloat16 = 27
};
enum Format { kNchw = 0, kNhwc = 1, kNd = 2, kNdhwc = 27, kFractalNz = 29, kNcdhw = 30, kNc = 35, kNcl = 47 };

// Whether elements lie as the shape says, whatever the axes are called. torch_npu's own binding of an
// operator that wants ND hands down NCDHW for five axes, so these count as ND.
bool is_dense(int format);

// Bytes of an element; 0 for types of which no data travels.
size_t item_size(int dtype);

using Shape = std::vector<int64_t>;

struct Tensor {
  Shape shape;
  Shape strides;  // in elements
  int64_t offset = 0;
  int dtype = -1;
  int format = -1;
  Shape storage;
  void* data = nullptr;

  int64_t elements() const;
  bool is_empty() const { return elements() == 0; }
  int64_t rank() const { return static_cast<int64_t>(shape.size()); }

  // Elements of the storage that the view reaches over: from the first to behind the last one.
  int64_t first() const { return offset; }
  int64_t span() const;
};

// A number with its type.
struct Scalar {
  int dtype = -1;
  std::string bytes;

  double value() const;
};

// Live objects. Their mutex guards all tables.
struct Handles {
  std::mutex mutex;
  HandleTable<Tensor> tensors{"tensor"};
  HandleTable<std::vector<bool>> bool_arrays{"bool_array"};
  HandleTable<Shape> int_arrays{"int_array"};
  HandleTable<std::vector<float>> float_arrays{"float_array"};
  HandleTable<Scalar> scalars{"scalar"};
};

Handles& handles();

// The object of a handle; null for null. A violation if it was destroyed.
std::shared_ptr<Tensor> find_tensor(const aclTensor* handle, const char* user);
std::shared_ptr<std::vector<bool>> find_bool_array(const aclBoolArray* handle, const char* user);
std::shared_ptr<Shape> find_int_array(const aclIntArray* handle, const char* user);
std::shared_ptr<std::vector<float>> find_float_array(const aclFloatArray* handle, const char* user);
std::shared_ptr<Scalar> find_scalar(const aclScalar* handle, const char* user);

}  // namespace cann_sim
