// aclnnGridSampler2DBackward. Checks in the order of the vendor's source of 2026, which takes mode 2 and
// DOUBLE.
// In libopapi_cv.
#include "checks.h"
#include "grid_sampler_kernel.h"

namespace cann_sim {
namespace {

constexpr char kOp[] = "aclnnGridSampler2DBackward";
constexpr int64_t kMaxAiCoreChannels =
    2048;  // above, and for DOUBLE, the AI CPU computes: never deterministic

struct Call {
  const Tensor *grad_output, *input, *grid;
  int64_t interpolation, padding;
  const std::vector<bool>* mask;
  const Tensor *input_grad, *grid_grad;
  bool has_results;
};

Verdict check_dtypes(const Call& call) {
  const Named others[] = {{"gradOutput", call.grad_output},
                          {"grid", call.grid},
                          {"inputGrad", call.input_grad},
                          {"gridGrad", call.grid_grad}};
  for (const Named& other : others) {
    if (other.tensor->dtype != call.input->dtype) {
      return refuse(aclnn::kInvalid, std::string(other.name) + " has not the dtype of input");
    }
  }
  const bool has_bfloat16 = product() != Product::Training;
  if (is_one_of(call.input->dtype, {kFloat, kFloat16, kDouble})) {
    return {};
  }
  if (has_bfloat16 && call.input->dtype == kBfloat16) {
    return {};
  }
  return refuse(aclnn::kInvalid, "the dtype of input is not supported");
}

Verdict check_modes(const Call& call) {
  if (call.interpolation < 0 || call.interpolation > 2) {
    return refuse(aclnn::kInvalid, "interpolationMode is not 0 to 2");
  }
  if (call.padding < 0 || call.padding > 2) return refuse(aclnn::kInvalid, "paddingMode is not 0 to 2");
  return {};
}

Verdict check_shapes(const Call& call) {
  for (const Named& named :
       {Named{"input", call.input}, {"grid", call.grid}, {"gradOutput", call.grad_output}}) {
    if (named.tensor->rank() != 4) {
      return refuse(aclnn::kInvalid, std::string(named.name) + " has not rank 4");
    }
  }
  const Shape &input = call.input->shape, &grid = call.grid->shape, &grad = call.grad_output->shape;
  if (input[0] != grid[0] || input[0] != grad[0]) {
    return refuse(aclnn::kInvalid, "N is not the same in all inputs");
  }
  if (input[1] != grad[1]) return refuse(aclnn::kInvalid, "C is not the same in input and gradOutput");
  if (!input[2] || !input[3]) return refuse(aclnn::kInvalid, "H or W of input is 0");
  if (grid[1] != grad[2] || grid[2] != grad[3]) {
    return refuse(aclnn::kInvalid, "grid and gradOutput have other points");
  }
  if (grid[3] != 2) return refuse(aclnn::kInvalid, "the last axis of grid is not 2");
  if (call.input_grad->shape != input) return refuse(aclnn::kInvalid, "inputGrad has not the shape of input");
  if (call.grid_grad->shape != grid) return refuse(aclnn::kInvalid, "gridGrad has not the shape of grid");
  if (call.mask->size() != 2) return refuse(aclnn::kInvalid, "outputMask has not two elements");
  return {};
}

Verdict check(const Call& call) {
  if (!call.has_results) return refuse(aclnn::kNullptr, "workspaceSize or executor is null");
  if (!call.mask) {
    return {aclnn::kSuccess, "", true};  // before any tensor is looked at
  }
  const Verdict nulls = check_not_null({{"gradOutput", call.grad_output},
                                        {"input", call.input},
                                        {"grid", call.grid},
                                        {"inputGrad", call.input_grad},
                                        {"gridGrad", call.grid_grad}});
  if (nulls.code) return nulls;
  for (const auto& step : {check_dtypes, check_modes, check_shapes}) {
    const Verdict verdict = step(call);
    if (verdict.code) return verdict;
  }
  const bool is_empty = call.grad_output->is_empty() || call.input->is_empty() || call.grid->is_empty();
  return {aclnn::kSuccess, "", is_empty || !((*call.mask)[0] || (*call.mask)[1])};
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

int aclnnGridSampler2DBackwardGetWorkspaceSize(const aclTensor* grad_output, const aclTensor* input,
                                               const aclTensor* grid, int64_t interpolation_mode,
                                               int64_t padding_mode, bool align_corners,
                                               const aclBoolArray* output_mask, aclTensor* input_grad,
                                               aclTensor* grid_grad, uint64_t* workspace_size,
                                               aclOpExecutor** executor) {
  PhaseOne phase(kOp);
  Call call;
  call.grad_output = phase.input("gradOutput", grad_output);
  call.input = phase.input("input", input);
  call.grid = phase.input("grid", grid);
  call.interpolation = phase.integer("interpolationMode", interpolation_mode);
  call.padding = phase.integer("paddingMode", padding_mode);
  phase.boolean("alignCorners", align_corners);
  call.mask = phase.bool_array("outputMask", output_mask);
  call.input_grad = phase.output("inputGrad", input_grad);
  call.grid_grad = phase.output("gridGrad", grid_grad);
  call.has_results = workspace_size && executor;
  const std::vector<bool> wants = call.mask && call.mask->size() == 2 ? *call.mask : std::vector<bool>(2);
  if (!wants[0]) phase.leave_unwritten("inputGrad");
  if (!wants[1]) phase.leave_unwritten("gridGrad");
  const bool is_on_ai_core = call.input && call.input->rank() == 4 && call.input->dtype != kDouble &&
                             call.input->shape[1] <= kMaxAiCoreChannels && product() != Product::Training;
  if (is_on_ai_core) phase.can_be_deterministic();
  const GridOptions options{interpolation_mode, padding_mode, align_corners, wants[0], wants[1]};
  const uint64_t scratch =
      call.input ? 4 * static_cast<uint64_t>(call.input->elements()) : 0;  // inputGrad as FLOAT
  return phase.finish([&] { return check(call); }, kSystemWorkspace + scratch,
                      [options](KernelRun& run) { grid_sampler_kernel(run, options); }, workspace_size,
                      executor);
}

int aclnnGridSampler2DBackward(void* workspace, uint64_t workspace_size, aclOpExecutor* executor,
                               void* stream) {
  return launch(kOp, workspace, workspace_size, executor, stream);
}

}  // extern "C"
