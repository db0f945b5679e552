// aclnnGroupNormBackward. Checks in the order of the vendor's source; what they say, not what the document
// asks for.
// In libopapi_nn.
#include "checks.h"

namespace cann_sim {
namespace {

constexpr char kOp[] = "aclnnGroupNormBackward";
constexpr int64_t kMaxRank = 8;
constexpr int64_t kMaxGroupChannels = 8000;
constexpr int64_t kMaxChannels = 240000;

struct Call {
  const Tensor *grad_out, *input, *mean, *rstd, *gamma;
  int64_t n, c, hxw, group;
  const std::vector<bool>* mask;
  const Tensor *grad_input, *grad_gamma, *grad_beta;
  bool has_results;  // workspaceSize and executor are there

  bool wants(size_t output) const { return (*mask)[output]; }
  bool wants_any() const { return wants(0) || wants(1) || wants(2); }
};

Verdict check_nulls(const Call& call) {
  if (!call.has_results) return refuse(aclnn::kNullptr, "workspaceSize or executor is null");
  const Verdict inputs = check_not_null(
      {{"gradOut", call.grad_out}, {"input", call.input}, {"mean", call.mean}, {"rstd", call.rstd}});
  if (inputs.code) return inputs;
  // The source takes these for invalid, though its log says null.
  if (!call.mask) return refuse(aclnn::kInvalid, "outputMask is null");
  if (call.mask->size() != 3) return refuse(aclnn::kInvalid, "outputMask has not three elements");
  if (call.wants(0) && !call.grad_input) return refuse(aclnn::kInvalid, "gradInput is null");
  if (call.wants(1) && !call.grad_gamma) return refuse(aclnn::kInvalid, "gradGammaOut is null");
  if (call.wants(2) && !call.grad_beta) return refuse(aclnn::kInvalid, "gradBetaOut is null");
  return {};
}

Verdict check_dtypes(const Call& call) {
  const int dtype = call.grad_out->dtype;
  const bool has_bfloat16 = product() != Product::Training;
  if (!is_one_of(dtype, {kFloat, kFloat16}) && !(has_bfloat16 && dtype == kBfloat16)) {
    return refuse(aclnn::kInvalid, "the dtype of gradOut is not supported");
  }
  const Named others[] = {{"input", call.input},
                          {"mean", call.mean},
                          {"rstd", call.rstd},
                          {"gamma", call.gamma},
                          {"gradInput", call.wants(0) ? call.grad_input : nullptr},
                          {"gradGammaOut", call.wants(1) ? call.grad_gamma : nullptr},
                          {"gradBetaOut", call.wants(2) ? call.grad_beta : nullptr}};
  for (const Named& other : others) {
    if (other.tensor && other.tensor->dtype != dtype) {
      return refuse(aclnn::kInvalid, std::string(other.name) + " has not the dtype of gradOut");
    }
  }
  return {};
}

Verdict check_groups(const Call& call) {
  if (call.group <= 0) return refuse(aclnn::kInvalid, "group is not above 0");
  if (call.c % call.group) return refuse(aclnn::kInvalid, "C is not a multiple of group");
  if (product() == Product::Training) {
    return {};
  }
  if (call.c / call.group > kMaxGroupChannels) {
    return refuse(aclnn::kInvalid, "a group has more than 8000 channels");
  }
  if (call.c > kMaxChannels) return refuse(aclnn::kInvalid, "C is above 240000");
  return {};
}

Verdict check_shapes(const Call& call) {
  if (call.grad_out->rank() > kMaxRank) return refuse(aclnn::kInvalid, "the rank of gradOut is above 8");
  const int64_t elements = call.n * call.c * call.hxw;
  if (call.grad_out->elements() != elements) {
    return refuse(aclnn::kInvalid, "gradOut has not N*C*HxW elements");
  }
  if (call.input->elements() != elements) return refuse(aclnn::kInvalid, "input has not N*C*HxW elements");
  if (call.mean->elements() != call.n * call.group) {
    return refuse(aclnn::kInvalid, "mean has not N*group elements");
  }
  if (call.rstd->elements() != call.n * call.group) {
    return refuse(aclnn::kInvalid, "rstd has not N*group elements");
  }
  if (call.gamma && call.gamma->elements() != call.c) {
    return refuse(aclnn::kInvalid, "gamma has not C elements");
  }
  const Shape like_gamma = call.gamma ? call.gamma->shape : Shape{call.c};
  if (call.wants(0) && call.grad_input->shape != call.input->shape) {
    return refuse(aclnn::kInvalid, "gradInput has not the shape of input");
  }
  if (call.wants(1) && call.grad_gamma->shape != like_gamma) {
    return refuse(aclnn::kInvalid, "gradGammaOut has not the shape of gamma");
  }
  if (call.wants(2) && call.grad_beta->shape != like_gamma) {
    return refuse(aclnn::kInvalid, "gradBetaOut has not the shape of gamma");
  }
  return {};
}

Verdict check(const Call& call) {
  for (const auto& step : {check_nulls, check_dtypes, check_groups, check_shapes}) {
    const Verdict verdict = step(call);
    if (verdict.code) return verdict;
  }
  if (call.grad_out->is_empty() || call.input->is_empty() || !call.wants_any()) {
    return {aclnn::kSuccess, "", true};
  }
  // Only products of sizes were checked so far; two negative ones get here.
  if (call.n < 0 || call.c < 0 || call.hxw < 0) return refuse(aclnn::kInnerNullptr, "a size is negative");
  return {};
}

struct Sizes {
  int64_t n, c, hxw, group;
};

void kernel(const KernelRun& run, const Sizes& sizes, const std::vector<bool>& wants) {
  const auto grad_out = run.read("gradOut"), input = run.read("input"), mean = run.read("mean"),
             rstd = run.read("rstd");
  const auto c = static_cast<size_t>(sizes.c), pixels = static_cast<size_t>(sizes.hxw);
  const auto groups = static_cast<size_t>(sizes.group), samples = static_cast<size_t>(sizes.n);
  const auto gamma = run.has("gamma") ? run.read("gamma") : std::vector<double>(c, 1.0);
  const size_t group_channels = c / groups;
  const auto group_elements = static_cast<double>(group_channels * pixels);
  std::vector<double> grad_input(grad_out.size()), grad_gamma(c), grad_beta(c);
  const Summation& summation = run.summation;
  for (const size_t row : summation.order(samples * groups)) {  // a group of a sample
    const size_t first_channel = row % groups * group_channels;
    const size_t first = row * group_channels * pixels;
    const auto normalized = [&](size_t at) { return (input[at] - mean[row]) * rstd[row]; };
    double sum = 0, product_sum = 0;
    for (const size_t element : summation.order(group_channels * pixels)) {
      const size_t at = first + element, channel = first_channel + element / pixels;
      const double product = grad_out[at] * normalized(at);
      summation.add(grad_beta[channel], grad_out[at]);
      summation.add(grad_gamma[channel], product);
      summation.add(sum, grad_out[at] * gamma[channel]);
      summation.add(product_sum, product * gamma[channel]);
    }
    for (size_t at = first; at < first + group_channels * pixels; ++at) {
      const double weighted = grad_out[at] * gamma[first_channel + (at - first) / pixels];
      grad_input[at] =
          rstd[row] * (weighted - sum / group_elements - normalized(at) * (product_sum / group_elements));
    }
  }
  if (wants[0]) run.write("gradInput", grad_input);
  if (wants[1]) run.write("gradGammaOut", grad_gamma);
  if (wants[2]) run.write("gradBetaOut", grad_beta);
}

uint64_t workspace_bytes(const Sizes& sizes) {
  if (product() == Product::Training) return 32 + 8 * static_cast<uint64_t>(sizes.n * sizes.c);
  return kSystemWorkspace + 8 * static_cast<uint64_t>(sizes.n * sizes.c);  // two FLOAT sums for each channel
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

int aclnnGroupNormBackwardGetWorkspaceSize(const aclTensor* grad_out, const aclTensor* input,
                                           const aclTensor* mean, const aclTensor* rstd,
                                           const aclTensor* gamma, int64_t n, int64_t c, int64_t hxw,
                                           int64_t group, const aclBoolArray* output_mask,
                                           aclTensor* grad_input, aclTensor* grad_gamma, aclTensor* grad_beta,
                                           uint64_t* workspace_size, aclOpExecutor** executor) {
  PhaseOne phase(kOp);
  phase.can_be_deterministic();
  Call call;
  call.grad_out = phase.input("gradOut", grad_out);
  call.input = phase.input("input", input);
  call.mean = phase.input("mean", mean);
  call.rstd = phase.input("rstd", rstd);
  call.gamma = phase.input("gamma", gamma);
  call.n = phase.integer("N", n);
  call.c = phase.integer("C", c);
  call.hxw = phase.integer("HxW", hxw);
  call.group = phase.integer("group", group);
  call.mask = phase.bool_array("outputMask", output_mask);
  call.grad_input = phase.output("gradInput", grad_input);
  call.grad_gamma = phase.output("gradGammaOut", grad_gamma);
  call.grad_beta = phase.output("gradBetaOut", grad_beta);
  call.has_results = workspace_size && executor;
  const std::vector<bool> wants = call.mask && call.mask->size() == 3 ? *call.mask : std::vector<bool>(3);
  const char* const outputs[] = {"gradInput", "gradGammaOut", "gradBetaOut"};
  for (size_t i = 0; i < 3; ++i) {
    if (!wants[i]) phase.leave_unwritten(outputs[i]);
  }
  const Sizes sizes{n, c, hxw, group};
  return phase.finish([&] { return check(call); }, workspace_bytes(sizes),
                      [sizes, wants](KernelRun& run) { kernel(run, sizes, wants); }, workspace_size,
                      executor);
}

int aclnnGroupNormBackward(void* workspace, uint64_t workspace_size, aclOpExecutor* executor, void* stream) {
  return launch(kOp, workspace, workspace_size, executor, stream);
}

}  // extern "C"
