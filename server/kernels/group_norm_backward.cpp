// aclnnGroupNormBackward. Data are (N, G, D, L): samples, groups, D = C / G channels of a group, L pixels.
//
//   xh = (input - mean) * rstd
//   grad_beta = sum over n, l of grad_out        grad_gamma = sum over n, l of grad_out * xh
//   c1, c2 = means over the sample's group of grad_out * gamma and of grad_out * gamma * xh
//   grad_input = rstd * (grad_out * gamma - c1 - xh * c2)
//
// The limit is memory: both passes over a group follow each other while it is in the cache, so its operands are read
// from memory once. Elements are computed in float32. Sums are float32 over a block of pixels, float64 beyond, in an
// order that shapes alone fix. Where float32 leaves the finite numbers, a block is computed again in float64, term by
// term as the reference does: what overflows or is no number follows from the operands alone.
#include <algorithm>
#include <cmath>

#include "runtime.h"

namespace npugrad {
namespace {

constexpr int64_t kBlock = 128 * kWidth;     // pixels of a float32 sum: 32 additions in each lane
constexpr int64_t kChunk = 16 * kBlock;      // pixels of a row that one task takes
constexpr int64_t kTask = 1 << 14;           // elements a task has at least, where there are as many
constexpr int64_t kAlone = 1 << 13;          // elements below which other threads are not worth waking
constexpr int64_t kStreamBytes = 64 << 20;   // size of grad_input from which it bypasses the cache

enum { kGradOut, kInput, kMean, kRstd, kGamma, kGradInput, kGradGamma, kGradBeta };

// Over the pixels of a channel of a sample.
struct Sums {
  double grad = 0, product = 0;
  void operator+=(const Sums& other) {
    grad += other.grad;
    product += other.product;
  }
};

// What is the same for all pixels of a channel of a sample.
struct Row {
  double mean, rstd, gamma, c1, c2;
};

template <typename T>
Sums sums_again(const T* grad, const T* input, int64_t count, const Row& row) {
  Sums found;
  for (int64_t i = 0; i < count; ++i) {
    const double g = to_float(grad[i]);
    found.grad += g;
    if (input) found.product += g * ((to_float(input[i]) - row.mean) * row.rstd);
  }
  return found;
}

// Sums of at most kBlock pixels; without `input` only those of grad_out.
template <typename T>
Sums sums_of_block(const T* grad, const T* input, int64_t count, const Row& row) {
  constexpr int kLanes = 4;
  const Floats mean = splat(static_cast<float>(row.mean)), rstd = splat(static_cast<float>(row.rstd));
  Floats grads[kLanes] = {}, products[kLanes] = {};
  int64_t i = 0;
  if (input) {
    for (; i + kLanes * kWidth <= count; i += kLanes * kWidth)
#pragma GCC unroll 4
      for (int k = 0; k < kLanes; ++k) {
        const Floats g = load(grad + i + k * kWidth);
        grads[k] += g;
        products[k] += g * ((load(input + i + k * kWidth) - mean) * rstd);
      }
    for (; i < count; i += kWidth) {
      const int64_t left = count - i;
      const Floats g = left >= kWidth ? load(grad + i) : load_part(grad + i, left);
      // Lanes beyond the end read 0 from grad_out, but 0 times infinity is no number.
      const Floats x = left >= kWidth ? load(input + i) : load_part(input + i, left);
      grads[0] += g;
      products[0] += g * ((x - mean) * rstd);
    }
  } else {
    for (; i + kWidth <= count; i += kWidth) grads[0] += load(grad + i);
    if (i < count) grads[0] += load_part(grad + i, count - i);
  }
  Sums found;
  found.grad = sum((grads[0] + grads[1]) + (grads[2] + grads[3]));
  if (input) found.product = sum((products[0] + products[1]) + (products[2] + products[3]));
  if (!std::isfinite(found.grad) || !std::isfinite(found.product)) return sums_again(grad, input, count, row);
  return found;
}

template <typename T>
void grad_input_again(const T* grad, const T* input, T* out, int64_t count, const Row& row) {
  for (int64_t i = 0; i < count; ++i) {
    const double xh = (to_float(input[i]) - row.mean) * row.rstd;
    out[i] = from_double<T>(((to_float(grad[i]) * row.gamma - row.c1) - xh * row.c2) * row.rstd);
  }
}

template <bool Stream, typename T>
void grad_input_of_block(const T* grad, const T* input, T* out, int64_t count, const Row& row) {
  const Floats mean = splat(static_cast<float>(row.mean)), rstd = splat(static_cast<float>(row.rstd));
  const Floats a = splat(static_cast<float>(row.rstd * row.gamma));
  const Floats b = splat(static_cast<float>(row.rstd * row.c2)), c = splat(static_cast<float>(row.rstd * row.c1));
  Floats zero = {};  // becomes NaN with the first result that is not finite
  const auto compute = [&](Floats g, Floats x) {
    const Floats found = a * g - (b * ((x - mean) * rstd) + c);
    zero += found * 0.0f;
    return found;
  };
  const auto part = [&](int64_t i, int64_t n) {
    store_part(out + i, compute(load_part(grad + i, n), load_part(input + i, n)), n);
  };
  int64_t i = Stream ? std::min(aligned_start(out), count) : 0;
  if (i) part(0, i);
  for (; i + kWidth <= count; i += kWidth) {
    const Floats found = compute(load(grad + i), load(input + i));
    if constexpr (Stream) {
      stream(out + i, found);
    } else {
      store(out + i, found);
    }
  }
  if (i < count) part(i, count - i);
  if (!all_finite(zero)) grad_input_again(grad, input, out, count, row);
}

// A call with data of type T.
template <typename T>
class GroupNorm {
 public:
  GroupNorm(Call& call, int64_t n, int64_t c, int64_t l, int64_t g)
      : call_(call), n_(n), c_(c), l_(l), g_(g), d_(c / g), chunks_(ceil_div(l, kChunk)) {}

