// Pieces of the operators' phase-1 checks.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include "../nnopbase/launch.h"

namespace cann_sim {

struct Named {
  const char* name;
  const Tensor* tensor;
};
using NamedTensors = std::vector<Named>;

// What does not hold ends phase 1 with a code and a sentence.
inline void require(bool holds, const std::string& text, int code = aclnn::kInvalid) {
  if (!holds) throw Refusal{code, text};
}

// The same of each tensor, whose name begins the sentence.
template <typename Holds>
void require_each(const NamedTensors& tensors, const char* text, Holds holds, int code = aclnn::kInvalid) {
  for (const Named& each : tensors) require(holds(*each.tensor), std::string(each.name) + text, code);
}

inline void require_given(const NamedTensors& tensors, int code = aclnn::kNullptr) {
  for (const Named& each : tensors) require(each.tensor, std::string(each.name) + " is null", code);
}

inline bool is_one_of(int dtype, std::initializer_list<int> dtypes) {
  return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

inline bool is_any_empty(const NamedTensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const Named& each) { return each.tensor->is_empty(); });
}

}  // namespace cann_sim
