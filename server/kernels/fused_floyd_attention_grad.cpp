// aclnnFusedFloydAttentionGrad. Sizes N, M, K and D, for each batch and head:
//
//   S[n,m,k] = scale * query[n,m,:] . (key1[n,k,:] + key2[k,m,:])        -FLT_MAX where the mask says so
//   P        = exp(S - softmax_max) / softmax_sum
//   dS       = P * (dy[n,m,:] . (value1[n,k,:] + value2[k,m,:]) - dy[n,m,:] . attention_in[n,m,:])
//   dq[n,m]  = scale * sum over k of dS * (key1[n,k,:] + key2[k,m,:])
//   dk1[n,k] = scale * sum over m of dS * query[n,m,:]      dk2[k,m] = scale * sum over n of dS * query[n,m,:]
//   dv1[n,k] = sum over m of P * dy[n,m,:]                  dv2[k,m] = sum over n of P * dy[n,m,:]
//
// The limit is the multipliers: 20 N M K D operations on operands of N M D. P and dS exist for one tile of n, m and k
// at a time, 32 of each. A task is a range of n and one of k, with all of m; dk1 and dv1 are complete in it. dq is
// summed over the tasks of a range of n, dk2 and dv2 over those of a range of k, in float32 beside the outputs and in
// an order that shapes alone fix (`floyd_schedule.h`). Elements are computed in float32, whatever they come as.
//
// n and m mean the same to the formulas but for the names of operands: where N < M they are exchanged, so that there
// are enough ranges and no task is long.
#include <array>
#include <cfloat>
#include <vector>

#include "floyd_blocks.h"
#include "floyd_schedule.h"
#include "floyd_tile.h"
#include "runtime.h"

namespace npugrad {
namespace {

using floyd::kBlock;
using floyd::kBlockStep;
using floyd::Carver;
using floyd::Grid;
using floyd::kColumns;
using floyd::kRange;
using floyd::kRows;
using floyd::kRowStep;
using floyd::m_block;
using floyd::n_block;
using floyd::row;
using floyd::Tile;
using floyd::Visit;

enum {
  kQuery, kKey1, kValue1, kKey2, kValue2, kDy, kMask, kMax, kSum, kAttention, kDq, kDk1, kDv1, kDk2, kDv2, kTensors
};

template <typename T>
class Floyd {
 public:
  Floyd(Call& call, int64_t heads, int64_t pairs, int64_t n, int64_t m, int64_t k, int64_t d)
      : call_(call), exchanged_(n < m), heads_(heads), n_(exchanged_ ? m : n), m_(exchanged_ ? n : m), k_(k), d_(d),
        chunks_(ceil_div(d, kBlock)), n_ranges_(ceil_div(n_, kRange)), k_ranges_(ceil_div(k, kBlock)),
        schedule_(pairs, n_ranges_, k_ranges_, call.threads()),
        progress_(schedule_),
        scale_(static_cast<float>(call.real(0))) {
    const auto grid = [&](int index) { return Grid<T>(call.tensor(index), exchanged_); };
    const int swap = exchanged_ ? kKey2 - kKey1 : 0;
    query_ = grid(kQuery), dy_ = grid(kDy), attention_ = grid(kAttention), dq_ = grid(kDq);
    key1_ = grid(kKey1 + swap), value1_ = grid(kValue1 + swap), key2_ = grid(kKey2 - swap);
    value2_ = grid(kValue2 - swap);
    dk1_ = grid(kDk1 + swap), dv1_ = grid(kDv1 + swap), dk2_ = grid(kDk2 - swap), dv2_ = grid(kDv2 - swap);
    max_ = Grid<float>(call.tensor(kMax), exchanged_), sum_ = Grid<float>(call.tensor(kSum), exchanged_);
    mask_ = Grid<uint8_t>(call.tensor(kMask), false);
  }

  void run() {
    Carver count(nullptr);
    lay_out(count);
    // In one block: the system has large pages for large ones.
    memory_ = call_.scratch<float>(count.used());
    tiles_.clear();
    Carver memory(memory_.get());
    lay_out(memory);
    call_.parallel(schedule_.tasks(), [&](int64_t task, int slot) {
      const Visit visit = schedule_.visit(task);
      const auto turn = progress_.take_turn(visit);
      Task(*this, tiles_[static_cast<size_t>(slot)], visit).run();
    });
  }

