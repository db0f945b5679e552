// aclnnGroupNormBackward. Data are (N, G, D, L): samples, groups, D = C / G channels of a group, L pixels.
//
//   xh = (input - mean) * rstd
//   grad_beta = sum over n, l of grad_out        grad_gamma = sum over n, l of grad_out * xh
//   c1, c2 = means over the sample's group of grad_out * gamma and of grad_out * gamma * xh
//   grad_input = rstd * (grad_out * gamma - c1 - xh * c2)
//
// The limit is memory: both passes over a group follow each other while it is in the cache, so its operands are read
// from memory once; the next group's are fetched meanwhile where both fit. Elements are computed in float32. Sums are
// float32 over a block of pixels, float64 beyond, in an order that shapes alone fix. Where float32 leaves the finite
// numbers, a block is computed again in float64, term by term as the reference does: what overflows or is no number
// follows from the operands alone.
#include <algorithm>
#include <vector>

#include "group_norm_blocks.h"
#include "runtime.h"

namespace npugrad {
namespace {

constexpr int64_t kBlock = 128 * kWidth;     // pixels of a float32 sum: 32 additions in each lane
constexpr int64_t kChunk = 16 * kBlock;      // pixels of a row that one task takes
constexpr int64_t kTask = 1 << 14;           // elements a task has at least, where there are as many
constexpr int64_t kLargeTask = 1 << 18;      // elements a task of whole groups has in a large call
constexpr int64_t kTasks = 16;               // tasks of whole groups, where that leaves enough for each
constexpr int64_t kAlone = 1 << 13;          // elements below which other threads are not worth waking
constexpr int64_t kStreamBytes = 16 << 20;   // size of grad_input from which it bypasses the cache
constexpr int64_t kAheadBytes = 128 << 10;   // size of a group's operand up to which the next group's is fetched ahead

enum { kGradOut, kInput, kMean, kRstd, kGamma, kGradInput, kGradGamma, kGradBeta };

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
    if (l_ <= kChunk) return chunk_sums(index, row, 0, l_);
    Sums found;
    for (int64_t pixel = 0; pixel < l_; pixel += kChunk)
      found += chunk_sums(index, row, pixel, std::min(l_, pixel + kChunk));
    return found;
  }

  // Rows that are less than a block each, of operands that lie as their shape says: nothing between block and block.
  bool short_rows() const { return l_ < kBlock && grad_out_.contiguous() && input_.contiguous(); }
  void short_group(int64_t group) const {
    const int64_t channel = first_channel(group), start = group * d_;
    const T *const grad = grad_out_.data<T>() + start * l_, *const input = input_.data<T>() + start * l_;
    const double elements = static_cast<double>(d_ * l_);
    Row row{means_[group], rstds_[group], 0, 0, 0};
    double c1 = 0, c2 = 0;
    for (int64_t d = 0; d < d_; ++d) {
      const Sums sums = sums_of_block(grad + d * l_, wants_products() ? input + d * l_ : nullptr, l_, row);
      c1 += sums.grad * gammas_[channel + d];
      c2 += sums.product * gammas_[channel + d];
      sums_[start + d] = sums;
    }
    if (!grad_input_.given()) return;
    row.c1 = c1 / elements;
    row.c2 = c2 / elements;
    T* const out = grad_input_.data<T>() + start * l_;
    for (int64_t d = 0; d < d_; ++d) {
      row.gamma = gammas_[channel + d];
      grad_input_of_block<false>(grad + d * l_, input + d * l_, out + d * l_, l_, row, 0);
    }
  }

  // grad_input of the pixels `from` to `to` of row `index`. What lies `ahead` elements further is fetched meanwhile.
  void write_row(int64_t index, const Row& row, int64_t from, int64_t to, int64_t ahead, ResultPages& pages) const {
    alignas(64) T grads[kBlock], inputs[kBlock];
    for (int64_t pixel = from; pixel < to; pixel += kBlock) {
      const int64_t start = index * l_ + pixel, count = std::min(kBlock, to - pixel);
      const T* grad = grad_out_.run<T>(start, count, grads);
      const T* input = input_.run<T>(start, count, inputs);
      T* const out = grad_input_.data<T>() + start;
      if (pages.streams(place(start), count * static_cast<int64_t>(sizeof(T)))) {
        grad_input_of_block<true>(grad, input, out, count, row, ahead);
      } else {
        grad_input_of_block<false>(grad, input, out, count, row, ahead);
      }
    }
  }
  // For each slot: what one task asked, the next one knows.
  std::vector<ResultPages> result_pages() const {
    const bool large = l_ >= kBlock && grad_input_.count() >= kStreamBytes / static_cast<int64_t>(sizeof(T));
    return std::vector<ResultPages>(static_cast<size_t>(call_.threads()), ResultPages(large));
  }
  // Address of an element of grad_input.
  char* place(int64_t element) const { return reinterpret_cast<char*>(grad_input_.data<T>() + element); }

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
    const int64_t wanted = std::max(kTask, std::min(kLargeTask, elements / kTasks));
    const int64_t at_once = elements <= kAlone ? groups : ceil_div(wanted, d_ * l_), tasks = ceil_div(groups, at_once);
    auto pages = result_pages();
    // From the last to the first: see ResultPages.
    call_.parallel(tasks, [&](int64_t task, int slot) {
      const Span span(tasks - 1 - task, at_once, groups);
      if (short_rows()) {
        for (int64_t group = span.begin; group < span.end; ++group) short_group(group);
        return;
      }
      for (int64_t group = span.end; group-- > span.begin;)
        whole_group(group, group > span.begin, pages[static_cast<size_t>(slot)]);
      stream_fence();
    });
  }

  void whole_group(int64_t group, bool more, ResultPages& pages) const {
    for (int64_t d = 0; d < d_; ++d) {
      const int64_t index = group * d_ + d;
      sums_[index] = row_sums(index, row(group, first_channel(group) + d));
    }
    if (!grad_input_.given()) return;
    double c1, c2;
    group_means(group, c1, c2);
    const bool fetches = more && grad_out_.contiguous() && input_.contiguous() &&
                         d_ * l_ <= kAheadBytes / static_cast<int64_t>(sizeof(T));
    const int64_t ahead = fetches ? -d_ * l_ : 0;
    pages.begin(place((group + 1) * d_ * l_));
    for (int64_t d = 0; d < d_; ++d) {
      Row one = row(group, first_channel(group) + d);
      one.c1 = c1;
      one.c2 = c2;
      write_row(group * d_ + d, one, 0, l_, ahead, pages);
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
    auto pages = result_pages();
    // From the last to the first: see ResultPages.
    call_.parallel(tasks, [&](int64_t task, int slot) {
      ResultPages& own = pages[static_cast<size_t>(slot)];
      each(tasks - 1 - task, [&](int64_t d, Row one, const Span& pixels) {
        one.c1 = c1;
        one.c2 = c2;
        own.begin(place((group * d_ + d) * l_ + pixels.end));
        write_row(group * d_ + d, one, pixels.begin, pixels.end, 0, own);
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
