// aclnnSynthetic, which no vendor has: an attribute of every kind. tests/synthetic/record.py says what it is.
// In libopapi_nn.
#include <cstring>

#include "checks.h"

namespace cann_sim {
namespace {

constexpr char kOp[] = "aclnnSynthetic";

// What the operator saw, in the order of the signature.
class Seen {
 public:
  template <typename T>
  void plain(T value) {
    append(&value, sizeof value);
  }
  template <typename T>
  void array(const std::vector<T>* values) {
    plain<uint8_t>(values != nullptr);
    if (!values) return;
    plain<uint64_t>(values->size());
    for (const T value : *values) plain<T>(value);
  }
  void scalar(const Scalar* scalar) {
    plain<uint8_t>(scalar != nullptr);
    if (!scalar) return;
    plain(static_cast<uint8_t>(scalar->dtype));
    append(scalar->bytes.data(), scalar->bytes.size());
  }
  void text(const std::string* text) {
    plain<uint8_t>(text != nullptr);
    if (!text) return;
    plain<uint64_t>(text->size());
    append(text->data(), text->size());
  }

  const std::vector<double>& bytes() const { return bytes_; }

 private:
  void append(const void* data, size_t size) {
    const auto* const first = static_cast<const uint8_t*>(data);
    bytes_.insert(bytes_.end(), first, first + size);
  }

  std::vector<double> bytes_;
};

struct Call {
  const Tensor* input;
  int64_t count;
  const Shape* sizes;
  const std::vector<float>* weights;
  const std::vector<bool>* mask;
  const Scalar* alpha;
  const std::string* mode;
  const Tensor *scaled, *seen;
  Seen bytes;

  bool wants(size_t output) const { return mask && mask->size() == 2 && (*mask)[output]; }
};

bool check(const Call& call) {
  const std::pair<const char*, const void*> needed[] = {{"input", call.input},     {"sizes", call.sizes},
                                                        {"weights", call.weights}, {"outputMask", call.mask},
                                                        {"alpha", call.alpha},     {"mode", call.mode}};
  for (const auto& [name, value] : needed) require(value, std::string(name) + " is null", aclnn::kNullptr);
  require(call.mask->size() == 2, "outputMask has not two elements");
  if (call.wants(0)) require_given({{"scaled", call.scaled}});
  if (call.wants(1)) require_given({{"seen", call.seen}});
  require(is_one_of(call.input->dtype, {kFloat, kFloat16}), "the dtype of input");
  require(call.count > 0, "count is not above 0");
  require(*call.sizes == call.input->shape, "sizes is not the shape of input");
  require(is_one_of(call.alpha->dtype, {kFloat, kFloat16, kBfloat16, kDouble}), "the dtype of alpha");
  require(*call.mode == "sum" || *call.mode == "mean", "mode is not known");
  if (call.wants(0)) {
    require(call.scaled->dtype == call.input->dtype, "the dtype of scaled");
    require(call.scaled->shape == call.input->shape, "the shape of scaled");
  }
  if (call.wants(1)) {
    require(call.seen->dtype == kUint8, "the dtype of seen");
    const auto size = static_cast<int64_t>(call.bytes.bytes().size());
    require(call.seen->shape == Shape{size}, "the shape of seen");
  }
  return !call.wants(0) && !call.wants(1);
}

// (input + sum or mean) x factor, into scaled.
void scale(const KernelRun& run, bool is_mean, double factor) {
  auto values = run.read("input");
  double added = 0;
  for (const size_t at : run.summation.order(values.size())) run.summation.add(added, values[at]);
  if (is_mean) added /= static_cast<double>(values.size());
  for (double& value : values) value = (value + added) * factor;
  run.write("scaled", values);
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

int aclnnSyntheticGetWorkspaceSize(const aclTensor* input, int64_t count, int step, int8_t level,
                                   uint64_t seed, double factor, float ratio, bool flag, const aclIntArray* sizes,
                                   const aclIntArray* sizes_optional, const aclFloatArray* weights,
                                   const aclFloatArray* weights_optional, const aclBoolArray* output_mask,
                                   const aclBoolArray* mask_optional, const aclScalar* alpha,
                                   const aclScalar* alpha_optional, char* mode, char* mode_optional,
                                   aclTensor* scaled, aclTensor* seen, uint64_t* workspace_size,
                                   aclOpExecutor** executor) {
  PhaseOne phase(kOp);
  phase.can_be_deterministic();
  Call call;
  Seen& bytes = call.bytes;
  call.input = phase.input("input", input);
  bytes.plain(call.count = phase.integer("count", count));
  bytes.plain(static_cast<int32_t>(phase.integer("step", step)));
  bytes.plain(static_cast<int8_t>(phase.integer("level", level)));
  bytes.plain(phase.natural("seed", seed));
  bytes.plain(phase.real("factor", factor));
  bytes.plain(static_cast<float>(phase.real("ratio", ratio)));
  bytes.plain(phase.boolean("flag", flag));
  bytes.array(call.sizes = phase.int_array("sizes", sizes));
  bytes.array(phase.int_array("sizesOptional", sizes_optional));
  bytes.array(call.weights = phase.float_array("weights", weights));
  bytes.array(phase.float_array("weightsOptional", weights_optional));
  bytes.array(call.mask = phase.bool_array("outputMask", output_mask));
  bytes.array(phase.bool_array("maskOptional", mask_optional));
  bytes.scalar(call.alpha = phase.scalar("alpha", alpha));
  bytes.scalar(phase.scalar("alphaOptional", alpha_optional));
  bytes.text(call.mode = phase.text("mode", mode));
  bytes.text(phase.text("modeOptional", mode_optional));
  call.scaled = phase.output("scaled", scaled);
  call.seen = phase.output("seen", seen);
  // By value: arrays, scalars and strings are gone when the kernel runs.
  const auto wants = phase.wants(call.mask, {"scaled", "seen"});
  const bool is_mean = call.mode && *call.mode == "mean";
  const Scalar number = call.alpha ? *call.alpha : Scalar{};
  return phase.finish([&] { return check(call); }, kSystemWorkspace,
                      [=, found = bytes.bytes()](KernelRun& run) {
                        if (wants[0]) scale(run, is_mean, factor * number.value());
                        if (wants[1]) run.write("seen", found);
                      },
                      workspace_size, executor);
}

int aclnnSynthetic(void* workspace, uint64_t workspace_size, aclOpExecutor* executor, void* stream) {
  return launch(kOp, workspace, workspace_size, executor, stream);
}

}  // extern "C"