 private:
  // Padded to whole blocks: what is added there is never read.
  template <typename Memory>
  void lay_out(Memory& memory) {
    const int64_t rows = product({schedule_.n_places(), kRange, m_});
    const int64_t blocks = product({schedule_.k_places(), m_, chunks_, kBlock * kBlock});
    dq_sums_ = memory.take(product({rows, chunks_, kBlock}));
    dk2_sums_ = memory.take(blocks);
    dv2_sums_ = memory.take(blocks);
    rows_ = memory.take(product({rows, 3}));
    for (int i = 0; i < call_.threads(); ++i) tiles_.emplace_back(memory, chunks_);
  }

  // One visit at work; n, m and k are those of its operands, `i`, `j` and `l` those within the tile.
  class Task {
   public:
    Task(Floyd& all, Tile& tile, const Visit& visit)
        : all_(all), tile_(tile), visit_(visit), b_(visit.pair / all.heads_), h_(visit.pair % all.heads_),
          n_(visit.n_range, kRange, all.n_), k_(visit.k_range, kBlock, all.k_),
          keys_(static_cast<int>(k_.size())) {}

    void run() {
      pack_keys<true>(all_.key1_, tile_.key1, tile_.key1_transposed);
      pack_keys<true>(all_.value1_, tile_.dv1, tile_.value1_transposed);
      if (!all_.exchanged_) pack_mask(n_);
      for (int64_t index = 0; index * kColumns < all_.m_; ++index) run_tiles(Span(index, kColumns, all_.m_));
      for (int i = 0; i < static_cast<int>(n_.size()); ++i)
        for (int l = 0; l < keys_; ++l)
          for (int64_t c = 0; c < all_.chunks_; ++c) {
            const int64_t from = n_block(c, i) + l * kBlock;
            write(all_.dk1_, n_.begin + i, k_.begin + l, c, tile_.dk1 + from, all_.scale_);
            write(all_.dv1_, n_.begin + i, k_.begin + l, c, tile_.dv1 + from, 1.0f);
          }
    }

   private:
    // The tiles of some m: one after the other, so that key2 and value2 are packed once.
    void run_tiles(const Span& m) {
      m_ = m.begin, columns_ = static_cast<int>(m.size());
      pack_keys<false>(all_.key2_, tile_.key2, tile_.key2_transposed);
      pack_keys<false>(all_.value2_, tile_.value2, tile_.value2_transposed);
      if (all_.exchanged_) pack_mask(m);
      for (int64_t index = 0; index * kRows < n_.size(); ++index) {
        const Span n(index, kRows, n_.size());
        first_ = static_cast<int>(n.begin), rows_ = static_cast<int>(n.size());
        run_tile();
      }
      if (visit_.k_last) write_dk2();
    }

    void run_tile() {
      for (int i = 0; i < rows_; ++i)
        for (int j = 0; j < columns_; ++j) pack_rows(i, j);
      look_ahead();
      for (int i = 0; i < rows_; i += floyd::kPairRows) {
        expect_dq(i);
        if (softmax_of<true>(i)) {
          add_dq<true>(i);
        } else {
          softmax_of<false>(i);
          add_dq<false>(i);
        }
      }
      add_dk1();
      add_dk2();
      if (visit_.n_last) write_dq();
    }

    // ---- operands

    // Vectors of an operand that are taken after those that follow each other in memory.
    void fetch(const T* vector) const {
      constexpr int64_t kStep = floyd::kLine / static_cast<int64_t>(sizeof(T));
      for (int64_t d = 0; d < all_.d_; d += kStep) __builtin_prefetch(vector + d);
    }

