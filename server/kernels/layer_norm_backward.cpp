// aclnnLayerNormBackward. Data are (M, N): rows, and the elements of each, which are normalised together.
//
//   xh = (input - mean) * rstd
//   grad_bias = sum over m of grad_out        grad_weight = sum over m of grad_out * xh
//   c1, c2 = means over the row of grad_out * weight and of grad_out * weight * xh
//   grad_input = rstd * (grad_out * weight - c1 - xh * c2)
//
// The limit is memory: both passes over a few rows follow each other while they are in the first-level cache, the next
// rows are fetched meanwhile, and the columns' sums are taken on the way. Elements are computed in float32. Sums of
// columns are float32 over a block of rows, sums of rows over a block of columns, float64 beyond, in an order that shapes
// alone fix. Where float32 leaves the finite numbers, a sum or a row is computed again in float64, term by term as the
// reference does: what overflows or is no number follows from the operands alone.
#include <algorithm>
#include <cmath>
#include <vector>

#include "group_norm_blocks.h"
#include "runtime.h"

namespace npugrad {
namespace {

constexpr int kLines = kWidth == 16 ? 4 : 2;  // rows at once, for which the columns' sums are loaded and stored once
constexpr int64_t kBlockRows = 32;            // rows of a float32 sum
constexpr int64_t kBlock = 128 * kWidth;      // columns of a float32 sum
constexpr int64_t kChunk = 1 << 14;           // columns of a row that one task takes
constexpr int64_t kTask = 1 << 15;            // elements a task has at least, where there are as many
constexpr int64_t kStreamBytes = 16 << 20;    // size of grad_input from which it bypasses the cache

enum { kGradOut, kInput, kMean, kRstd, kWeight, kBias, kGradInput, kGradWeight, kGradBias };

// Some rows, or as many columns of each.
template <typename T>
struct Lines {
  const T *grad[kLines], *input[kLines];
  double mean[kLines], rstd[kLines];
  int64_t next;  // elements from each to the one that is fetched into the cache meanwhile; 0: itself
};

// Elements of a line of the cache, or of a vector that is larger.
template <typename T>
constexpr int64_t kCacheLine = std::max<int64_t>(kWidth, 64 / sizeof(T));

template <typename T>
double normal(const Lines<T>& lines, int k, int64_t column) {
  return (to_float(lines.input[k][column]) - lines.mean[k]) * lines.rstd[k];
}

template <typename T>
__attribute__((noinline)) Sums sums_again(const Lines<T>& lines, int k, const float* weight, int64_t count) {
  Sums found;
  for (int64_t i = 0; i < count; ++i) {
    const double weighted = static_cast<double>(to_float(lines.grad[k][i])) * weight[i];
    found.grad += weighted;
    found.product += weighted * normal(lines, k, i);
  }
  return found;
}

// Sums over columns of K lines into `sums`, where Rows, and over the lines into `products` and `grads`, where Columns.
template <int K, bool Rows, bool Columns, typename T>
NPUGRAD_INLINE void sums_of_block(
    const Lines<T>& lines, int64_t from, int64_t to, const float* weight, float* products, float* grads, Sums* sums) {
  Floats mean[K], rstd[K], first[K] = {}, second[K] = {};
#pragma GCC unroll 4
  for (int k = 0; k < K; ++k) {
    mean[k] = splat(static_cast<float>(lines.mean[k]));
    rstd[k] = splat(static_cast<float>(lines.rstd[k]));
  }
  const auto step = [&](auto read, auto write, int64_t i) __attribute__((always_inline)) {
    const Floats w = read(weight + i);
    Floats product = {}, grad = {};
    if constexpr (Columns) product = read(products + i), grad = read(grads + i);
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      const Floats g = read(lines.grad[k] + i), one = g * ((read(lines.input[k] + i) - mean[k]) * rstd[k]);
      grad += g;
      product += one;
      if constexpr (Rows) first[k] += g * w, second[k] += one * w;
    }
    if constexpr (Columns) write(products + i, product), write(grads + i, grad);
  };
  const auto whole = [&](int64_t i) __attribute__((always_inline)) {
    step([](const auto* p) { return load(p); }, [](float* p, Floats v) { store(p, v); }, i);
  };
  int64_t i = from;
  for (; i + kCacheLine<T> <= to; i += kCacheLine<T>) {
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) __builtin_prefetch(lines.grad[k] + lines.next + i, 0, 2);
    for (int64_t j = 0; j < kCacheLine<T>; j += kWidth) whole(i + j);
  }
  for (; i + kWidth <= to; i += kWidth) whole(i);
  // Lanes beyond the end read 0 from grad_out, but 0 times infinity is no number; these are not stored.
  if (i < to)
    step([&](const auto* p) { return load_part(p, to - i); }, [&](float* p, Floats v) { store_part(p, v, to - i); }, i);
  if constexpr (Rows) {
    for (int k = 0; k < K; ++k) {
      sums[k].grad += sum(first[k]);
      sums[k].product += sum(second[k]);
    }
  }
}

