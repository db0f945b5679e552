// What aclCreateTensor and aclCreateBoolArray make.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../model/handles.h"

struct aclTensor;
struct aclBoolArray;

namespace cann_sim {

enum DType {
  kFloat = 0,
  kFloat16 = 1,
  kInt32 = 3,
  kUint8 = 4,
  kInt64 = 9,
  kDouble = 11,
  kBool = 12,
  kBfloat16 = 27
};
enum Format { kNchw = 0, kNhwc = 1, kNd = 2, kNdhwc = 27, kFractalNz = 29, kNcdhw = 30, kNc = 35, kNcl = 47 };

// Whether elements lie as the shape says, whatever the axes are called. torch_npu's own binding of an
// operator that wants ND hands down NCDHW for five axes, so these count as ND.
bool is_dense(int format);

// Bytes of an element; 0 for types that no simulated operator reads.
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

// Live objects. Their mutex guards both tables.
struct Handles {
  std::mutex mutex;
  HandleTable<Tensor> tensors{"tensor"};
  HandleTable<std::vector<bool>> bool_arrays{"bool_array"};
};

Handles& handles();

// The object of a handle; null for null. A violation if it was destroyed.
std::shared_ptr<Tensor> find_tensor(const aclTensor* handle, const char* user);
std::shared_ptr<std::vector<bool>> find_bool_array(const aclBoolArray* handle, const char* user);

}  // namespace cann_sim