    // Blocks of key1 or value1 for the n of the task, or of key2 or value2 for the m of the tile.
    template <bool ByN>
    void pack_keys(const Grid<T>& from, float* natural, float* transposed) const {
      const int blocks = ByN ? static_cast<int>(n_.size()) : columns_;
      const auto copy = [&](int index, int l) {
        const int64_t key = k_.begin + l;
        const T* data = ByN ? from.at(b_, h_, n_.begin + index, key) : from.at(b_, h_, key, m_ + index);
        fetch(data + (ByN ? from.column : from.row));
        for (int64_t c = 0; c < all_.chunks_; ++c) {
          const int64_t skip = c * kBlock, to = (ByN ? n_block(c, index) : m_block(c, index)) + l * kBlock;
          floyd::pack_row(data + skip * from.element, from.element, all_.d_ - skip, natural + to);
        }
      };
      // In the order of memory.
      if (ByN) {
        for (int i = 0; i < blocks; ++i)
          for (int l = 0; l < keys_; ++l) copy(i, l);
      } else {
        for (int l = 0; l < keys_; ++l)
          for (int j = 0; j < blocks; ++j) copy(j, l);
      }
      for (int64_t c = 0; c < all_.chunks_; ++c)
        for (int i = 0; i < blocks; ++i) {
          const int64_t place = ByN ? n_block(c, i) : m_block(c, i);
          // What an earlier call left there must not decide how scores are computed.
          std::fill(natural + place + keys_ * kBlock, natural + place + kBlock * kBlock, 0.0f);
          floyd::transpose_block(natural + place, transposed + place);
        }
    }

    // Rows of query and dy, and at the first visit what is the same for all keys.
    void pack_rows(int i, int j) const {
      const int64_t n = n_.begin + first_ + i, m = m_ + j;
      for (int64_t c = 0; c < all_.chunks_; ++c) {
        const int64_t to = row(c, i) + j * kBlock, skip = c * kBlock, left = all_.d_ - skip;
        const auto& query = all_.query_;
        const auto& dy = all_.dy_;
        if (!c) {
          fetch(query.at(b_, h_, n, m) + query.row);
          fetch(dy.at(b_, h_, n, m) + dy.row);
        }
        floyd::pack_row(query.at(b_, h_, n, m) + skip * query.element, query.element, left, tile_.query + to);
        floyd::pack_row(dy.at(b_, h_, n, m) + skip * dy.element, dy.element, left, tile_.dy + to);
      }
      if (!visit_.n_first) return;
      float* found = statistics(i, j);
      found[0] = *all_.max_.at(b_, h_, n, m);
      found[1] = static_cast<float>(1.0 / *all_.sum_.at(b_, h_, n, m));
      found[2] = static_cast<float>(delta(i, j));
    }

    // dy . attention_in
    double delta(int i, int j) const {
      const auto& attention = all_.attention_;
      const T* data = attention.at(b_, h_, n_.begin + first_ + i, m_ + j);
      double found = 0;
      for (int64_t c = 0; c < all_.chunks_; ++c) {
        const float* dy = tile_.dy + row(c, i) + j * kBlock;
        Floats products = {};
        for (int64_t d = 0; d < kBlock; d += kWidth) {
          const int64_t place = c * kBlock + d;
          products +=
              load(dy + d) * floyd::load_strided(data + place * attention.element, attention.element, all_.d_ - place);
        }
        found += sum(products);
      }
      return found;
    }

    // softmax_max, 1 / softmax_sum and delta of a row.
    float* statistics(int i, int j) const {
      return all_.rows_ + ((visit_.n_place * kRange + first_ + i) * all_.m_ + m_ + j) * 3;
    }

    void pack_mask(const Span& rows) const {
      const auto& mask = all_.mask_;
      if (!mask.data) return;
      for (int64_t r = 0; r < rows.size(); ++r)
        for (int l = 0; l < kBlock; ++l)
          tile_.mask[r * kBlock + l] =
              l < keys_ && mask.data[b_ * mask.batch + (rows.begin + r) * mask.row + (k_.begin + l) * mask.element]
                  ? -1 : 0;
    }

    // ---- what is fetched meanwhile

