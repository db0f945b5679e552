// Phase 1: arguments, checks, executor.
#include <cstring>

#include "../model/api.h"
#include "../model/context.h"
#include "../model/counters.h"
#include "../model/faults.h"
#include "../model/stream.h"
#include "../model/violation.h"
#include "executor.h"
#include "launch.h"
#include "recorder.h"

namespace cann_sim {

Product product() {
  const std::string& soc = settings()->soc;
  if (soc.rfind("Ascend910_93", 0) == 0) return Product::A3;
  const std::string a2 = "Ascend910B";  // with a digit behind it: the bare name is of the first generation
  return soc.rfind(a2, 0) == 0 && soc.size() > a2.size() ? Product::A2 : Product::Training;
}

PhaseOne::PhaseOne(const char* op) : op_(op), injected_(enter((op_ + "GetWorkspaceSize").c_str())) {
  const auto context = this_thread().context;
  if (context && !injected_) injected_ = check_failure(*context, op, true);
}

PhaseOne::~PhaseOne() = default;

Argument& PhaseOne::add(const char* name) {
  arguments_.emplace_back();
  arguments_.back().name = name;
  return arguments_.back();
}

const Tensor* PhaseOne::input(const char* name, const aclTensor* handle) {
  Argument& argument = add(name);
  argument.tensor = find_tensor(handle, op_.c_str());
  argument.handle = handle;
  argument.json = handle ? json_of(*argument.tensor) : "null";
  return argument.tensor.get();
}

const Tensor* PhaseOne::output(const char* name, const aclTensor* handle) {
  const Tensor* tensor = input(name, handle);
  arguments_.back().is_output = true;
  return tensor;
}

template <typename Object>
const Object* PhaseOne::keep(const char* name, const std::shared_ptr<Object>& object) {
  add(name).json = object ? json_of(*object) : "null";
  kept_.push_back(object);
  return object.get();
}

const std::vector<bool>* PhaseOne::bool_array(const char* name, const aclBoolArray* handle) {
  return keep(name, find_bool_array(handle, op_.c_str()));
}

const Shape* PhaseOne::int_array(const char* name, const aclIntArray* handle) {
  return keep(name, find_int_array(handle, op_.c_str()));
}

const std::vector<float>* PhaseOne::float_array(const char* name, const aclFloatArray* handle) {
  return keep(name, find_float_array(handle, op_.c_str()));
}

const Scalar* PhaseOne::scalar(const char* name, const aclScalar* handle) {
  return keep(name, find_scalar(handle, op_.c_str()));
}

const std::string* PhaseOne::text(const char* name, const char* value) {
  return keep(name, value ? std::make_shared<std::string>(value) : nullptr);
}

uint64_t PhaseOne::natural(const char* name, uint64_t value) {
  add(name).json = std::to_string(value);
  return value;
}

int64_t PhaseOne::integer(const char* name, int64_t value) {
  add(name).json = std::to_string(value);
  return value;
}

double PhaseOne::real(const char* name, double value) {
  add(name).json = json_of(value);
  return value;
}

bool PhaseOne::boolean(const char* name, bool value) {
  add(name).json = value ? "true" : "false";
  return value;
}

std::vector<bool> PhaseOne::wants(const std::vector<bool>* mask, const std::vector<const char*>& outputs) {
  const bool fits = mask && mask->size() == outputs.size();
  const std::vector<bool> wanted = fits ? *mask : std::vector<bool>(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (Argument& argument : arguments_) argument.is_unwritten |= argument.name == outputs[i] && !wanted[i];
  }
  return wanted;
}

std::shared_ptr<Executor> PhaseOne::make_executor(const std::shared_ptr<Context>& context) const {
  auto made = std::make_shared<Executor>();
  made->op = op_;
  made->context = context;
  made->checks_workspace_size = checks_workspace_size_;
  made->thread = std::this_thread::get_id();
  made->arguments = arguments_;
  return made;
}

int PhaseOne::finish(const std::function<bool()>& check, uint64_t workspace,
                     std::function<void(KernelRun&)> kernel, uint64_t* workspace_size,
                     aclOpExecutor** executor) {
  const auto context = this_thread().context;
  bool skips = false;
  int code = injected_;
  try {
    if (!code) skips = check();
  } catch (const Refusal& refusal) {
    code = refusal.code;
    add_message(op_.c_str(), format("%s (error code %d)", refusal.text.c_str(), code));
  }
  if (code) {
    if (makes_executor_first_ && executor) *executor = add_executor(make_executor(context));
    count("plans.refused");
    record_plan(op_, arguments_, code, 0, nullptr, context.get());
    return code;
  }
  if (!context) violation("no-context", op_ + ": phase 1 without a device");
  const auto made = make_executor(context);
  load_kernel(*context);
  made->sums_in_order = settings()->ordered_sums || (honours_option_ && plans_deterministic(*context));
  made->skips = skips;
  made->workspace = skips ? 0 : workspace + (static_cast<uint64_t>(settings()->workspace_mb) << 20);
  made->kernel = std::move(kernel);
  *workspace_size = made->workspace;
  *executor = add_executor(made);
  count("plans." + op_);
  record_plan(op_, arguments_, aclnn::kSuccess, made->workspace, *executor, context.get());
  return aclnn::kSuccess;
}

}  // namespace cann_sim
