// The two phases of an aclnn call, as every operator goes through them.
//
// Phase 1 names its arguments one by one to a PhaseOne, in the order of the C signature (the recorder writes
// them down), runs its checks, and finishes with a kernel. Phase 2 is the same for all operators.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernel_run.h"
#include "recorder.h"
#include "tensor.h"

struct aclOpExecutor;

namespace cann_sim {

struct Context;
struct Executor;

namespace aclnn {
constexpr int kSuccess = 0;
constexpr int kNullptr = 161001;
constexpr int kInvalid = 161002;
constexpr int kInner = 561000;
constexpr int kTiling = 561002;
constexpr int kFindKernel = 561003;
constexpr int kInnerNullptr = 561103;
}  // namespace aclnn

// What a check throws where a call is illegal.
struct Refusal {
  int code;
  std::string text;
};

enum class Product { Training, A2, A3 };
Product product();  // from the SoC name

// Workspace of the AI Core libraries themselves on A2 and A3; operators add their own.
constexpr uint64_t kSystemWorkspace = uint64_t{16} << 20;

class PhaseOne {
 public:
  // Injects what the fault plan says of phase 1.
  explicit PhaseOne(const char* op);
  ~PhaseOne();
  PhaseOne(const PhaseOne&) = delete;
  PhaseOne& operator=(const PhaseOne&) = delete;

  // Arguments, in the order of the C signature. Null handles give null pointers.
  const Tensor* input(const char* name, const aclTensor* handle);
  const Tensor* output(const char* name, const aclTensor* handle);
  const std::vector<bool>* bool_array(const char* name, const aclBoolArray* handle);
  const Shape* int_array(const char* name, const aclIntArray* handle);
  const std::vector<float>* float_array(const char* name, const aclFloatArray* handle);
  const Scalar* scalar(const char* name, const aclScalar* handle);
  const std::string* text(const char* name, const char* value);
  int64_t integer(const char* name, int64_t value);
  uint64_t natural(const char* name, uint64_t value);
  double real(const char* name, double value);
  bool boolean(const char* name, bool value);

  // Which outputs are wanted: none where there is no mask, or one of another length. The others are not
  // written, though their tensors may be there.
  std::vector<bool> wants(const std::vector<bool>* mask, const std::vector<const char*>& outputs);
  // The operator gives the same bits each time under the deterministic option.
  void can_be_deterministic() { honours_option_ = true; }
  void checks_workspace_size() { checks_workspace_size_ = true; }
  // Whoever calls gets an executor to destroy also when the checks refuse: generated interfaces make it
  // first.
  void makes_executor_first() { makes_executor_first_ = true; }

  // Makes the executor, or reports the error. `check` throws a refusal; true of a legal call that computes
  // nothing and wants no workspace. It is not asked when the fault plan had its say.
  int finish(const std::function<bool()>& check, uint64_t workspace, std::function<void(KernelRun&)> kernel,
             uint64_t* workspace_size, aclOpExecutor** executor);

 protected:
  const std::vector<Argument>& arguments() const { return arguments_; }

 private:
  Argument& add(const char* name);
  template <typename Object>
  const Object* keep(const char* name, const std::shared_ptr<Object>& object);
  std::shared_ptr<Executor> make_executor(const std::shared_ptr<Context>& context) const;

  std::string op_;
  int injected_;
  bool honours_option_ = false;
  bool checks_workspace_size_ = false;
  bool makes_executor_first_ = false;
  std::vector<Argument> arguments_;
  std::vector<std::shared_ptr<void>> kept_;
};

// Phase 2 of `op`.
int launch(const char* op, void* workspace, uint64_t workspace_size, aclOpExecutor* executor, void* stream);

}  // namespace cann_sim