    // Operands of the next tile.
    void look_ahead() const {
      tile_.later.clear();
      const bool more = first_ + kRows < n_.size();
      const int64_t m = more ? m_ : m_ + kColumns, columns = std::min<int64_t>(kColumns, all_.m_ - m);
      const auto expect = [&](const Grid<T>& grid, int64_t row) {
        if (columns > 0 && grid.element == 1 && grid.column == all_.d_)
          tile_.later.add(grid.at(b_, h_, row, m), columns * all_.d_ * static_cast<int64_t>(sizeof(T)));
      };
      if (!more) {
        for (int l = 0; l < keys_; ++l) expect(all_.key2_, k_.begin + l);
        for (int l = 0; l < keys_; ++l) expect(all_.value2_, k_.begin + l);
      }
      const int64_t begin = more ? first_ + kRows : 0;
      const Span next(begin / kRows, kRows, n_.size());
      for (int64_t i = next.begin; i < next.end; ++i) expect(all_.query_, n_.begin + i);
      for (int64_t i = next.begin; i < next.end; ++i) expect(all_.dy_, n_.begin + i);
    }
    // Sums of the rows that come next.
    void expect_dq(int i) const {
      tile_.soon.clear();
      const int64_t bytes = columns_ * all_.chunks_ * kBlock * static_cast<int64_t>(sizeof(float));
      for (int r = i; r < std::min(i + floyd::kPairRows, rows_); ++r) tile_.soon.add(dq_sums(r, 0), bytes);
      // Blocks of the n after them.
      const int64_t next = first_ + i + floyd::kPairRows < n_.size() ? first_ + i + floyd::kPairRows : 0;
      constexpr int64_t kBlocks = floyd::kPairRows * kBlockStep * static_cast<int64_t>(sizeof(float));
      for (const float* blocks : {tile_.key1_transposed, tile_.value1_transposed, tile_.key1})
        for (int64_t c = 0; c < all_.chunks_; ++c) tile_.soon.add(blocks + n_block(c, next), kBlocks);
    }
    // ---- scores

    // P and dS of kPairRows rows; false if a number on the way was not finite. Infinity times a sum is not the sum of
    // infinity times each: then the formulas are computed term by term, with `Together` false.
    template <bool Together>
    bool softmax_of(int i) const {
      paired_scores<Together>(i, tile_.query, tile_.key1_transposed, tile_.key2_transposed, tile_.scores);
      paired_scores<Together>(i, tile_.dy, tile_.value1_transposed, tile_.value2_transposed, tile_.scores_grad);
      Floats zero = {};  // becomes NaN with the first number that is not finite
      for (int r = i; r < std::min(i + floyd::kPairRows, rows_); ++r)
        for (int j = 0; j < columns_; ++j) softmax(r, j, zero);
      return all_finite(zero);
    }

    template <bool Together>
    void paired_scores(int i, const float* rows, const float* by_n, const float* by_m, float* target) const {
      for (int64_t c = 0; c < all_.chunks_; ++c) {
        const int64_t length = std::min<int64_t>(kBlock, all_.d_ - c * kBlock);
        for (int j = 0; j < columns_; j += floyd::kPairColumns) {
          const float *a = rows + row(c, i) + j * kBlock;
          const float *first = by_n + n_block(c, first_ + i), *second = by_m + m_block(c, j);
          add_pair<Together>(length, a, first, second, target + row(0, i) + j * kBlock, kRowStep, kBlock, c > 0);
        }
      }
    }

    // target (+)= a * (first + second)
    template <bool Together>
    void add_pair(
        int64_t length, const float* a, const float* first, const float* second, float* target, int64_t row_step,
        int64_t column_step, bool add) const {
      if (!Together) {
        add_pair<true>(length, a, first, tile_.zeros, target, row_step, column_step, add);
        add_pair<true>(length, a, tile_.zeros, second, target, row_step, column_step, true);
      } else if (add) {
        floyd::pair_product<kRowStep, true>(
            length, a, first, second, target, row_step, column_step, tile_.soon.take());
      } else {
        floyd::pair_product<kRowStep, false>(
            length, a, first, second, target, row_step, column_step, tile_.soon.take());
      }
    }

