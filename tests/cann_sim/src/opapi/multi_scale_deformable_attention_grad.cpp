// aclnnMultiScaleDeformableAttentionGrad. Checks in the order of the vendor's source of 2026; gradOutput has
// rank 3.
// In libopapi_nn.
#include <cmath>

#include "../model/api.h"
#include "../model/violation.h"
#include "checks.h"

namespace cann_sim {
namespace {

constexpr char kOp[] = "aclnnMultiScaleDeformableAttentionGrad";

struct Call {
  const Tensor *value, *spatial_shape, *level_start_index, *location, *attn_weight, *grad_output;
  const Tensor *grad_value, *grad_location, *grad_attn_weight;

  NamedTensors tables() const {
    return {{"spatialShape", spatial_shape}, {"levelStartIndex", level_start_index}};
  }
  NamedTensors floats() const {
    return {
        {"value", value}, {"location", location}, {"attnWeight", attn_weight}, {"gradOutput", grad_output}};
  }
  NamedTensors outputs() const {
    return {{"gradValue", grad_value}, {"gradLocation", grad_location}, {"gradAttnWeight", grad_attn_weight}};
  }
};

void check_dtypes_and_formats(const Call& call) {
  const auto is_float = [](const Tensor& each) {
    return is_one_of(each.dtype, {kFloat, kFloat16, kBfloat16});
  };
  const char* const unsupported = " has a dtype that is not supported";
  for (const NamedTensors& tensors : {call.floats(), call.outputs()})  // each on its own: they may differ
    require_each(tensors, unsupported, is_float);
  require_each(call.tables(), unsupported,
               [](const Tensor& each) { return is_one_of(each.dtype, {kInt32, kInt64}); });
  for (const NamedTensors& tensors : {call.floats(), call.tables()})
    require_each(tensors, " is FRACTAL_NZ", [](const Tensor& each) { return each.format != kFractalNz; });
}

void check_ranks(const Call& call) {
  const auto has = [](const Tensor* tensor, int64_t rank) { return tensor->rank() == rank; };
  require(has(call.value, 4), "value has not rank 4");
  require(has(call.spatial_shape, 2) && call.spatial_shape->shape[1] == 2, "spatialShape is not (levels, 2)");
  require(has(call.level_start_index, 1), "levelStartIndex has not rank 1");
  require(has(call.location, 6) && call.location->shape[5] == 2,
          "location has not rank 6 with a last axis of 2");
  require(has(call.attn_weight, 5), "attnWeight has not rank 5");
  require(has(call.grad_output, 3), "gradOutput has not rank 3");
}

void check_limits(const Call& call) {
  const int64_t channels = call.value->shape[3];
  require(channels % 8 == 0 && channels <= 256, "channels is no multiple of 8 up to 256");
  require(call.location->shape[1] < 500000, "num_queries is not below 500000");
  require(call.spatial_shape->shape[0] <= 16, "num_levels is above 16");
  require(call.value->shape[2] <= 16, "num_heads is above 16");
  require(call.location->shape[4] <= 16, "num_points is above 16");
}

void check_shared_sizes(const Call& call) {
  const Shape &value = call.value->shape, &location = call.location->shape;
  const int64_t levels = call.spatial_shape->shape[0];
  const Shape points = {value[0], location[1], value[2], levels, location[4]};
  require(call.level_start_index->shape[0] == levels, "levelStartIndex has other levels");
  require(Shape(location.begin(), location.end() - 1) == points, "location has other sizes");
  require(call.attn_weight->shape == points, "attnWeight has other sizes");
  require(call.grad_output->shape == Shape{value[0], location[1], value[2] * value[3]},
          "gradOutput has other sizes");
  require(call.grad_value->shape == value, "gradValue has not the shape of value");
  require(call.grad_location->shape == location, "gradLocation has not the shape of location");
  require(call.grad_attn_weight->shape == points, "gradAttnWeight has not the shape of attnWeight");
}

bool check(const Call& call) {
  for (const NamedTensors& tensors : {call.floats(), call.tables(), call.outputs()}) require_given(tensors);
  for (const auto& step : {check_dtypes_and_formats, check_ranks, check_limits, check_shared_sizes})
    step(call);
  if (is_any_empty(call.floats()) || is_any_empty(call.tables())) return true;
  // No check of the product: its kernel is simply not there.
  require(product() != Product::Training, "there is no kernel for this product", aclnn::kInnerNullptr);
  return false;
}

struct Gradients {
  std::vector<double> value, location, attn_weight;
};

// One level as the caller describes it. The device believes it; the simulator looks before it leaves the
// tensor.
struct Level {
  int64_t height, width, start;
};

class Sampler {
 public:
  explicit Sampler(const KernelRun& run)
      : shape_(run.shape("value")),
        value_(run.read("value")),
        grad_output_(run.read("gradOutput")),
        gradients_{std::vector<double>(value_.size()),
                   std::vector<double>(static_cast<size_t>(run.elements("location"))),
                   std::vector<double>(static_cast<size_t>(run.elements("attnWeight")))},
        summation_(run.summation) {}

  // Row of value at a pixel, for one batch and head.
  size_t row(int64_t batch, int64_t head, const Level& level, int64_t y, int64_t x) const {
    const int64_t key = level.start + y * level.width + x;
    if (key < 0 || key >= shape_[1]) {
      violation("unsafe-levels", format("%s: a level reaches key %lld of %lld", kOp,
                                        static_cast<long long>(key), static_cast<long long>(shape_[1])));
    }
    return static_cast<size_t>(((batch * shape_[1] + key) * shape_[2] + head) * shape_[3]);
  }