template <int K, bool Rows, bool Columns, typename T>
void sums_of_lines(
    const Lines<T>& lines, int64_t count, const float* weight, float* products, float* grads, Sums* sums) {
  std::fill_n(sums, K, Sums());
  for (int64_t i = 0; i < count; i += kBlock)
    sums_of_block<K, Rows, Columns>(lines, i, std::min(i + kBlock, count), weight, products, grads, sums);
  for (int k = 0; Rows && k < K; ++k)
    if (!std::isfinite(sums[k].grad + sums[k].product)) sums[k] = sums_again(lines, k, weight, count);
}

template <typename T>
__attribute__((noinline)) void grad_input_again(
    const Lines<T>& lines, int k, const float* weight, const Sums& means, int64_t count, T* out) {
  for (int64_t i = 0; i < count; ++i) {
    const double weighted = static_cast<double>(to_float(lines.grad[k][i])) * weight[i];
    out[i] = from_double<T>(((weighted - means.grad) - normal(lines, k, i) * means.product) * lines.rstd[k]);
  }
}

// grad_input of a line, c1 and c2 in `means`.
template <bool Stream, typename T>
NPUGRAD_INLINE void grad_input_of_line(
    const Lines<T>& lines, int k, const float* weight, const Sums& means, int64_t count, T* out) {
  const T *const grad = lines.grad[k], *const input = lines.input[k];
  const Floats mean = splat(static_cast<float>(lines.mean[k])), rstd = splat(static_cast<float>(lines.rstd[k]));
  const Floats b = splat(static_cast<float>(lines.rstd[k] * means.product));
  const Floats c = splat(static_cast<float>(lines.rstd[k] * means.grad));
  Floats zero = {};  // becomes NaN with the first result that is not finite
  const auto compute = [&](Floats g, Floats x, Floats w) __attribute__((always_inline)) {
    const Floats found = rstd * (g * w) - (b * ((x - mean) * rstd) + c);
    zero += found * 0.0f;
    return found;
  };
  // Always inline: where one call is not, Clang reads what `compute` captures from memory for each vector.
  const auto part = [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    store_part(out + i, compute(load_part(grad + i, n), load_part(input + i, n), load_part(weight + i, n)), n);
  };
  // What bypasses the cache goes to whole lines.
  int64_t i = Stream ? std::min(line_start(out), count) : 0;
  int64_t head = 0;  // a part is less than a vector
  for (; head + kWidth <= i; head += kWidth) {
    store(out + head, compute(load(grad + head), load(input + head), load(weight + head)));
  }
  if (head < i) part(head, i - head);
  const auto whole = [&](int64_t i) __attribute__((always_inline)) {
    const Floats found = compute(load(grad + i), load(input + i), load(weight + i));
    if constexpr (Stream) {
      stream(out + i, found);
    } else {
      store(out + i, found);
    }
  };
  for (; i + kCacheLine<T> <= count; i += kCacheLine<T>) {
    __builtin_prefetch(input + lines.next + i, 0, 2);
    for (int64_t j = 0; j < kCacheLine<T>; j += kWidth) whole(i + j);
  }
  for (; i + kWidth <= count; i += kWidth) whole(i);
  if (i < count) part(i, count - i);
  if (any_nan(zero)) grad_input_again(lines, k, weight, means, count, out);
}