  void run() {
    means_ = numbers(mean_, n_ * g_);
    rstds_ = numbers(rstd_, n_ * g_);
    gammas_ = gamma_.given() ? numbers(gamma_, c_) : ones(c_);
    sums_ = call_.template scratch<Sums>(n_ * c_);
    const int64_t elements = n_ * c_ * l_, groups = n_ * g_;
    const int threads = call_.threads();
    // Both ways give the same bits: sums go over the same blocks in the same order.
    if (elements <= kAlone || groups >= 4 * threads || groups % threads == 0) {
      whole_groups(groups, elements);
    } else {
      for (int64_t group = 0; group < groups; ++group) split_group(group);
    }
    channel_sums();
  }

 private:
  Buffer<double> numbers(const Tensor& tensor, int64_t count) {
    auto found = call_.template scratch<double>(count);
    tensor.read(0, count, found.get());
    return found;
  }
  Buffer<double> ones(int64_t count) {
    auto found = call_.template scratch<double>(count);
    std::fill_n(found.get(), count, 1.0);
    return found;
  }

  bool wants_products() const { return grad_input_.given() || grad_gamma_.given(); }

  Row row(int64_t group, int64_t channel) const {
    return {means_[group], rstds_[group], gammas_[channel], 0, 0};
  }
  int64_t first_channel(int64_t group) const { return group % g_ * d_; }

  // Sums over the pixels `from` to `to` of row `index`, a channel of a sample.
  Sums chunk_sums(int64_t index, const Row& row, int64_t from, int64_t to) const {
    alignas(64) T grads[kBlock], inputs[kBlock];
    Sums found;
    for (int64_t pixel = from; pixel < to; pixel += kBlock) {
      const int64_t start = index * l_ + pixel, count = std::min(kBlock, to - pixel);
      const T* input = wants_products() ? input_.run<T>(start, count, inputs) : nullptr;
      found += sums_of_block(grad_out_.run<T>(start, count, grads), input, count, row);
    }
    return found;
  }
  Sums row_sums(int64_t index, const Row& row) const {
    Sums found;
    for (int64_t pixel = 0; pixel < l_; pixel += kChunk)
      found += chunk_sums(index, row, pixel, std::min(l_, pixel + kChunk));
    return found;
  }

  template <bool Stream>
  void write_pixels(int64_t index, const Row& row, int64_t from, int64_t to) const {
    alignas(64) T grads[kBlock], inputs[kBlock];
    for (int64_t pixel = from; pixel < to; pixel += kBlock) {
      const int64_t start = index * l_ + pixel, count = std::min(kBlock, to - pixel);
      grad_input_of_block<Stream>(
          grad_out_.run<T>(start, count, grads), input_.run<T>(start, count, inputs),
          grad_input_.data<T>() + start, count, row);
    }
  }
  void write_row(int64_t index, const Row& row, int64_t from, int64_t to) const {
    const bool whole_lines = l_ >= kBlock && grad_input_.count() >= kStreamBytes / static_cast<int64_t>(sizeof(T));
    if (whole_lines) {
      write_pixels<true>(index, row, from, to);
    } else {
      write_pixels<false>(index, row, from, to);
    }
  }

  // c1 and c2 of a group whose sums are there.
  void group_means(int64_t group, double& c1, double& c2) const {
    c1 = c2 = 0;
    for (int64_t d = 0; d < d_; ++d) {
      const Sums& sums = sums_[group * d_ + d];
      const double gamma = gammas_[first_channel(group) + d];
      c1 += sums.grad * gamma;
      c2 += sums.product * gamma;
    }
    const auto elements = static_cast<double>(d_ * l_);
    c1 /= elements;
    c2 /= elements;
  }

  void whole_groups(int64_t groups, int64_t elements) {
    const int64_t at_once = elements <= kAlone ? groups : ceil_div(kTask, d_ * l_);
    call_.parallel(ceil_div(groups, at_once), [&](int64_t task, int) {
      const Span span(task, at_once, groups);
      for (int64_t group = span.begin; group < span.end; ++group) whole_group(group);
      stream_fence();
    });
  }

