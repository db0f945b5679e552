// aclnnMultiScaleDeformableAttentionGrad. The formulas are those of the reference; see also `deformable_levels.h`.
//
// The limit is the way to the cache: each sample reads four keys and adds to four, anywhere in a level. So the samples
// of a slab, one head of one batch, are sorted into bands of keys first. A band with its gradient fits the cache; its
// samples come in the order of their queries, and all that is read far away is known ahead. Three passes:
//
//   place   chunk by chunk of queries: pixels, samples appended to the chain of their band
//   add     band by band: keys copied in, one after the other as float32, samples computed, the gradient copied out
//   collect chunk by chunk: each sample's gradients taken from its band's chain
//
// A band is added to by its own samples alone, chunk after chunk: corners that lie in another band are put there as
// stubs. So a slab can be one task or many, and the bits are the same. With fewer samples than keys the time is that of
// writing gradients: then a band of all heads is one task of the second pass, and its rows are written whole.
//
// Sums are float32, in float64 from time to time where many samples meet. Where float32 leaves the finite numbers, a
// sample or a band is computed again in float64, term by term as the reference does. Levels that overlap or leave the
// keys have no bands: there all is computed so.
#include <vector>

#include "deformable_call.h"

namespace npugrad {
namespace {

using namespace deformable;

void require_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  require(tensor.given() && tensor.rank() == static_cast<int32_t>(shape.size()) && tensor.contiguous());
  int axis = 0;
  for (int64_t size : shape) require(tensor.shape(axis++) == size);
}

int64_t index_at(const Tensor& tensor, int64_t i) {
  return tensor.dtype() == NPUGRAD_INT64 ? tensor.data<const int64_t>()[i] : tensor.data<const int32_t>()[i];
}

// Sizes that all operands agree on.
Sizes checked_sizes(const Call& call) {
  const Tensor value = call.tensor(kValue), location = call.tensor(kLocation), grad = call.tensor(kGradOutput);
  require(value.given() && value.rank() == 4 && location.given() && location.rank() == 6);
  require(grad.given() && (grad.rank() == 3 || grad.rank() == 4));
  const int64_t bs = value.shape(0), nk = value.shape(1), nh = value.shape(2), ch = value.shape(3);
  const int64_t nq = location.shape(1), nl = location.shape(3), np = location.shape(4);
  require_shape(value, {bs, nk, nh, ch});
  require_shape(call.tensor(kSpatialShape), {nl, 2});
  require_shape(call.tensor(kLevelStartIndex), {nl});
  require_shape(location, {bs, nq, nh, nl, np, 2});
  require_shape(call.tensor(kAttnWeight), {bs, nq, nh, nl, np});
  if (grad.rank() == 4) {
    require_shape(grad, {bs, nq, nh, ch});
  } else {
    require_shape(grad, {bs, nq, product({nh, ch})});
  }
  if (call.tensor(kGradValue).given()) require_shape(call.tensor(kGradValue), {bs, nk, nh, ch});
  if (call.tensor(kGradLocation).given()) require_shape(call.tensor(kGradLocation), {bs, nq, nh, nl, np, 2});
  if (call.tensor(kGradAttnWeight).given()) require_shape(call.tensor(kGradAttnWeight), {bs, nq, nh, nl, np});
  return {bs, nk, nh, ch, nq, nl, np};
}

void check_types(const Call& call, int32_t dtype) {
  if (!is_float(dtype)) throw Unsupported();
  for (int index : {kLocation, kAttnWeight, kGradOutput, kGradValue, kGradLocation, kGradAttnWeight}) {
    const Tensor tensor = call.tensor(index);
    if (tensor.given() && tensor.dtype() != dtype) throw Unsupported();
  }
  for (int index : {kSpatialShape, kLevelStartIndex}) {
    const int32_t found = call.tensor(index).dtype();
    if (found != NPUGRAD_INT32 && found != NPUGRAD_INT64) throw Unsupported();
  }
}

}  // namespace

void multi_scale_deformable_attention_grad(Call& call) {
  const Sizes sizes = checked_sizes(call);
  const int32_t dtype = call.tensor(kValue).dtype();
  check_types(call, dtype);
  const auto all = {sizes.batches, sizes.keys, sizes.heads, sizes.channels, sizes.queries, sizes.levels, sizes.points};
  if (std::min(all) == 0) {
    for (int output : {kGradValue, kGradLocation, kGradAttnWeight})
      if (call.tensor(output).given()) call.tensor(output).zero();
    return;
  }
  // A numbering of the queries in a round, and of samples in a chunk, that fits 32 bits.
  if (sizes.samples() > (1 << 24)) throw Unsupported();
  std::vector<Level> levels;
  for (int64_t i = 0; i < sizes.levels; ++i)
    levels.push_back(
        {index_at(call.tensor(kSpatialShape), 2 * i), index_at(call.tensor(kSpatialShape), 2 * i + 1),
         index_at(call.tensor(kLevelStartIndex), i)});
  with_float_type(dtype, [&](auto type) { Deformable<decltype(type)>(call, sizes, std::move(levels)).run(); });
}

}  // namespace npugrad
