// What phase 1 leaves for phase 2. It points to the caller's tensors and reads their addresses only in
// phase 2.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernel_run.h"
#include "recorder.h"

struct aclOpExecutor;

namespace cann_sim {

struct Context;

struct Executor {
  std::string op;
  std::shared_ptr<Context> context;
  bool sums_in_order = false;
  bool checks_workspace_size = false;
  bool skips = false;
  uint64_t workspace = 0;
  std::thread::id thread;
  std::vector<Argument> arguments;
  std::function<void(KernelRun&)> kernel;
};

aclOpExecutor* add_executor(const std::shared_ptr<Executor>& executor);

// Takes it away from the live ones: an executor serves one launch.
std::shared_ptr<Executor> consume_executor(const aclOpExecutor* handle, const char* user);

}  // namespace cann_sim