// A call with data of type T.
template <typename T>
class LayerNorm {
 public:
  LayerNorm(Call& call, int64_t m, int64_t n) : call_(call), m_(m), n_(n) {}

  void run() {
    means_ = numbers(mean_, m_);
    rstds_ = numbers(rstd_, m_);
    weights_ = call_.template scratch<float>(n_);
    const auto wide = weight_.given() ? numbers(weight_, n_) : Buffer<double>();
    for (int64_t i = 0; i < n_; ++i) weights_[i] = weight_.given() ? static_cast<float>(wide[i]) : 1.0f;
    const auto slots = static_cast<int64_t>(call_.threads());
    sums_ = call_.template scratch<float>(slots * 2 * width_);
    if (!grad_out_.contiguous() || !input_.contiguous())
      gathered_ = call_.template scratch<T>(slots * 2 * kLines * width_);
    if (wants_columns()) totals_ = call_.template scratch<double>(spans_ * 2 * n_);
    if (chunks_ > 1) row_sums_ = call_.template scratch<Sums>(m_ * chunks_);
    pages_ = std::vector<ResultPages>(static_cast<size_t>(slots), ResultPages(grad_input_.given() && large()));
    // From the last to the first: see ResultPages.
    const auto tasks = spans_ * chunks_;
    call_.parallel(tasks, [&](int64_t task, int slot) { sums_of_task(tasks - 1 - task, slot); });
    if (chunks_ > 1 && grad_input_.given())
      call_.parallel(tasks, [&](int64_t task, int slot) { write_task(tasks - 1 - task, slot); });
    if (wants_columns()) column_sums();
  }

 private:
  Buffer<double> numbers(const Tensor& tensor, int64_t count) {
    auto found = call_.template scratch<double>(count);
    tensor.read(0, count, found.get());
    return found;
  }
  bool wants_columns() const { return grad_weight_.given() || grad_bias_.given(); }
  bool large() const { return m_ * n_ >= kStreamBytes / static_cast<int64_t>(sizeof(T)); }

  // `rows` of a span's from `row` on.
  Lines<T> lines(int64_t row, int rows, const Span& span, const Span& columns, int slot) const {
    Lines<T> found;
    found.next = row + 2 * rows > span.end || gathered_.get() ? 0 : rows * n_;
    for (int k = 0; k < rows; ++k) {
      const int64_t start = (row + k) * n_ + columns.begin;
      T* const buffer = gathered_.get() ? gathered_.get() + (slot * 2 * kLines + 2 * k) * width_ : nullptr;
      found.grad[k] = grad_out_.template run<T>(start, columns.size(), buffer);
      found.input[k] = input_.template run<T>(start, columns.size(), buffer ? buffer + width_ : nullptr);
      found.mean[k] = means_[row + k];
      found.rstd[k] = rstds_[row + k];
    }
    return found;
  }

  template <int K>
  void sums(const Lines<T>& lines, const Span& columns, float* products, Sums* found) const {
    const float* const weight = weights_.get() + columns.begin;
    float* const grads = products + width_;
    const int64_t count = columns.size();
    if (!grad_input_.given()) return sums_of_lines<K, false, true>(lines, count, weight, products, grads, found);
    if (!wants_columns()) return sums_of_lines<K, true, false>(lines, count, weight, products, grads, found);
    sums_of_lines<K, true, true>(lines, count, weight, products, grads, found);
  }

  // Calls body(row, rows) for the rows of a span, some at once.
  template <typename Body>
  void each(const Span& rows, const Body& body) const {
    for (int64_t row = rows.begin; row < rows.end;) {
      const int count = rows.end - row >= kLines ? kLines : 1;
      body(row, count);
      row += count;
    }
  }

