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
  NamedTensors outputs() const {
    return {{"gradInput", grad_input}, {"gradGammaOut", grad_gamma}, {"gradBetaOut", grad_beta}};
  }
  NamedTensors wanted() const {
    NamedTensors found;
    for (size_t i = 0; i < 3; ++i)
      if (wants(i)) found.push_back(outputs()[i]);
    return found;
  }
};

void check_nulls(const Call& call) {
  require(call.has_results, "workspaceSize or executor is null", aclnn::kNullptr);
  require_given(
      {{"gradOut", call.grad_out}, {"input", call.input}, {"mean", call.mean}, {"rstd", call.rstd}});
  // The source takes these for invalid, though its log says null.
  require(call.mask, "outputMask is null");
  require(call.mask->size() == 3, "outputMask has not three elements");
  require_given(call.wanted(), aclnn::kInvalid);
}

void check_dtypes(const Call& call) {
  const int dtype = call.grad_out->dtype;
  const bool has_bfloat16 = product() != Product::Training;
  require(is_one_of(dtype, {kFloat, kFloat16}) || (has_bfloat16 && dtype == kBfloat16),
          "the dtype of gradOut is not supported");
  NamedTensors others = {{"input", call.input}, {"mean", call.mean}, {"rstd", call.rstd}};
  if (call.gamma) others.push_back({"gamma", call.gamma});
  for (const NamedTensors& tensors : {others, call.wanted()})
    require_each(tensors, " has not the dtype of gradOut",
                 [&](const Tensor& each) { return each.dtype == dtype; });
}

void check_groups(const Call& call) {
  require(call.group > 0, "group is not above 0");
  require(call.c % call.group == 0, "C is not a multiple of group");
  if (product() == Product::Training) return;
  require(call.c / call.group <= kMaxGroupChannels, "a group has more than 8000 channels");
  require(call.c <= kMaxChannels, "C is above 240000");
}

void check_shapes(const Call& call) {
  require(call.grad_out->rank() <= kMaxRank, "the rank of gradOut is above 8");
  const int64_t elements = call.n * call.c * call.hxw, rows = call.n * call.group;
  require(call.grad_out->elements() == elements, "gradOut has not N*C*HxW elements");
  require(call.input->elements() == elements, "input has not N*C*HxW elements");
  require(call.mean->elements() == rows, "mean has not N*group elements");
  require(call.rstd->elements() == rows, "rstd has not N*group elements");
  require(!call.gamma || call.gamma->elements() == call.c, "gamma has not C elements");
  const Shape like_gamma = call.gamma ? call.gamma->shape : Shape{call.c};
  const Shape* const shapes[] = {&call.input->shape, &like_gamma, &like_gamma};
  for (size_t i = 0; i < 3; ++i) {
    const Named output = call.outputs()[i];
    require(!call.wants(i) || output.tensor->shape == *shapes[i],
            std::string(output.name) + " has another shape");
  }
}

bool check(const Call& call) {
  for (const auto& step : {check_nulls, check_dtypes, check_groups, check_shapes}) step(call);
  if (call.grad_out->is_empty() || call.input->is_empty() || call.wanted().empty()) return true;
  // Only products of sizes were checked so far; two negative ones get here.
  require(call.n >= 0 && call.c >= 0 && call.hxw >= 0, "a size is negative", aclnn::kInnerNullptr);
  return false;
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
  const auto wants = phase.wants(call.mask, {"gradInput", "gradGammaOut", "gradBetaOut"});
  const Sizes sizes{n, c, hxw, group};
  return phase.finish([&] { return check(call); }, workspace_bytes(sizes),
                      [sizes, wants](KernelRun& run) { kernel(run, sizes, wants); }, workspace_size,
                      executor);
}

int aclnnGroupNormBackward(void* workspace, uint64_t workspace_size, aclOpExecutor* executor, void* stream) {
  return launch(kOp, workspace, workspace_size, executor, stream);
}

}  // extern "C"
