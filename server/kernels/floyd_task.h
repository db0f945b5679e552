// One task of Floyd attention: scores and sums of a range of n and one of k, tile by tile.
#ifndef NPUGRAD_FLOYD_TASK_H
#define NPUGRAD_FLOYD_TASK_H

#include <algorithm>
#include <cfloat>
#include <cstdint>

#include "floyd_blocks.h"
#include "floyd_schedule.h"
#include "floyd_tile.h"
#include "runtime.h"

namespace npugrad {
namespace floyd {

// What the tasks of a call share: sizes, operands with n and m as the tasks see them, and sums between tasks.
template <typename T>
struct Work {
  bool exchanged;  // n is the operands' m
  int64_t heads, n, m, k, d;
  int64_t chunks;  // of d, kBlock each
  float scale;
  Grid<T> query, key1, value1, key2, value2, dy, attention, dq, dk1, dv1, dk2, dv2;
  Grid<float> max, sum;
  Grid<uint8_t> mask;
  float *dq_sums = nullptr, *dk2_sums = nullptr, *dv2_sums = nullptr;
  float* rows = nullptr;  // softmax_max, 1 / softmax_sum and delta of each (n, m)
};

// One visit at work; n, m and k are those of its operands, `i`, `j` and `l` those within the tile.
template <typename T>
class Task {
 public:
  Task(const Work<T>& all, Tile& tile, const Visit& visit)
      : all_(all), tile_(tile), visit_(visit), b_(visit.pair / all.heads), h_(visit.pair % all.heads),
        n_(visit.n_range, kRange, all.n), k_(visit.k_range, kBlock, all.k),
        keys_(static_cast<int>(k_.size())) {}

  void run() {
    pack_keys<true>(all_.key1, tile_.key1, tile_.key1_transposed);
    pack_keys<true>(all_.value1, tile_.dv1, tile_.value1_transposed);
    if (!all_.exchanged) pack_mask(n_);
    for (int64_t index = 0; index * kColumns < all_.m; ++index) run_tiles(Span(index, kColumns, all_.m));
    for (int i = 0; i < static_cast<int>(n_.size()); ++i)
      for (int l = 0; l < keys_; ++l)
        for (int64_t c = 0; c < all_.chunks; ++c) {
          const int64_t from = n_block(c, i) + l * kBlock;
          write(all_.dk1, n_.begin + i, k_.begin + l, c, tile_.dk1 + from, all_.scale);
          write(all_.dv1, n_.begin + i, k_.begin + l, c, tile_.dv1 + from, 1.0f);
        }
  }