  // Adds the gradients of one sampling point, whose gradient of the output begins at `grad_row`.
  void add_point(size_t point, int64_t batch, int64_t head, size_t grad_row, const Level& level, double x,
                 double y, double weight) {
    const double column = pixel(x, level.width), line = pixel(y, level.height);
    double by_weight = 0, by_x = 0, by_y = 0;
    const bool is_near = line > -1 && column > -1 && line < static_cast<double>(level.height) &&
                         column < static_cast<double>(level.width);
    if (is_near) {
      const double y0 = std::floor(line), x0 = std::floor(column);
      for (int corner = 0; corner < 4; ++corner) {
        const int down = corner / 2, right = corner % 2;
        const auto at_y = static_cast<int64_t>(y0) + down, at_x = static_cast<int64_t>(x0) + right;
        if (at_y < 0 || at_x < 0 || at_y >= level.height || at_x >= level.width) continue;
        const double share_y = down ? line - y0 : 1 - (line - y0),
                     share_x = right ? column - x0 : 1 - (column - x0);
        const size_t value_row = row(batch, head, level, at_y, at_x);
        const auto channels = static_cast<size_t>(shape_[3]);
        const double* const gradient = &grad_output_[grad_row];
        summation_.add(&gradients_.value[value_row], share_y * share_x * weight, gradient, channels);
        double dot = 0;
        for (size_t channel = 0; channel < channels; ++channel)
          dot += value_[value_row + channel] * gradient[channel];
        by_weight += share_y * share_x * dot;
        by_y += (down ? 1 : -1) * share_x * dot;
        by_x += (right ? 1 : -1) * share_y * dot;
      }
    }
    gradients_.attn_weight[point] = by_weight;
    gradients_.location[2 * point] = static_cast<double>(level.width) * weight * by_x;
    gradients_.location[2 * point + 1] = static_cast<double>(level.height) * weight * by_y;
  }

  const Gradients& gradients() const { return gradients_; }

 private:
  // In float, both operations rounded, as the kernel for Atlas A2 and A3 does (Compute).
  static double pixel(double location, int64_t size) {
    const float scaled = static_cast<float>(location) * static_cast<float>(size);
    return scaled - 0.5f;
  }

  Shape shape_;
  std::vector<double> value_, grad_output_;
  Gradients gradients_;
  Summation summation_;
};

void kernel(const KernelRun& run) {
  const auto location = run.read("location"), attn_weight = run.read("attnWeight");
  const auto sizes = run.read_integers("spatialShape"), starts = run.read_integers("levelStartIndex");
  const Shape& shape = run.shape("location");
  const int64_t channels = run.shape("value")[3];
  Sampler sampler(run);
  const auto heads = static_cast<size_t>(shape[2]), levels = static_cast<size_t>(shape[3]),
             points = static_cast<size_t>(shape[4]);
  const auto rows_of_batch = static_cast<size_t>(shape[1]) * heads;
  for (const size_t row : run.summation.order(static_cast<size_t>(shape[0]) * rows_of_batch)) {
    const auto batch = static_cast<int64_t>(row / rows_of_batch), head = static_cast<int64_t>(row % heads);
    const size_t grad_row = row * static_cast<size_t>(channels);
    for (size_t level = 0; level < levels; ++level) {
      const Level described{sizes[2 * level], sizes[2 * level + 1], starts[level]};
      for (size_t i = 0; i < points; ++i) {
        const size_t point = (row * levels + level) * points + i;
        sampler.add_point(point, batch, head, grad_row, described, location[2 * point],
                          location[2 * point + 1], attn_weight[point]);
      }
    }
  }
  run.add("gradValue", sampler.gradients().value);
  run.add("gradLocation", sampler.gradients().location);
  run.add("gradAttnWeight", sampler.gradients().attn_weight);
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

int aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
    const aclTensor* value, const aclTensor* spatial_shape, const aclTensor* level_start_index,
    const aclTensor* location, const aclTensor* attn_weight, const aclTensor* grad_output,
    aclTensor* grad_value, aclTensor* grad_location, aclTensor* grad_attn_weight, uint64_t* workspace_size,
    aclOpExecutor** executor) {
  PhaseOne phase(kOp);
  // As its pages say: not from 9.0 to 9.2.0-beta.1.
  const Release release = cann_release();
  if (release < Release{9, 0, 0} || Release{9, 2, 1} < release) phase.can_be_deterministic();
  Call call;
  call.value = phase.input("value", value);
  call.spatial_shape = phase.input("spatialShape", spatial_shape);
  call.level_start_index = phase.input("levelStartIndex", level_start_index);
  call.location = phase.input("location", location);
  call.attn_weight = phase.input("attnWeight", attn_weight);
  call.grad_output = phase.input("gradOutput", grad_output);
  call.grad_value = phase.output("gradValue", grad_value);
  call.grad_location = phase.output("gradLocation", grad_location);
  call.grad_attn_weight = phase.output("gradAttnWeight", grad_attn_weight);
  if (!workspace_size || !executor) {
    violation("undefined",
              format("%s: workspaceSize or executor is null, which the vendor does not check", kOp));
  }
  // FLOAT copies of value and its gradient, and of location, for the transposed layout the kernel works in.
  const uint64_t scratch = call.value && call.location
                               ? 8 * static_cast<uint64_t>(call.value->elements() + call.location->elements())
                               : 0;
  return phase.finish([&] { return check(call); }, kSystemWorkspace + scratch, kernel, workspace_size,
                      executor);
}

int aclnnMultiScaleDeformableAttentionGrad(void* workspace, uint64_t workspace_size, aclOpExecutor* executor,
                                           void* stream) {
  return launch(kOp, workspace, workspace_size, executor, stream);
}

}  // extern "C"
