// Pieces of the operators' phase-1 checks.
#pragma once

#include <initializer_list>
#include <string>

#include "../nnopbase/launch.h"

namespace cann_sim {

struct Named {
  const char* name;
  const Tensor* tensor;
};

// The first null tensor is reported with `code`.
inline Verdict check_not_null(std::initializer_list<Named> tensors, int code = aclnn::kNullptr) {
  for (const Named& named : tensors) {
    if (!named.tensor) return refuse(code, std::string(named.name) + " is null");
  }
  return {};
}

inline bool is_one_of(int dtype, std::initializer_list<int> dtypes) {
  for (const int candidate : dtypes) {
    if (dtype == candidate) return true;
  }
  return false;
}

}  // namespace cann_sim