    void softmax(int i, int j, Floats& zero) const {
      const float* row_values = statistics(i, j);
      const Floats max = splat(row_values[0]), inverse = splat(row_values[1]), delta = splat(row_values[2]);
      float *scores = tile_.scores + row(0, i) + j * kBlock, *grads = tile_.scores_grad + row(0, i) + j * kBlock;
      const int32_t* mask = all_.mask_.data ? &tile_.mask[(all_.exchanged_ ? j : first_ + i) * kBlock] : nullptr;
#pragma GCC unroll 8
      for (int v = 0; v < kBlock; v += kWidth) {
        const Floats score = load(scores + v), grad = load(grads + v);
        zero += (score + grad) * 0.0f;
        Floats x = score * all_.scale_ - max;
        if (mask) x = load_raw<int32_t>(mask + v) ? splat(-FLT_MAX) - max : x;
        const Floats p = floyd::exp(x) * inverse;
        store(scores + v, p);
        store(grads + v, p * (grad - delta));
      }
    }

    // ---- sums

    float* dq_sums(int i, int j) const {
      const int64_t place = (visit_.n_place * kRange + first_ + i) * all_.m_ + m_ + j;
      return all_.dq_sums_ + place * all_.chunks_ * kBlock;
    }
    int64_t dk2_sums(int64_t c, int j) const {
      const int64_t place = visit_.k_place * all_.m_ + m_ + j;
      return (place * all_.chunks_ + c) * kBlock * kBlock;
    }

    template <bool Together>
    void add_dq(int i) const {
      const int64_t column_step = all_.chunks_ * kBlock, row_step = all_.m_ * column_step;
      for (int64_t c = 0; c < all_.chunks_; ++c)
        for (int j = 0; j < columns_; j += floyd::kPairColumns) {
          const float *a = tile_.scores_grad + row(0, i) + j * kBlock;
          const float *first = tile_.key1 + n_block(c, first_ + i), *second = tile_.key2 + m_block(c, j);
          float* to = dq_sums(i, j) + c * kBlock;
          if (i + floyd::kPairRows > rows_ || j + floyd::kPairColumns > columns_) {
            add_part_of_dq<Together>(i, j, a, first, second, to);
          } else {
            add_pair<Together>(keys_, a, first, second, to, row_step, column_step, !visit_.n_first);
          }
        }
    }

    // Where the tile ends within the rows that are computed together.
    template <bool Together>
    void add_part_of_dq(int i, int j, const float* a, const float* first, const float* second, float* to) const {
      const int64_t column_step = all_.chunks_ * kBlock, row_step = all_.m_ * column_step;
      constexpr int kStep = floyd::kPairColumns * kBlock;
      alignas(64) float found[floyd::kPairRows * kStep];
      add_pair<Together>(keys_, a, first, second, found, kStep, kBlock, false);
      for (int r = 0; r < std::min(floyd::kPairRows, rows_ - i); ++r)
        for (int q = 0; q < std::min(floyd::kPairColumns, columns_ - j); ++q)
          for (int v = 0; v < kBlock; v += kWidth) {
            float* target = to + r * row_step + q * column_step + v;
            const Floats value = load(found + r * kStep + q * kBlock + v);
            store(target, !visit_.n_first ? load(target) + value : value);
          }
    }

    void add_dk1() const {
      for (int64_t c = 0; c < all_.chunks_; ++c)
        for (int i = 0; i < rows_; ++i) {
          const auto add = [&](const float* scores, const float* vectors, float* sums) {
            floyd::add_product<kBlock, kBlockStep>(
                columns_, scores + row(0, i), vectors + row(c, i), sums + n_block(c, first_ + i), !m_, tile_.later);
          };
          add(tile_.scores_grad, tile_.query, tile_.dk1);
          add(tile_.scores, tile_.dy, tile_.dv1);
        }
    }

    void add_dk2() const {
      const bool fresh = visit_.k_first && !first_;
      for (int j = 0; j < columns_; ++j)
        for (int64_t c = 0; c < all_.chunks_; ++c) {
          const auto add = [&](const float* scores, const float* vectors, float* sums) {
            floyd::add_product<kRowStep, kBlock * kBlock>(
                rows_, scores + j * kBlock, vectors + row(c, 0) + j * kBlock, sums + dk2_sums(c, j), fresh,
                tile_.later);
          };
          add(tile_.scores_grad, tile_.query, all_.dk2_sums_);
          add(tile_.scores, tile_.dy, all_.dv2_sums_);
        }
    }

    // ---- results

