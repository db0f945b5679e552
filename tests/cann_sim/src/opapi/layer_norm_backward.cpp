// aclnnLayerNormBackward. Checks in the order of the vendor's source; what they say, not what the document
// asks for: types of the statistics and formats are not looked at, and normalizedShape only in part.
// In libopapi_nn.
#include <numeric>

#include "checks.h"

namespace cann_sim {
namespace {

constexpr char kOp[] = "aclnnLayerNormBackward";
constexpr const char* kGradients[] = {"gradInputOut", "gradWeightOut", "gradBiasOut"};
constexpr size_t kMaxRank = 8;

struct Call {
  const Tensor *grad_out, *input, *mean, *rstd, *weight, *bias, *gradients[3];
  const Shape* normalized;
  const std::vector<bool>* mask;
  bool has_results;  // workspaceSize and executor are there

  bool wants(size_t output) const { return mask && mask->size() == 3 && (*mask)[output]; }
  std::vector<const Tensor*> inputs() const { return {grad_out, input, mean, rstd, weight, bias}; }
  int64_t more_axes() const { return input->rank() - static_cast<int64_t>(normalized->size()); }
  // Both from the axes of input, not from normalizedShape.
  int64_t rows() const { return product(0, more_axes()); }
  int64_t row_elements() const { return product(more_axes(), input->rank()); }
  int64_t product(int64_t begin, int64_t end) const {
    const auto first = input->shape.begin();
    return std::accumulate(first + begin, first + end, int64_t{1}, std::multiplies<int64_t>());
  }
};

bool is_float(const Tensor* tensor) {
  return !tensor || is_one_of(tensor->dtype, {kFloat, kFloat16, kBfloat16});
}
bool has_high_rank(const Tensor* tensor) { return tensor && tensor->shape.size() > kMaxRank; }

void check_pointers_and_dtypes(const Call& call) {
  require(call.has_results, "workspaceSize or executor is null", aclnn::kNullptr);
  require_given(
      {{"gradOut", call.grad_out}, {"input", call.input}, {"mean", call.mean}, {"rstd", call.rstd}});
  require(call.normalized && call.mask, "normalizedShape or outputMask is null", aclnn::kNullptr);
  require(call.mask->size() == 3, "outputMask has not three elements");
  for (size_t i = 0; i < 3; ++i)
    if (call.wants(i)) require_given({{kGradients[i], call.gradients[i]}});
  for (const Tensor* tensor : call.inputs())
    require(is_float(tensor), "the dtype of an input is not supported");
  require(call.grad_out->dtype == call.input->dtype, "gradOut has not the dtype of input");
  require(!call.weight || is_one_of(call.weight->dtype, {kFloat, call.input->dtype}), "the dtype of weight");
  for (const Tensor* gradient : call.gradients)  // wanted or not
    require(is_float(gradient), "the dtype of a gradient is not supported");
}

// Whether there is nothing to do.
bool check_shapes(const Call& call) {
  for (const Tensor* tensor : call.inputs())
    require(!has_high_rank(tensor), "the rank of an input is above 8");
  for (size_t i = 0; i < 3; ++i)
    require(!call.wants(i) || !has_high_rank(call.gradients[i]), "the rank of a gradient is above 8");
  const Shape &normalized = *call.normalized, &input = call.input->shape;
  require(!normalized.empty() && normalized.size() <= kMaxRank, "normalizedShape has not 1 to 8 entries");
  require(call.more_axes() >= 0, "input has fewer axes than normalizedShape has entries");
  const auto more = static_cast<size_t>(call.more_axes());
  for (size_t i = more; i < normalized.size(); ++i)  // those before: not compared
    require(normalized[i] == input[i + more], "the last axes of input are not normalizedShape");
  for (const Tensor* tensor : {call.weight, call.bias})
    require(!tensor || tensor->shape == normalized, "weight or bias has not the shape normalizedShape");
  require(call.grad_out->shape == input, "gradOut has not the shape of input");
  require(call.mean->shape == call.rstd->shape, "rstd has not the shape of mean");
  require(call.mean->elements() == call.rows(), "mean has not an element for each row");
  require(!call.wants(0) || call.gradients[0]->shape == input, "the shape of gradInputOut");
  for (size_t i = 1; i < 3; ++i)
    require(!call.wants(i) || call.gradients[i]->elements() == call.row_elements(), "elements of a gradient");
  // Without rows the sums over them are written all the same: zeros.
  const bool sums = call.row_elements() && (call.wants(1) || call.wants(2));
  return !sums && (call.input->is_empty() || !call.wants(0));
}

void kernel(const KernelRun& run, size_t rows, size_t count, const std::vector<bool>& wants) {
  const auto grad_out = run.read("gradOut"), input = run.read("input"), mean = run.read("mean"),
             rstd = run.read("rstd");
  const auto weight =
      run.has("weightOptional") ? run.read("weightOptional") : std::vector<double>(count, 1.0);
  std::vector<double> results[] = {std::vector<double>(rows * count), std::vector<double>(count), {}};
  results[2] = results[1];
  for (const size_t row : run.summation.order(rows)) {
    double first = 0, second = 0;
    const double* const grad = grad_out.data() + row * count;
    const auto normal = [&](size_t r) { return (input[row * count + r] - mean[row]) * rstd[row]; };
    for (const size_t r : run.summation.order(count)) {
      run.summation.add(results[2][r], grad[r]);
      run.summation.add(results[1][r], grad[r] * normal(r));
      run.summation.add(first, grad[r] * weight[r] / static_cast<double>(count));
      run.summation.add(second, grad[r] * weight[r] * normal(r) / static_cast<double>(count));
    }
    for (size_t r = 0; r < count; ++r)
      results[0][row * count + r] = rstd[row] * (grad[r] * weight[r] - (first + normal(r) * second));
  }
  for (size_t i = 0; i < 3; ++i)
    if (wants[i]) run.write(kGradients[i], results[i]);
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

extern "C" int aclnnLayerNormBackwardGetWorkspaceSize(const aclTensor* grad_out, const aclTensor* input,
                                                      const aclIntArray* normalized_shape,
                                                      const aclTensor* mean, const aclTensor* rstd,
                                                      const aclTensor* weight, const aclTensor* bias,
                                                      const aclBoolArray* output_mask, aclTensor* grad_input,
                                                      aclTensor* grad_weight, aclTensor* grad_bias,
                                                      uint64_t* workspace_size, aclOpExecutor** executor) {
  PhaseOne phase(kOp);
  phase.can_be_deterministic();
  Call call;
  call.grad_out = phase.input("gradOut", grad_out);
  call.input = phase.input("input", input);
  call.normalized = phase.int_array("normalizedShape", normalized_shape);
  call.mean = phase.input("mean", mean);
  call.rstd = phase.input("rstd", rstd);
  call.weight = phase.input("weightOptional", weight);
  call.bias = phase.input("biasOptional", bias);
  call.mask = phase.bool_array("outputMask", output_mask);
  aclTensor* const gradients[] = {grad_input, grad_weight, grad_bias};
  for (size_t i = 0; i < 3; ++i) call.gradients[i] = phase.output(kGradients[i], gradients[i]);
  const auto wants = phase.wants(call.mask, {kGradients[0], kGradients[1], kGradients[2]});
  call.has_results = workspace_size && executor;
  const bool is_split = call.input && call.normalized && call.more_axes() >= 0;
  const auto rows = static_cast<size_t>(is_split ? call.rows() : 0);
  const auto count = static_cast<size_t>(is_split ? call.row_elements() : 0);
  const auto check = [&] {
    check_pointers_and_dtypes(call);
    return check_shapes(call);
  };
  const uint64_t workspace =
      (product() == Product::Training ? 32 : kSystemWorkspace) + 8 * count;  // two FLOAT sums
  const auto run = [=](KernelRun& run) { kernel(run, rows, count, wants); };
  return phase.finish(check, workspace, run, workspace_size, executor);
}

extern "C" int aclnnLayerNormBackward(void* workspace, uint64_t size, aclOpExecutor* executor, void* stream) {
  return launch(kOp, workspace, size, executor, stream);
}
