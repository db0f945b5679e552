// aclnnFusedFloydAttentionGrad, an interface generated from the operator definition: its shape rules are
// tiling's.
// In libopapi_transformer, from CANN 9.0.0-beta.1 on.
#include <cfloat>
#include <cmath>

#include "../model/violation.h"
#include "checks.h"

namespace cann_sim {
namespace {

constexpr char kOp[] = "aclnnFusedFloydAttentionGrad";
constexpr int64_t kStatisticsWidth = 8;

struct Call {
  const Tensor *query, *key1, *value1, *key2, *value2, *dy, *mask, *softmax_max, *softmax_sum, *attention_in;
  const Tensor *dq, *dk1, *dv1, *dk2, *dv2;
  bool has_executor, has_workspace_size;

  NamedTensors required() const {
    return {{"query", query}, {"key1", key1},     {"value1", value1},
            {"key2", key2},   {"value2", value2}, {"dy", dy}};
  }
  NamedTensors outputs() const {
    return {{"dqOut", dq}, {"dk1Out", dk1}, {"dv1Out", dv1}, {"dk2Out", dk2}, {"dv2Out", dv2}};
  }
};

void check_nulls(const Call& call) {
  for (const NamedTensors& tensors : {call.required(), call.outputs()}) require_given(tensors);
  require(call.has_executor, "executor is null", aclnn::kNullptr);
  require(call.has_workspace_size, "workspaceSize is null", aclnn::kNullptr);
}

void check_support(const Call& call) {
  require(product() != Product::Training, "there is no kernel for this product", aclnn::kFindKernel);
  const int dtype = call.query->dtype;
  require(is_one_of(dtype, {kFloat16, kBfloat16, kFloat}), "the dtype of query is not supported");
  for (const NamedTensors& tensors : {call.required(), call.outputs()}) {
    require_each(tensors, " has not the dtype of query, or not format ND",
                 [&](const Tensor& each) { return each.dtype == dtype && is_dense(each.format); });
  }
  // The operator definition lists FLOAT, but no kernel was ever built for it.
  require(dtype != kFloat, "there is no FLOAT kernel", aclnn::kFindKernel);
}

// Sizes as tiling reads them: N and K from key1, the others from query.
struct Sizes {
  int64_t b, h, n, m, k, d;
};

Sizes sizes_of(const Call& call) {
  const Shape &query = call.query->shape, &key1 = call.key1->shape;
  return {query[0], query[1], key1[2], query[3], key1[3], query[4]};
}

void tiling(bool holds, const std::string& text) { require(holds, text, aclnn::kTiling); }

void check_ranks(const Call& call) {
  const auto is_5 = [](const Tensor& each) { return each.rank() == 5; };
  require_each(call.required(), " has not rank 5", is_5, aclnn::kTiling);
  for (const size_t axis : {0, 1, 4})
    tiling(call.query->shape[axis] == call.key1->shape[axis],
           "query and key1 differ on axis " + std::to_string(axis));
}

void check_sizes(const Call& call) {
  const Sizes sizes = sizes_of(call);
  tiling(sizes.b && sizes.h && sizes.n && sizes.m && sizes.k, "a size is 0");
  tiling(sizes.n % 16 == 0, "N is no multiple of 16");
  tiling(sizes.m % 128 == 0, "M is no multiple of 128");
  tiling(sizes.k % 128 == 0, "K is no multiple of 128");
  tiling(sizes.d == 32 || sizes.d == 64 || sizes.d == 128, "D is not 32, 64 or 128");
}

void check_shapes(const Call& call) {
  const Sizes sizes = sizes_of(call);
  tiling(call.value1->shape == call.key1->shape, "value1 has not the shape of key1");
  tiling(call.value2->shape == call.key2->shape, "value2 has not the shape of key2");
  tiling(call.dy->shape == call.query->shape, "dy has not the shape of query");
  tiling(call.attention_in->shape == call.query->shape, "attentionIn has not that of query");
  tiling(!call.mask || call.mask->shape == Shape{sizes.b, 1, sizes.n, 1, sizes.k},
         "attenMask is not [B, 1, N, 1, K]");
  const Shape statistics = {sizes.b, sizes.h, sizes.n, sizes.m, kStatisticsWidth};
  tiling(call.softmax_sum->shape == statistics, "softmaxSum is not [B, H, N, M, 8]");
  tiling(call.softmax_max->shape == statistics, "softmaxMax is not [B, H, N, M, 8]");
}

bool check(const Call& call) {
  check_nulls(call);
  check_support(call);
  size_t empty = 0;
  for (const Named& output : call.outputs()) empty += output.tensor->is_empty();
  if (empty == call.outputs().size()) return true;
  require_given({{"softmaxMax", call.softmax_max},
                 {"softmaxSum", call.softmax_sum},
                 {"attentionIn", call.attention_in}},
                aclnn::kTiling);
  check_ranks(call);
  if (empty) return true;
  tiling(!call.mask || is_one_of(call.mask->dtype, {kBool, kUint8}), "attenMask is not BOOL or UINT8");
  check_sizes(call);
  check_shapes(call);
  return false;
}

// Nobody looks at these: a device would read and write elsewhere, or other numbers.
void check_unchecked(const KernelRun& run, const Sizes& sizes) {
  const Shape query = {sizes.b, sizes.h, sizes.n, sizes.m, sizes.d},
              key2 = {sizes.b, sizes.h, sizes.k, sizes.m, sizes.d};
  const Shape key1 = {sizes.b, sizes.h, sizes.n, sizes.k, sizes.d};
  const struct {
    const char* name;
    const Shape& shape;
  } expected[] = {{"query", query}, {"key2", key2},   {"dqOut", query}, {"dk1Out", key1},
                  {"dv1Out", key1}, {"dk2Out", key2}, {"dv2Out", key2}};
  for (const auto& [name, shape] : expected) {
    if (run.shape(name) != shape) {
      violation("undefined", format("%s: the shape of %s is wrong, and nobody checks it", kOp, name));
    }
  }
  const std::pair<const char*, int> dtypes[] = {
      {"softmaxMax", kFloat}, {"softmaxSum", kFloat}, {"attentionIn", run.dtype("query")}};
  for (const auto& [name, dtype] : dtypes) {
    if (run.dtype(name) != dtype) {
      violation("undefined", format("%s: the dtype of %s is wrong, and nobody checks it", kOp, name));
    }
  }
}

struct Operands {
  std::vector<double> query, key1, value1, key2, value2, dy, mask, softmax_max, softmax_sum, attention_in;
  std::vector<double> delta;  // of each row: the sum of dy * attention_in
};

struct Gradients {
  std::vector<double> dq, dk1, dv1, dk2, dv2;
};

// The sum of the products of a row and the sum of two others. Four parts do not wait for each other.
double dot(const double* row, const double* one, const double* two, size_t count) {
  double parts[4] = {};
  for (size_t d = 0; d < count; d += 4) {  // D is a multiple of 32
    for (size_t i = 0; i < 4; ++i) parts[i] += row[d + i] * (one[d + i] + two[d + i]);
  }
  return parts[0] + parts[1] + (parts[2] + parts[3]);
}

// Everything that goes through one column of scores, that of a batch, head, n and k; `rows` are its m, in the
// order in which they come. Along a column memory is read in order, along a row it is not.
void add_column(const Operands& in, Gradients& out, const Sizes& sizes, double scale, size_t column,
                const std::vector<size_t>& rows, const Summation& summation) {
  const auto K = static_cast<size_t>(sizes.k), M = static_cast<size_t>(sizes.m),
             N = static_cast<size_t>(sizes.n);
  const auto D = static_cast<size_t>(sizes.d), H = static_cast<size_t>(sizes.h);
  const size_t k = column % K, n = column / K % N, bh = column / (K * N), batch = bh / H;
  const size_t one = column * D;
  const bool is_masked = !in.mask.empty() && in.mask[(batch * N + n) * K + k] != 0;
  for (const size_t m : rows) {
    const size_t row = (bh * N + n) * M + m, q = row * D, two = ((bh * K + k) * M + m) * D;
    const double score = dot(&in.query[q], &in.key1[one], &in.key2[two], D) * scale;
    const double p = std::exp((is_masked ? -static_cast<double>(FLT_MAX) : score) -
                              in.softmax_max[row * kStatisticsWidth]) /
                     in.softmax_sum[row * kStatisticsWidth];
    const double score_grad = dot(&in.dy[q], &in.value1[one], &in.value2[two], D);
    const double ds = p * (score_grad - in.delta[row]) * scale;
    for (size_t d = 0; d < D; ++d) out.dq[q + d] += ds * (in.key1[one + d] + in.key2[two + d]);
    for (double* const sums : {&out.dk1[one], &out.dk2[two]}) summation.add(sums, ds, &in.query[q], D);
    for (double* const sums : {&out.dv1[one], &out.dv2[two]}) summation.add(sums, p, &in.dy[q], D);
  }
}

void kernel(const KernelRun& run, const Sizes& sizes, double scale) {
  check_unchecked(run, sizes);
  Operands in{run.read("query"),
              run.read("key1"),
              run.read("value1"),
              run.read("key2"),
              run.read("value2"),
              run.read("dy"),
              run.has("attenMaskOptional") ? run.read("attenMaskOptional") : std::vector<double>(),
              run.read("softmaxMax"),
              run.read("softmaxSum"),
              run.read("attentionIn"),
              {}};
  Gradients out{std::vector<double>(in.query.size()), std::vector<double>(in.key1.size()),
                std::vector<double>(in.value1.size()), std::vector<double>(in.key2.size()),
                std::vector<double>(in.value2.size())};
  const auto D = static_cast<size_t>(sizes.d), planes = static_cast<size_t>(sizes.b * sizes.h * sizes.n);
  const auto M = static_cast<size_t>(sizes.m), K = static_cast<size_t>(sizes.k);
  in.delta.resize(planes * M);
  for (size_t i = 0; i < in.dy.size(); ++i) in.delta[i / D] += in.dy[i] * in.attention_in[i];
  const auto rows = run.summation.order(M);
  for (const size_t column : run.summation.order(planes * K))
    add_column(in, out, sizes, scale, column, rows, run.summation);
  run.write("dqOut", out.dq);
  run.write("dk1Out", out.dk1);
  run.write("dv1Out", out.dv1);
  run.write("dk2Out", out.dk2);
  run.write("dv2Out", out.dv2);
}

// FLOAT accumulators of the five gradients.
uint64_t workspace_bytes(const Call& call) {
  uint64_t elements = 0;
  for (const Named& output : call.outputs()) {
    elements += output.tensor ? static_cast<uint64_t>(output.tensor->elements()) : 0;
  }
  return kSystemWorkspace + 4 * elements;
}

}  // namespace
}  // namespace cann_sim

