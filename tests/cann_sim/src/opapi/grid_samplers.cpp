// aclnnGridSampler2DBackward and aclnnGridSampler3DBackward. Checks in the order of the vendor's sources: of
// 2026 for images, where mode 2 and DOUBLE are taken; of 9.1.0 for volumes, where every format is.
// In libopapi_cv.
#include "checks.h"
#include "grid_sampler_kernel.h"

namespace cann_sim {
namespace {

constexpr int64_t kMaxAiCoreChannels =
    2048;  // above, and for DOUBLE, the AI CPU computes: never deterministic

struct Call {
  int64_t axes;  // of an image, or of a volume
  const Tensor *grad_output, *input, *grid;
  GridOptions options{};
  const std::vector<bool>* mask;
  const Tensor *input_grad, *grid_grad;
  bool has_results;

  NamedTensors inputs() const { return {{"gradOutput", grad_output}, {"input", input}, {"grid", grid}}; }
  NamedTensors outputs() const { return {{"inputGrad", input_grad}, {"gridGrad", grid_grad}}; }
  bool is_image() const { return axes == 2; }
  bool has_rank() const { return input && input->rank() == axes + 2; }
  bool is_channels_last() const { return !is_image() && has_rank() && input->format == kNdhwc; }
  size_t channel_axis() const { return is_channels_last() ? static_cast<size_t>(axes) + 1 : 1; }
  bool is_on_ai_core() const {
    return has_rank() && input->dtype != kDouble && product() != Product::Training &&
           input->shape[channel_axis()] <= kMaxAiCoreChannels;
  }
};

void check_attributes(const Call& call) {
  const int dtype = call.input->dtype;
  for (const NamedTensors& tensors : {call.inputs(), call.outputs()})
    require_each(tensors, " has not the dtype of input",
                 [&](const Tensor& each) { return each.dtype == dtype; });
  const bool has_bfloat16 = !call.is_image() || product() != Product::Training;
  require(is_one_of(dtype, {kFloat, kFloat16, kDouble}) || (has_bfloat16 && dtype == kBfloat16),
          "the dtype of input is not supported");
  const int64_t modes = call.is_image() ? 3 : 2;
  require(call.options.interpolation >= 0 && call.options.interpolation < modes, "interpolationMode is none");
  require(call.options.padding >= 0 && call.options.padding <= 2, "paddingMode is not 0 to 2");
}

void check_shapes(const Call& call) {
  require_each(call.inputs(), " has another rank",
               [&](const Tensor& each) { return each.rank() == call.axes + 2; });
  const Shape &input = call.input->shape, &grid = call.grid->shape, &grad = call.grad_output->shape;
  const size_t channels = call.channel_axis(), first = channels == 1 ? 2 : 1;
  const auto axes = static_cast<size_t>(call.axes);
  require(input[0] == grid[0] && input[0] == grad[0], "N is not the same in all inputs");
  require(input[channels] == grad[channels], "C is not the same in input and gradOutput");
  require(!call.is_image() || (input[2] && input[3]), "H or W of input is 0");
  for (size_t axis = 0; axis < axes; ++axis)
    require(grid[1 + axis] == grad[first + axis], "grid and gradOutput have other points");
  require(grid[axes + 1] == call.axes, "the last axis of grid has another size");
  require(call.input_grad->shape == input, "inputGrad has not the shape of input");
  require(call.grid_grad->shape == grid, "gridGrad has not the shape of grid");
  require(call.mask->size() == 2, "outputMask has not two elements");
}

bool check(const Call& call) {
  require(call.has_results, "workspaceSize or executor is null", aclnn::kNullptr);
  if (!call.mask) return true;  // before any tensor is looked at
  require_given(call.inputs());
  require_given(call.outputs());
  check_attributes(call);
  check_shapes(call);
  return is_any_empty(call.inputs()) || !((*call.mask)[0] || (*call.mask)[1]);
}

int plan(const char* op, int64_t axes, const aclTensor* grad_output, const aclTensor* input,
         const aclTensor* grid, int64_t interpolation_mode, int64_t padding_mode, bool align_corners,
         const aclBoolArray* output_mask, aclTensor* input_grad, aclTensor* grid_grad,
         uint64_t* workspace_size, aclOpExecutor** executor) {
  PhaseOne phase(op);
  Call call;
  call.axes = axes;
  call.grad_output = phase.input("gradOutput", grad_output);
  call.input = phase.input("input", input);
  call.grid = phase.input("grid", grid);
  call.options.interpolation = phase.integer("interpolationMode", interpolation_mode);
  call.options.padding = phase.integer("paddingMode", padding_mode);
  call.options.align_corners = phase.boolean("alignCorners", align_corners);
  call.mask = phase.bool_array("outputMask", output_mask);
  call.input_grad = phase.output("inputGrad", input_grad);
  call.grid_grad = phase.output("gridGrad", grid_grad);
  call.has_results = workspace_size && executor;
  const auto wants = phase.wants(call.mask, {"inputGrad", "gridGrad"});
  call.options.wants_input_grad = wants[0];
  call.options.wants_grid_grad = wants[1];
  call.options.channels_last = call.is_channels_last();
  if (call.is_on_ai_core()) phase.can_be_deterministic();
  const uint64_t scratch =
      call.input ? 4 * static_cast<uint64_t>(call.input->elements()) : 0;  // inputGrad as FLOAT
  return phase.finish([&] { return check(call); }, kSystemWorkspace + scratch,
                      [options = call.options](KernelRun& run) { grid_sampler_kernel(run, options); },
                      workspace_size, executor);
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
  return plan("aclnnGridSampler2DBackward", 2, grad_output, input, grid, interpolation_mode, padding_mode,
              align_corners, output_mask, input_grad, grid_grad, workspace_size, executor);
}

int aclnnGridSampler3DBackwardGetWorkspaceSize(const aclTensor* grad_output, const aclTensor* input,
                                               const aclTensor* grid, int64_t interpolation_mode,
                                               int64_t padding_mode, bool align_corners,
                                               const aclBoolArray* output_mask, aclTensor* input_grad,
                                               aclTensor* grid_grad, uint64_t* workspace_size,
                                               aclOpExecutor** executor) {
  return plan("aclnnGridSampler3DBackward", 3, grad_output, input, grid, interpolation_mode, padding_mode,
              align_corners, output_mask, input_grad, grid_grad, workspace_size, executor);
}

int aclnnGridSampler2DBackward(void* workspace, uint64_t size, aclOpExecutor* executor, void* stream) {
  return launch("aclnnGridSampler2DBackward", workspace, size, executor, stream);
}

int aclnnGridSampler3DBackward(void* workspace, uint64_t size, aclOpExecutor* executor, void* stream) {
  return launch("aclnnGridSampler3DBackward", workspace, size, executor, stream);
}

}  // extern "C"
