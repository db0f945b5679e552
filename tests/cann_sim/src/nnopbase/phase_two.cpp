// Phase 2: operands are looked at as a device would, and the kernel is queued.
#include <cstring>

#include "../model/api.h"
#include "../model/context.h"
#include "../model/counters.h"
#include "../model/faults.h"
#include "../model/single.h"
#include "../model/stream.h"
#include "../model/violation.h"
#include "executor.h"
#include "launch.h"
#include "recorder.h"

namespace cann_sim {
namespace {

constexpr size_t kBlock = 32;        // the device moves memory in blocks of 32 bytes
constexpr size_t kPadding = 32;      // and CANN asks for that much behind every tensor
constexpr size_t kScribble = 65536;  // of the workspace, at both ends
constexpr char kScribbleByte = static_cast<char>(0xA7);

struct Board {
  std::mutex mutex;
  HandleTable<Executor> executors{"executor"};
};

Board& board() { return single<Board>(); }

int64_t product_of(const Shape& sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

Operand make_operand(const Argument& argument, const Executor& executor) {
  const char* const op = executor.op.c_str();
  {
    const std::lock_guard<std::mutex> lock(handles().mutex);
    if (!handles().tensors.has(argument.handle)) {
      violation("destroyed-before-launch",
                format("%s: %s was destroyed before phase 2", op, argument.name.c_str()));
    }
  }
  const Tensor& tensor = *argument.tensor;
  Operand operand{argument.name, argument.is_output && !argument.is_unwritten, tensor, {}};
  if (tensor.is_empty()) return operand;
  if (!tensor.data) {
    violation("null-data", format("%s: %s has elements but no address", op, argument.name.c_str()));
  }
  if (tensor.first() + tensor.span() > product_of(tensor.storage)) {
    violation("storage", format("%s: the view of %s reaches element %lld, its storage has %lld", op,
                                argument.name.c_str(), static_cast<long long>(tensor.first() + tensor.span()),
                                static_cast<long long>(product_of(tensor.storage))));
  }
  const size_t item = item_size(tensor.dtype);
  operand.memory = access(static_cast<char*>(tensor.data) + static_cast<size_t>(tensor.first()) * item,
                          static_cast<size_t>(tensor.span()) * item, operand.is_output, argument.name, op);
  if (operand.memory.allocation->device != executor.context->device) {
    violation("wrong-device", format("%s: %s is on device %d, the context on %d", op, argument.name.c_str(),
                                     operand.memory.allocation->device, executor.context->device));
  }
  return operand;
}

// An output must not share bytes with anything else of the launch, and nothing may begin in the padding
// behind it.
void check_overlap(const std::vector<Access>& uses, const char* op) {
  for (const Access& output : uses) {
    if (!output.write) continue;
    for (const Access& other : uses) {
      if (&other == &output || !other.bytes || !output.bytes) continue;
      if (output.overlaps(other)) {
        violation("overlap",
                  format("%s: %s and %s share memory", op, output.what.c_str(), other.what.c_str()));
      }
      const uintptr_t end = (output.begin + output.bytes + kBlock - 1) / kBlock * kBlock + kPadding;
      if (other.begin >= output.begin && other.begin < end) {
        violation("padding", format("%s: %s begins in the 32 bytes behind %s", op, other.what.c_str(),
                                    output.what.c_str()));
      }
    }
  }
}

// Whatever lies in the workspace is lost, so nothing else may lie there.
void scribble(const Access& workspace, const std::string& op) {
  if (!workspace.bytes) return;
  char* const bytes = resolve(workspace, op);
  const size_t part = std::min(workspace.bytes, kScribble);
  std::memset(bytes, kScribbleByte, part);
  std::memset(bytes + workspace.bytes - part, kScribbleByte, part);
}

std::shared_ptr<Task> make_task(const std::shared_ptr<Executor>& executor, const void* handle, int stream,
                                void* workspace) {
  auto task = std::make_shared<Task>();
  task->kind = TaskKind::Kernel;
  task->name = executor->op;
  std::vector<Operand> operands;
  for (const Argument& argument : executor->arguments) {
    if (!argument.handle) continue;
    operands.push_back(make_operand(argument, *executor));
    const Operand& made = operands.back();
    if (made.memory.bytes && !argument.is_unwritten) task->accesses.push_back(made.memory);
  }
  Access scratch;
  if (executor->workspace) {
    scratch = access(workspace, executor->workspace, true, "the workspace", executor->op.c_str());
    task->accesses.push_back(scratch);
  }
  check_overlap(task->accesses, executor->op.c_str());
  std::string& failure = task->failure;  // the task has the function
  task->run = [executor, operands, scratch, handle, stream, &failure] {
    record_launch("run", executor->op, handle, stream, 0, *executor->context);
    scribble(scratch, executor->op);
    KernelRun run(executor->op, operands, Summation(executor->sums_in_order));
    try {
      executor->kernel(run);
    } catch (const Refusal& refusal) {
      failure = executor->op + ": " + refusal.text;
      return refusal.code;
    }
    count("kernels." + executor->op);
    return 0;
  };
  return task;
}

int check_call(const Executor& executor, void* workspace, uint64_t workspace_size, const char* op) {
  if (executor.op != op) {
    violation("wrong-executor", format("%s was given the executor of %s", op, executor.op.c_str()));
  }
  if (settings()->strict_threads && executor.thread != std::this_thread::get_id()) {
    violation("wrong-thread", format("%s: phase 1 ran on another thread", op));
  }
  if (workspace_size && !workspace) return aclnn::kNullptr;
  if (workspace_size >= executor.workspace) return aclnn::kSuccess;
  if (executor.checks_workspace_size) return aclnn::kInvalid;
  violation("workspace", format("%s: %llu bytes of workspace, phase 1 asked for %llu", op,
                                static_cast<unsigned long long>(workspace_size),
                                static_cast<unsigned long long>(executor.workspace)));
}

int fail(const char* op, int code, const std::string& text) {
  add_message(op, format("%s (error code %d)", text.c_str(), code));
  return code;
}

int queue(const char* op, const std::shared_ptr<Executor>& executor, const aclOpExecutor* handle,
          void* workspace, uint64_t workspace_size, void* stream_handle) {
  if (const int code = check_call(*executor, workspace, workspace_size, op)) {
    return fail(op, code, "the workspace is null or too small");
  }
  int code = 0;
  const auto stream = find_stream(stream_handle, op, &code);
  if (!stream) return code;
  if (stream->context != executor->context) {
    violation("wrong-device", format("%s: phase 1 ran in another context", op));
  }
  if (executor->skips) return aclnn::kSuccess;
  const auto task = make_task(executor, handle, stream->number, workspace);
  code = submit(stream, task, op);
  record_launch("launch", op, handle, stream->number, code, *executor->context);
  return code;
}

}  // namespace

aclOpExecutor* add_executor(const std::shared_ptr<Executor>& executor) {
  {
    const std::lock_guard<std::mutex> lock(model_mutex());
    ++executor->context->open_executors;
  }
  const std::lock_guard<std::mutex> lock(board().mutex);
  return static_cast<aclOpExecutor*>(board().executors.add(executor));
}

std::shared_ptr<Executor> consume_executor(const aclOpExecutor* handle, const char* user) {
  std::shared_ptr<Executor> executor;
  {
    const std::lock_guard<std::mutex> lock(board().mutex);
    if (!board().executors.has(handle) && is_handle(reinterpret_cast<uintptr_t>(handle))) {
      violation("executor-reused", format("%s: executor %p was used up or destroyed before", user, handle));
    }
    executor = board().executors.remove(handle, user);
  }
  const std::lock_guard<std::mutex> lock(model_mutex());
  --executor->context->open_executors;
  return executor;
}

int launch(const char* op, void* workspace, uint64_t workspace_size, aclOpExecutor* handle, void* stream) {
  const int injected = enter(op);
  if (!handle) return injected ? injected : fail(op, aclnn::kNullptr, "the executor is null");
  // Gone on success and on failure.
  const auto executor = consume_executor(handle, op);
  if (!injected) return queue(op, executor, handle, workspace, workspace_size, stream);
  record_launch("launch", op, handle, -1, injected, *executor->context);
  return injected;
}

}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

int aclDestroyAclOpExecutor(aclOpExecutor* handle) {
  if (const int code = enter("aclDestroyAclOpExecutor")) return code;
  if (handle) consume_executor(handle, "aclDestroyAclOpExecutor");
  return 0;
}

}  // extern "C"