    void write(const Grid<T>& to, int64_t row, int64_t column, int64_t chunk, const float* from, float factor) const {
      if (!to.data) return;
      floyd::write_row(from, factor, all_.d_ - chunk * kBlock, to.at(b_, h_, row, column) + chunk * kBlock);
    }

    void write_dq() const {
      for (int i = 0; i < rows_; ++i)
        for (int j = 0; j < columns_; ++j)
          for (int64_t c = 0; c < all_.chunks_; ++c)
            write(all_.dq_, n_.begin + first_ + i, m_ + j, c, dq_sums(i, j) + c * kBlock, all_.scale_);
    }

    void write_dk2() const {
      for (int l = 0; l < keys_; ++l)
        for (int j = 0; j < columns_; ++j)
          for (int64_t c = 0; c < all_.chunks_; ++c) {
            const int64_t from = dk2_sums(c, j) + l * kBlock;
            write(all_.dk2_, k_.begin + l, m_ + j, c, &all_.dk2_sums_[from], all_.scale_);
            write(all_.dv2_, k_.begin + l, m_ + j, c, &all_.dv2_sums_[from], 1.0f);
          }
    }

    Floyd& all_;
    Tile& tile_;
    const Visit visit_;
    const int64_t b_, h_;
    const Span n_, k_;
    const int keys_;
    int first_ = 0, rows_ = 0;
    int64_t m_ = 0;
    int columns_ = 0;
  };

  Call& call_;
  const bool exchanged_;
  const int64_t heads_, n_, m_, k_, d_, chunks_, n_ranges_, k_ranges_;
  const floyd::Schedule schedule_;
  floyd::Progress progress_;
  const float scale_;
  Grid<T> query_, key1_, value1_, key2_, value2_, dy_, attention_, dq_, dk1_, dv1_, dk2_, dv2_;
  Grid<float> max_, sum_;
  Grid<uint8_t> mask_;
  Buffer<float> memory_;
  float *dq_sums_ = nullptr, *dk2_sums_ = nullptr, *dv2_sums_ = nullptr, *rows_ = nullptr;
  std::vector<Tile> tiles_;
};

// Checks what memory safety rests on.
void check(const Tensor& tensor, const std::array<int64_t, 5>& shape, int32_t dtype, bool output) {
  if (!tensor.given()) {
    require(output);
    return;
  }
  require(tensor.rank() == 5);
  for (int i = 0; i < 5; ++i) require(tensor.shape(i) == shape[static_cast<size_t>(i)]);
  require(!output || tensor.contiguous());
  if (tensor.dtype() != dtype) throw Unsupported();
}

}  // namespace

void fused_floyd_attention_grad(Call& call) {
  const Tensor query = call.tensor(kQuery), key1 = call.tensor(kKey1);
  require(query.given() && key1.given() && query.rank() == 5 && key1.rank() == 5);
  const int64_t b = key1.shape(0), h = key1.shape(1), n = key1.shape(2), m = query.shape(3), k = key1.shape(3),
                d = key1.shape(4);
  const int32_t dtype = query.dtype();
  if (!is_float(dtype)) throw Unsupported();
  for (int index : {kQuery, kDy, kAttention, kDq}) check(call.tensor(index), {b, h, n, m, d}, dtype, index == kDq);
  for (int index : {kKey1, kValue1, kDk1, kDv1}) check(call.tensor(index), {b, h, n, k, d}, dtype, index >= kDq);
  for (int index : {kKey2, kValue2, kDk2, kDv2}) check(call.tensor(index), {b, h, k, m, d}, dtype, index >= kDq);
  for (int index : {kMax, kSum}) check(call.tensor(index), {b, h, n, m, 8}, NPUGRAD_FLOAT32, false);
  const Tensor mask = call.tensor(kMask);
  if (mask.given()) check(mask, {b, 1, n, 1, k}, mask.dtype() == NPUGRAD_BOOL ? NPUGRAD_BOOL : NPUGRAD_UINT8, false);
  if (!product({b, h, n, m, k, d})) {
    for (int index = kDq; index < kTensors; ++index)
      if (call.tensor(index).given()) call.tensor(index).zero();
    return;
  }
  with_float_type(dtype, [&](auto type) { Floyd<decltype(type)>(call, h, b * h, n, m, k, d).run(); });
}

}  // namespace npugrad