using namespace cann_sim;

extern "C" {

int aclnnFusedFloydAttentionGradGetWorkspaceSize(
    const aclTensor* query, const aclTensor* key1, const aclTensor* value1, const aclTensor* key2,
    const aclTensor* value2, const aclTensor* dy, const aclTensor* atten_mask, const aclTensor* softmax_max,
    const aclTensor* softmax_sum, const aclTensor* attention_in, double scale_value, const aclTensor* dq,
    const aclTensor* dk1, const aclTensor* dv1, const aclTensor* dk2, const aclTensor* dv2,
    uint64_t* workspace_size, aclOpExecutor** executor) {
  PhaseOne phase(kOp);
  phase.checks_workspace_size();
  Call call;
  call.query = phase.input("query", query);
  call.key1 = phase.input("key1", key1);
  call.value1 = phase.input("value1", value1);
  call.key2 = phase.input("key2", key2);
  call.value2 = phase.input("value2", value2);
  call.dy = phase.input("dy", dy);
  call.mask = phase.input("attenMaskOptional", atten_mask);
  call.softmax_max = phase.input("softmaxMax", softmax_max);
  call.softmax_sum = phase.input("softmaxSum", softmax_sum);
  call.attention_in = phase.input("attentionIn", attention_in);
  phase.real("scaleValue", scale_value);
  call.dq = phase.output("dqOut", dq);
  call.dk1 = phase.output("dk1Out", dk1);
  call.dv1 = phase.output("dv1Out", dv1);
  call.dk2 = phase.output("dk2Out", dk2);
  call.dv2 = phase.output("dv2Out", dv2);
  call.has_executor = executor;
  call.has_workspace_size = workspace_size;
  const bool has_sizes = call.query && call.key1 && call.query->rank() == 5 && call.key1->rank() == 5;
  const Sizes sizes = has_sizes ? sizes_of(call) : Sizes{};
  const double scale = static_cast<float>(scale_value);  // the interface narrows it
  phase.makes_executor_first();
  return phase.finish([&] { return check(call); }, workspace_bytes(call),
                      [sizes, scale](KernelRun& run) { kernel(run, sizes, scale); }, workspace_size,
                      executor);
}

int aclnnFusedFloydAttentionGrad(void* workspace, uint64_t workspace_size, aclOpExecutor* executor,
                                 void* stream) {
  return launch(kOp, workspace, workspace_size, executor, stream);
}

}  // extern "C"