  void sums_of_task(int64_t task, int slot) {
    const Span rows(task / chunks_, span_, m_), columns(task % chunks_, kChunk, n_);
    float* const products = sums_.get() + slot * 2 * width_;
    // Whole rows lie in one piece; of those in chunks each does for itself.
    if (chunks_ == 1 && grad_input_.given())
      pages_[static_cast<size_t>(slot)].begin(reinterpret_cast<char*>(grad_input_.template data<T>() + rows.end * n_));
    double* const totals = wants_columns() ? totals_.get() + task / chunks_ * 2 * n_ + columns.begin : nullptr;
    if (totals) {
      std::fill_n(products, 2 * width_, 0.0f);
      for (int i : {0, 1}) std::fill_n(totals + i * n_, columns.size(), 0.0);
    }
    for (int64_t block = 0; block < ceil_div(rows.size(), kBlockRows); ++block) {
      const Span some(block, kBlockRows, rows.size()), here = moved(some, rows.begin);
      each(here, [&](int64_t row, int count) {
        const Lines<T> lines = this->lines(row, count, rows, columns, slot);
        Sums found[kLines];
        if (count == kLines) {
          sums<kLines>(lines, columns, products, found);
        } else {
          sums<1>(lines, columns, products, found);
        }
        if (!grad_input_.given()) return;
        if (chunks_ == 1) return write(lines, row, count, columns, found, slot);
        for (int k = 0; k < count; ++k) row_sums_[(row + k) * chunks_ + task % chunks_] = found[k];
      });
      if (totals) add_block(here, columns, products, totals);
    }
    stream_fence();
  }
  static Span moved(Span span, int64_t by) {
    span.begin += by;
    span.end += by;
    return span;
  }

