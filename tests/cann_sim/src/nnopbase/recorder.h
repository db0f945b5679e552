// Writes what crosses the interface, one JSON object a line, to abi-<pid> in the report folder.
#pragma once

#include <string>
#include <vector>

#include "tensor.h"

namespace cann_sim {

struct Context;

// An argument of phase 1 and how it is written down.
struct Argument {
  std::string name;
  std::string json;
  const aclTensor* handle = nullptr;  // of tensors that are not null
  std::shared_ptr<Tensor> tensor;
  bool is_output = false;
  bool is_unwritten = false;
};

std::string json_of(const Tensor& tensor);
std::string json_of(const std::vector<bool>& values);
std::string json_of(const Shape& values);
std::string json_of(double value);
std::string json_of(const std::vector<float>& values);
std::string json_of(const Scalar& scalar);
std::string json_of(const std::string& text);
std::string json_of(const std::vector<Argument>& arguments);

// {"event": "plan", ...}: a phase 1 with all its arguments and what came of it.
void record_plan(const std::string& op, const std::vector<Argument>& arguments, int status,
                 uint64_t workspace, const void* executor, const Context* context);

// {"event": "launch", ...}: a phase 2; {"event": "run", ...}: its kernel starts.
void record_launch(const char* event, const std::string& op, const void* executor, int stream, int status,
                   const Context& context);

}  // namespace cann_sim
