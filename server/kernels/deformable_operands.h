// The operands of a deformable attention call: where rows lie, and single samples in float64.
#ifndef NPUGRAD_DEFORMABLE_OPERANDS_H
#define NPUGRAD_DEFORMABLE_OPERANDS_H

#include <utility>
#include <vector>

#include "deformable_exact.h"
#include "deformable_levels.h"
#include "runtime.h"

namespace npugrad {

// Tensors of the call.
namespace deformable {
enum { kValue, kSpatialShape, kLevelStartIndex, kLocation, kAttnWeight, kGradOutput,
       kGradValue, kGradLocation, kGradAttnWeight };
}  // namespace deformable

struct Sizes {
  int64_t batches, keys, heads, channels, queries, levels, points;
  int64_t samples() const { return levels * points; }  // of a query and head
  int64_t slabs() const { return batches * heads; }
};

// A slab is one head of one batch. Rows of results are null where nobody wants them.
template <typename T>
class Operands {
 public:
  Operands(const Call& call, const Sizes& sizes, std::vector<Level> levels)
      : sizes(sizes), levels(std::move(levels)), float64_coordinates(call.float64_coordinates()) {
    using namespace deformable;
    value_ = call.tensor(kValue).template data<const T>();
    location_ = call.tensor(kLocation).template data<const T>();
    weight_ = call.tensor(kAttnWeight).template data<const T>();
    grad_ = call.tensor(kGradOutput).template data<const T>();
    grad_value_ = wanted(call.tensor(kGradValue));
    grad_location_ = wanted(call.tensor(kGradLocation));
    grad_weight_ = wanted(call.tensor(kGradAttnWeight));
  }

  const Sizes sizes;
  std::vector<Level> levels;
  const bool float64_coordinates;

  const Level& level_of(int64_t sample) const { return levels[static_cast<size_t>(sample / sizes.points)]; }

  const T* value(int64_t slab, int64_t key) const { return value_ + key_row(slab, key) * sizes.channels; }
  const T* locations(int64_t slab, int64_t query) const {
    return location_ + query_row(slab, query) * 2 * sizes.samples();
  }
  const T* weights(int64_t slab, int64_t query) const { return weight_ + query_row(slab, query) * sizes.samples(); }
  const T* grad(int64_t slab, int64_t query) const { return grad_ + query_row(slab, query) * sizes.channels; }

  bool wants_grad_value() const { return grad_value_ != nullptr; }
  T* grad_value(int64_t slab, int64_t key) const { return grad_value_ + key_row(slab, key) * sizes.channels; }
  T* grad_locations(int64_t slab, int64_t query) const {
    return grad_location_ ? grad_location_ + query_row(slab, query) * 2 * sizes.samples() : nullptr;
  }
  T* grad_weights(int64_t slab, int64_t query) const {
    return grad_weight_ ? grad_weight_ + query_row(slab, query) * sizes.samples() : nullptr;
  }

  // A row of channels as floats, zeros behind them up to a whole vector.
  NPUGRAD_INLINE void copy_row(const T* from, float* to) const {
    int64_t k = 0;
    for (; k + kWidth <= sizes.channels; k += kWidth) store(to + k, load(from + k));
    if (k < sizes.channels) store(to + k, load_part(from + k, sizes.channels - k));
  }

  ExactSample sample(int64_t slab, int64_t query, int64_t index) const {
    const T* at = locations(slab, query) + 2 * index;
    const float x = to_float(at[0]), y = to_float(at[1]);
    return float64_coordinates ? exact_sample<double>(x, y, level_of(index), sizes.keys)
                               : exact_sample<float>(x, y, level_of(index), sizes.keys);
  }

  void write_exact(
      int64_t slab, int64_t query, int64_t index, const ExactSample& found, bool with_location,
      bool with_weight) const {
    const SampleGrads grads = exact_grads(
        found, level_of(index), to_float(weights(slab, query)[index]), value(slab, 0),
        sizes.heads * sizes.channels, grad(slab, query), sizes.channels);
    if (T* weight = with_weight ? grad_weights(slab, query) : nullptr) weight[index] = from_double<T>(grads.weight);
    if (T* location = with_location ? grad_locations(slab, query) : nullptr) {
      location[2 * index] = from_double<T>(grads.x);
      location[2 * index + 1] = from_double<T>(grads.y);
    }
  }

  // Adds to the keys of [begin, end), `sums` being the first one's row.
  void add_exact(
      int64_t slab, int64_t query, int64_t index, const ExactSample& found, int64_t begin, int64_t end,
      double* sums) const {
    if (!found.reached) return;
    const T* row = grad(slab, query);
    const double weight = to_float(weights(slab, query)[index]);
    for (int corner = 0; corner < 4; ++corner) {
      const int64_t key = found.keys[corner];
      if (key < begin || key >= end) continue;
      const double share = found.weights[corner] * weight;
      double* sum = sums + (key - begin) * sizes.channels;
      for (int64_t c = 0; c < sizes.channels; ++c) sum[c] += share * static_cast<double>(to_float(row[c]));
    }
  }

  void write_sums(int64_t slab, int64_t begin, int64_t end, const double* sums) const {
    for (int64_t key = begin; key < end; ++key, sums += sizes.channels) {
      T* row = grad_value(slab, key);
      for (int64_t c = 0; c < sizes.channels; ++c) row[c] = from_double<T>(sums[c]);
    }
  }

 private:
  static T* wanted(const Tensor& tensor) { return tensor.given() ? tensor.template data<T>() : nullptr; }
  int64_t key_row(int64_t slab, int64_t key) const {
    return (slab / sizes.heads * sizes.keys + key) * sizes.heads + slab % sizes.heads;
  }
  int64_t query_row(int64_t slab, int64_t query) const {
    return (slab / sizes.heads * sizes.queries + query) * sizes.heads + slab % sizes.heads;
  }

  const T *value_, *location_, *weight_, *grad_;
  T *grad_value_, *grad_location_, *grad_weight_;
};

}  // namespace npugrad
#endif