  // Adds a block's sums of columns to those of its span, and clears them.
  void add_block(const Span& rows, const Span& columns, float* products, double* totals) const {
    for (int which : {0, 1}) {
      if (!(which ? grad_bias_ : grad_weight_).given()) continue;
      float* const found = products + which * width_;
      double* const total = totals + which * n_;
      Floats zero = {};  // becomes NaN with the first sum that is not finite
      for (int64_t i = 0; i < columns.size(); i += kWidth) zero += load(found + i) * 0.0f;
      if (any_nan(zero)) {
        for (int64_t i = 0; i < columns.size(); ++i)
          total[i] += std::isfinite(found[i]) ? found[i] : column_again(rows, columns.begin + i, which == 0);
      } else {
        for (int64_t i = 0; i < columns.size(); ++i) total[i] += found[i];
      }
      std::fill_n(found, columns.size(), 0.0f);
    }
  }
  __attribute__((noinline)) double column_again(const Span& rows, int64_t column, bool is_product) const {
    double found = 0;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      double grad, input;
      grad_out_.read(row * n_ + column, 1, &grad);
      if (is_product) input_.read(row * n_ + column, 1, &input);
      found += is_product ? grad * ((input - means_[row]) * rstds_[row]) : grad;
    }
    return found;
  }

  // grad_input of some lines, whose sums over all columns are there.
  void write(const Lines<T>& lines, int64_t row, int count, const Span& columns, const Sums* sums, int slot) {
    ResultPages& pages = pages_[static_cast<size_t>(slot)];
    const auto elements = static_cast<double>(n_);
    for (int k = 0; k < count; ++k) {
      T* const out = grad_input_.template data<T>() + (row + k) * n_ + columns.begin;
      const float* const weight = weights_.get() + columns.begin;
      const Sums means{sums[k].grad / elements, sums[k].product / elements};
      char* const place = reinterpret_cast<char*>(out);
      const auto bytes = columns.size() * static_cast<int64_t>(sizeof(T));
      if (chunks_ > 1) pages.begin(place + bytes);
      if (pages.streams(place, bytes)) {
        grad_input_of_line<true>(lines, k, weight, means, columns.size(), out);
      } else {
        grad_input_of_line<false>(lines, k, weight, means, columns.size(), out);
      }
    }
  }
  // Where a row has several chunks: grad_input, once the sums of all of them are there.
  void write_task(int64_t task, int slot) {
    const Span rows(task / chunks_, span_, m_), columns(task % chunks_, kChunk, n_);
    each(rows, [&](int64_t row, int count) {
      Sums found[kLines];
      for (int k = 0; k < count; ++k)
        for (int64_t chunk = 0; chunk < chunks_; ++chunk) found[k] += row_sums_[(row + k) * chunks_ + chunk];
      write(lines(row, count, rows, columns, slot), row, count, columns, found, slot);
    });
    stream_fence();
  }

  // grad_weight and grad_bias: the sums of the spans in order.
  void column_sums() {
    constexpr int64_t kAtOnce = 256;
    call_.parallel(ceil_div(n_, kAtOnce), [&](int64_t task, int) {
      const Span columns(task, kAtOnce, n_);
      for (int which : {0, 1}) {
        const Tensor& output = which ? grad_bias_ : grad_weight_;
        if (!output.given()) continue;
        double found[kAtOnce] = {};
        for (int64_t span = 0; span < spans_; ++span)
          for (int64_t i = 0; i < columns.size(); ++i)
            found[i] += totals_[(span * 2 + which) * n_ + columns.begin + i];
        output.write(columns.begin, columns.size(), found);
      }
    });
  }

  Call& call_;
  const int64_t m_, n_;
  const int64_t chunks_ = ceil_div(n_, kChunk), width_ = ceil_div(std::min(n_, kChunk), kWidth) * kWidth;
  const int64_t span_ = ceil_div(std::max(kBlockRows, ceil_div(kTask, width_)), kBlockRows) * kBlockRows;
  const int64_t spans_ = ceil_div(m_, span_);
  const Tensor grad_out_ = call_.tensor(kGradOut), input_ = call_.tensor(kInput), mean_ = call_.tensor(kMean),
               rstd_ = call_.tensor(kRstd), weight_ = call_.tensor(kWeight), grad_input_ = call_.tensor(kGradInput),
               grad_weight_ = call_.tensor(kGradWeight), grad_bias_ = call_.tensor(kGradBias);
  Buffer<double> means_, rstds_, totals_;  // totals_: of each span, products then grads
  Buffer<float> weights_, sums_;           // sums_: of each slot, products then grads of a block
  Buffer<T> gathered_;                     // of each slot, lines of operands that are not contiguous
  Buffer<Sums> row_sums_;
  std::vector<ResultPages> pages_;
};

// Checks what memory safety rests on.
void check(const Tensor& tensor, int64_t count, bool output = false) {
  if (!tensor.given()) return;
  require(tensor.count() == count && (!output || tensor.contiguous()));
  if (!is_float(tensor.dtype())) throw Unsupported();
}

}  // namespace

void layer_norm_backward(Call& call) {
  const Tensor grad_out = call.tensor(kGradOut), input = call.tensor(kInput), mean = call.tensor(kMean);
  require(grad_out.given() && input.given() && mean.given() && call.tensor(kRstd).given());
  const int64_t elements = input.count(), m = mean.count();
  if (!elements) {
    for (int output : {kGradInput, kGradWeight, kGradBias})
      if (call.tensor(output).given()) call.tensor(output).zero();
    return;
  }
  require(m > 0 && elements % m == 0);
  check(grad_out, elements);
  check(input, elements);
  check(mean, m);
  check(call.tensor(kRstd), m);
  check(call.tensor(kWeight), elements / m);
  check(call.tensor(kBias), elements / m);
  check(call.tensor(kGradInput), elements, true);
  check(call.tensor(kGradWeight), elements / m, true);
  check(call.tensor(kGradBias), elements / m, true);
  const int32_t dtype = grad_out.dtype();
  const Tensor grad_input = call.tensor(kGradInput);
  if (input.dtype() != dtype || (grad_input.given() && grad_input.dtype() != dtype)) throw Unsupported();
  with_float_type(dtype, [&](auto type) { LayerNorm<decltype(type)>(call, m, elements / m).run(); });
}

}  // namespace npugrad