 private:
  // The tiles of some m: one after the other, so that key2 and value2 are packed once.
  void run_tiles(const Span& m) {
    m_ = m.begin, columns_ = static_cast<int>(m.size());
    pack_keys<false>(all_.key2, tile_.key2, tile_.key2_transposed);
    pack_keys<false>(all_.value2, tile_.value2, tile_.value2_transposed);
    if (all_.exchanged) pack_mask(m);
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
    for (int i = 0; i < rows_; i += kPairRows) {
      expect_dq(i);
      if (softmax_of(i)) {
        add_dq<true>(i);
      } else {
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
    constexpr int64_t kStep = kLine / static_cast<int64_t>(sizeof(T));
    for (int64_t d = 0; d < all_.d; d += kStep) __builtin_prefetch(vector + d);
  }

  // Blocks of key1 or value1 for the n of the task, or of key2 or value2 for the m of the tile.
  template <bool ByN>
  void pack_keys(const Grid<T>& from, float* natural, float* transposed) const {
    const int blocks = ByN ? static_cast<int>(n_.size()) : columns_;
    const auto copy = [&](int index, int l) {
      const int64_t key = k_.begin + l;
      const T* data = ByN ? from.at(b_, h_, n_.begin + index, key) : from.at(b_, h_, key, m_ + index);
      fetch(data + (ByN ? from.column : from.row));
      for (int64_t c = 0; c < all_.chunks; ++c) {
        const int64_t skip = c * kBlock, to = (ByN ? n_block(c, index) : m_block(c, index)) + l * kBlock;
        pack_row(data + skip * from.element, from.element, all_.d - skip, natural + to);
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
    for (int64_t c = 0; c < all_.chunks; ++c)
      for (int i = 0; i < blocks; ++i) {
        const int64_t place = ByN ? n_block(c, i) : m_block(c, i);
        // What an earlier call left there must not decide how scores are computed.
        std::fill(natural + place + keys_ * kBlock, natural + place + kBlock * kBlock, 0.0f);
        transpose_block(natural + place, transposed + place);
      }
  }

  // Rows of query and dy, and at the first visit what is the same for all keys.
  void pack_rows(int i, int j) const {
    const int64_t n = n_.begin + first_ + i, m = m_ + j;
    for (int64_t c = 0; c < all_.chunks; ++c) {
      const int64_t to = row(c, i) + j * kBlock, skip = c * kBlock, left = all_.d - skip;
      const auto& query = all_.query;
      const auto& dy = all_.dy;
      if (!c) {
        fetch(query.at(b_, h_, n, m) + query.row);
        fetch(dy.at(b_, h_, n, m) + dy.row);
      }
      pack_row(query.at(b_, h_, n, m) + skip * query.element, query.element, left, tile_.query + to);
      pack_row(dy.at(b_, h_, n, m) + skip * dy.element, dy.element, left, tile_.dy + to);
    }
    if (!visit_.n_first) return;
    float* found = statistics(i, j);
    found[0] = read(all_.max.at(b_, h_, n, m));
    found[1] = static_cast<float>(1.0 / read(all_.sum.at(b_, h_, n, m)));
    found[2] = static_cast<float>(delta(i, j));
  }

  // dy . attention_in
  double delta(int i, int j) const {
    const auto& attention = all_.attention;
    const T* data = attention.at(b_, h_, n_.begin + first_ + i, m_ + j);
    double found = 0;
    for (int64_t c = 0; c < all_.chunks; ++c) {
      const float* dy = tile_.dy + row(c, i) + j * kBlock;
      Floats products = {};
      for (int64_t d = 0; d < kBlock; d += kWidth) {
        const int64_t place = c * kBlock + d;
        products +=
            load(dy + d) * load_strided(data + place * attention.element, attention.element, all_.d - place);
      }
      found += sum(products);
    }
    return found;
  }

  // softmax_max, 1 / softmax_sum and delta of a row.
  float* statistics(int i, int j) const {
    return all_.rows + ((visit_.n_place * kRange + first_ + i) * all_.m + m_ + j) * 3;
  }

  void pack_mask(const Span& rows) const {
    const auto& mask = all_.mask;
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
    const int64_t m = more ? m_ : m_ + kColumns, columns = std::min<int64_t>(kColumns, all_.m - m);
    const auto expect = [&](const Grid<T>& grid, int64_t row) {
      if (columns > 0 && grid.element == 1 && grid.column == all_.d)
        tile_.later.add(grid.at(b_, h_, row, m), columns * all_.d * static_cast<int64_t>(sizeof(T)));
    };
    if (!more) {
      for (int l = 0; l < keys_; ++l) expect(all_.key2, k_.begin + l);
      for (int l = 0; l < keys_; ++l) expect(all_.value2, k_.begin + l);
    }
    const int64_t begin = more ? first_ + kRows : 0;
    const Span next(begin / kRows, kRows, n_.size());
    for (int64_t i = next.begin; i < next.end; ++i) expect(all_.query, n_.begin + i);
    for (int64_t i = next.begin; i < next.end; ++i) expect(all_.dy, n_.begin + i);
  }
  // Sums of the rows that come next.
  void expect_dq(int i) const {
    tile_.soon.clear();
    const int64_t bytes = columns_ * all_.chunks * kBlock * static_cast<int64_t>(sizeof(float));
    for (int r = i; r < std::min(i + kPairRows, rows_); ++r) tile_.soon.add(dq_sums(r, 0), bytes);
    // Blocks of the n after them.
    const int64_t next = first_ + i + kPairRows < n_.size() ? first_ + i + kPairRows : 0;
    constexpr int64_t kBlocks = kPairRows * kBlockStep * static_cast<int64_t>(sizeof(float));
    for (const float* blocks : {tile_.key1_transposed, tile_.value1_transposed, tile_.key1})
      for (int64_t c = 0; c < all_.chunks; ++c) tile_.soon.add(blocks + n_block(c, next), kBlocks);
  }
  // ---- scores

  // P and dS of kPairRows rows; false if a number on the way was not finite. Infinity times a sum is not the sum of
  // infinity times each: then the formulas are computed term by term, with `Together` false. Scores and what becomes
  // dS are looked at apart, as no bit of P may depend on the values.
  bool softmax_of(int i) const {
    scores_of<true>(i);
    scores_grad_of<true>(i);
    Zeros zeros;
    softmax_rows(i, zeros);
    const bool scores = all_finite(zeros.scores), grads = all_finite(zeros.grads);
    if (scores && grads) return true;
    scores ? scores_of<true>(i) : scores_of<false>(i);  // P lies there by now
    grads ? scores_grad_of<true>(i) : scores_grad_of<false>(i);
    softmax_rows(i, zeros);
    return false;
  }

  template <bool Together>
  void scores_of(int i) const {
    paired_scores<Together>(i, tile_.query, tile_.key1_transposed, tile_.key2_transposed, tile_.scores);
  }
  template <bool Together>
  void scores_grad_of(int i) const {
    paired_scores<Together>(i, tile_.dy, tile_.value1_transposed, tile_.value2_transposed, tile_.scores_grad);
  }

  // Each becomes NaN with the first number that is not finite.
  struct Zeros {
    Floats scores = {}, grads = {};
  };

  NPUGRAD_INLINE void softmax_rows(int i, Zeros& zeros) const {
    for (int r = i; r < std::min(i + kPairRows, rows_); ++r)
      for (int j = 0; j < columns_; ++j) softmax(r, j, zeros);
  }

  template <bool Together>
  void paired_scores(int i, const float* rows, const float* by_n, const float* by_m, float* target) const {
    for (int64_t c = 0; c < all_.chunks; ++c) {
      const int64_t length = std::min<int64_t>(kBlock, all_.d - c * kBlock);
      for (int j = 0; j < columns_; j += kPairColumns) {
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
      pair_product<kRowStep, true>(
          length, a, first, second, target, row_step, column_step, tile_.soon.take());
    } else {
      pair_product<kRowStep, false>(
          length, a, first, second, target, row_step, column_step, tile_.soon.take());
    }
  }

  void softmax(int i, int j, Zeros& zeros) const {
    const float* row_values = statistics(i, j);
    const Floats max = splat(row_values[0]), inverse = splat(row_values[1]), delta = splat(row_values[2]);
    float *scores = tile_.scores + row(0, i) + j * kBlock, *grads = tile_.scores_grad + row(0, i) + j * kBlock;
    const int32_t* mask = all_.mask.data ? &tile_.mask[(all_.exchanged ? j : first_ + i) * kBlock] : nullptr;
#pragma GCC unroll 8
    for (int v = 0; v < kBlock; v += kWidth) {
      const Floats score = load(scores + v), grad = load(grads + v);
      zeros.scores += score * 0.0f;
      zeros.grads += grad * 0.0f;
      Floats x = score * all_.scale - max;
      if (mask) x = load_raw<int32_t>(mask + v) ? splat(-FLT_MAX) - max : x;
      const Floats p = exp(x) * inverse;
      store(scores + v, p);
      store(grads + v, p * (grad - delta));
    }
  }

  // ---- sums

  float* dq_sums(int i, int j) const {
    const int64_t place = (visit_.n_place * kRange + first_ + i) * all_.m + m_ + j;
    return all_.dq_sums + place * all_.chunks * kBlock;
  }
  int64_t dk2_sums(int64_t c, int j) const {
    const int64_t place = visit_.k_place * all_.m + m_ + j;
    return (place * all_.chunks + c) * kBlock * kBlock;
  }

  template <bool Together>
  void add_dq(int i) const {
    const int64_t column_step = all_.chunks * kBlock, row_step = all_.m * column_step;
    for (int64_t c = 0; c < all_.chunks; ++c)
      for (int j = 0; j < columns_; j += kPairColumns) {
        const float *a = tile_.scores_grad + row(0, i) + j * kBlock;
        const float *first = tile_.key1 + n_block(c, first_ + i), *second = tile_.key2 + m_block(c, j);
        float* to = dq_sums(i, j) + c * kBlock;
        if (i + kPairRows > rows_ || j + kPairColumns > columns_) {
          add_part_of_dq<Together>(i, j, a, first, second, to);
        } else {
          add_pair<Together>(keys_, a, first, second, to, row_step, column_step, !visit_.n_first);
        }
      }
  }

  // Where the tile ends within the rows that are computed together.
  template <bool Together>
  void add_part_of_dq(int i, int j, const float* a, const float* first, const float* second, float* to) const {
    const int64_t column_step = all_.chunks * kBlock, row_step = all_.m * column_step;
    constexpr int kStep = kPairColumns * kBlock;
    alignas(64) float found[kPairRows * kStep];
    add_pair<Together>(keys_, a, first, second, found, kStep, kBlock, false);
    for (int r = 0; r < std::min(kPairRows, rows_ - i); ++r)
      for (int q = 0; q < std::min(kPairColumns, columns_ - j); ++q)
        for (int v = 0; v < kBlock; v += kWidth) {
          float* target = to + r * row_step + q * column_step + v;
          const Floats value = load(found + r * kStep + q * kBlock + v);
          store(target, !visit_.n_first ? load(target) + value : value);
        }
  }

  void add_dk1() const {
    for (int64_t c = 0; c < all_.chunks; ++c)
      for (int i = 0; i < rows_; ++i) {
        const auto add = [&](const float* scores, const float* vectors, float* sums) {
          add_product<kBlock, kBlockStep>(
              columns_, scores + row(0, i), vectors + row(c, i), sums + n_block(c, first_ + i), !m_, tile_.later);
        };
        add(tile_.scores_grad, tile_.query, tile_.dk1);
        add(tile_.scores, tile_.dy, tile_.dv1);
      }
  }

  void add_dk2() const {
    const bool fresh = visit_.k_first && !first_;
    for (int j = 0; j < columns_; ++j)
      for (int64_t c = 0; c < all_.chunks; ++c) {
        const auto add = [&](const float* scores, const float* vectors, float* sums) {
          add_product<kRowStep, kBlock * kBlock>(
              rows_, scores + j * kBlock, vectors + row(c, 0) + j * kBlock, sums + dk2_sums(c, j), fresh,
              tile_.later);
        };
        add(tile_.scores_grad, tile_.query, all_.dk2_sums);
        add(tile_.scores, tile_.dy, all_.dv2_sums);
      }
  }

  // ---- results

  void write(const Grid<T>& to, int64_t row, int64_t column, int64_t chunk, const float* from, float factor) const {
    if (!to.data) return;
    write_row(from, factor, all_.d - chunk * kBlock, to.at(b_, h_, row, column) + chunk * kBlock);
  }

  void write_dq() const {
    for (int i = 0; i < rows_; ++i)
      for (int j = 0; j < columns_; ++j)
        for (int64_t c = 0; c < all_.chunks; ++c)
          write(all_.dq, n_.begin + first_ + i, m_ + j, c, dq_sums(i, j) + c * kBlock, all_.scale);
  }

  void write_dk2() const {
    for (int l = 0; l < keys_; ++l)
      for (int j = 0; j < columns_; ++j)
        for (int64_t c = 0; c < all_.chunks; ++c) {
          const int64_t from = dk2_sums(c, j) + l * kBlock;
          write(all_.dk2, k_.begin + l, m_ + j, c, &all_.dk2_sums[from], all_.scale);
          write(all_.dv2, k_.begin + l, m_ + j, c, &all_.dv2_sums[from], 1.0f);
        }
  }

  const Work<T>& all_;
  Tile& tile_;
  const Visit visit_;
  const int64_t b_, h_;
  const Span n_, k_;
  const int keys_;
  int first_ = 0, rows_ = 0;
  int64_t m_ = 0;
  int columns_ = 0;
};

}  // namespace floyd
}  // namespace npugrad
#endif