  void whole_group(int64_t group) const {
    for (int64_t d = 0; d < d_; ++d) {
      const int64_t index = group * d_ + d;
      sums_[index] = row_sums(index, row(group, first_channel(group) + d));
    }
    if (!grad_input_.given()) return;
    double c1, c2;
    group_means(group, c1, c2);
    for (int64_t d = 0; d < d_; ++d) {
      Row one = row(group, first_channel(group) + d);
      one.c1 = c1;
      one.c2 = c2;
      write_row(group * d_ + d, one, 0, l_);
    }
  }

  // All threads on one group, in chunks of rows, or several short rows at once.
  void split_group(int64_t group) {
    const int64_t rows_at_once = chunks_ > 1 ? 1 : ceil_div(kTask, l_);
    const int64_t tasks = ceil_div(d_, rows_at_once) * chunks_;
    if (!partial_.get()) partial_ = call_.template scratch<Sums>(d_ * chunks_);
    const auto each = [&](int64_t task, auto&& body) {
      const Span rows(task / chunks_, rows_at_once, d_), pixels(task % chunks_, kChunk, l_);
      for (int64_t d = rows.begin; d < rows.end; ++d) body(d, row(group, first_channel(group) + d), pixels);
    };
    call_.parallel(tasks, [&](int64_t task, int) {
      each(task, [&](int64_t d, const Row& one, const Span& pixels) {
        partial_[d * chunks_ + task % chunks_] = chunk_sums(group * d_ + d, one, pixels.begin, pixels.end);
      });
    });
    for (int64_t d = 0; d < d_; ++d) {
      Sums found;
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) found += partial_[d * chunks_ + chunk];
      sums_[group * d_ + d] = found;
    }
    if (!grad_input_.given()) return;
    double c1, c2;
    group_means(group, c1, c2);
    call_.parallel(tasks, [&](int64_t task, int) {
      each(task, [&](int64_t d, Row one, const Span& pixels) {
        one.c1 = c1;
        one.c2 = c2;
        write_row(group * d_ + d, one, pixels.begin, pixels.end);
      });
      stream_fence();
    });
  }

  // grad_gamma and grad_beta: the samples' sums in order.
  void channel_sums() {
    if (!grad_gamma_.given() && !grad_beta_.given()) return;
    const int64_t at_once = n_ * c_ <= kTask ? c_ : std::max<int64_t>(64, ceil_div(kTask, n_));
    call_.parallel(ceil_div(c_, at_once), [&](int64_t task, int) {
      const Span channels(task, at_once, c_);
      for (int64_t channel = channels.begin; channel < channels.end; ++channel) {
        Sums found;
        for (int64_t sample = 0; sample < n_; ++sample) found += sums_[sample * c_ + channel];
        if (grad_gamma_.given()) grad_gamma_.write(channel, 1, &found.product);
        if (grad_beta_.given()) grad_beta_.write(channel, 1, &found.grad);
      }
    });
  }

  Call& call_;
  const int64_t n_, c_, l_, g_, d_, chunks_;
  const Tensor grad_out_ = call_.tensor(kGradOut), input_ = call_.tensor(kInput), mean_ = call_.tensor(kMean),
               rstd_ = call_.tensor(kRstd), gamma_ = call_.tensor(kGamma), grad_input_ = call_.tensor(kGradInput),
               grad_gamma_ = call_.tensor(kGradGamma), grad_beta_ = call_.tensor(kGradBeta);
  Buffer<double> means_, rstds_, gammas_;
  Buffer<Sums> sums_, partial_;
};

// Checks what memory safety rests on.
void check(const Tensor& tensor, int64_t count, bool output = false) {
  if (!tensor.given()) return;
  require(tensor.count() == count && (!output || tensor.contiguous()));
  if (!is_float(tensor.dtype())) throw Unsupported();
}

}  // namespace

void group_norm_backward(Call& call) {
  const int64_t n = call.integer(0), c = call.integer(1), l = call.integer(2), g = call.integer(3);
  require(g > 0 && c >= 0 && c % g == 0);
  const int64_t elements = product({n, c, l});
  const Tensor grad_out = call.tensor(kGradOut), input = call.tensor(kInput);
  require(grad_out.given() && input.given() && call.tensor(kMean).given() && call.tensor(kRstd).given());
  check(grad_out, elements);
  check(input, elements);
  check(call.tensor(kMean), product({n, g}));
  check(call.tensor(kRstd), product({n, g}));
  check(call.tensor(kGamma), c);
  check(call.tensor(kGradInput), elements, true);
  check(call.tensor(kGradGamma), c, true);
  check(call.tensor(kGradBeta), c, true);
  const int32_t dtype = grad_out.dtype();
  const Tensor grad_input = call.tensor(kGradInput);
  if (input.dtype() != dtype || (grad_input.given() && grad_input.dtype() != dtype)) throw Unsupported();
  if (!elements) {
    for (int output : {kGradInput, kGradGamma, kGradBeta})
      if (call.tensor(output).given()) call.tensor(output).zero();
    return;
  }
  with_float_type(dtype, [&](auto type) { GroupNorm<decltype(type)>(call, n, c, l, g).run(); });
}

}  // namespace npugrad
