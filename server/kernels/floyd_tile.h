// Operands of Floyd attention as the tasks see them, and the memory in which a thread computes a tile.
#ifndef NPUGRAD_FLOYD_TILE_H
#define NPUGRAD_FLOYD_TILE_H

#include <algorithm>
#include <cstdint>

#include "floyd_blocks.h"
#include "runtime.h"

namespace npugrad {
namespace floyd {

constexpr int kRange = 64;    // n of a task
constexpr int kRows = 32;     // n of a tile
constexpr int kColumns = 32;  // m of a tile
// Floats from n to n + 1 in a tile; see kBlockStep.
constexpr int kRowStep = kColumns * kBlock + 16;

// A tensor (batch, head, row, column, element) in the order of axes that the tasks see.
template <typename T>
struct Grid {
  T* data = nullptr;
  int64_t batch = 0, head = 0, row = 0, column = 0, element = 0;

  Grid() = default;
  Grid(const Tensor& tensor, bool exchanged) {
    if (!tensor.given()) return;
    data = tensor.data<T>();
    batch = tensor.stride(0), head = tensor.stride(1), element = tensor.stride(4);
    row = tensor.stride(exchanged ? 3 : 2), column = tensor.stride(exchanged ? 2 : 3);
  }
  T* at(int64_t b, int64_t h, int64_t r, int64_t c) const {
    return data + b * batch + h * head + r * row + c * column;
  }
};

// Takes pieces of a block of memory one after the other; with no block, only counts.
class Carver {
 public:
  explicit Carver(float* block) : block_(block) {}
  float* take(int64_t count) {
    float* found = block_ ? block_ + used_ : nullptr;
    // Whole lines, and not all pieces at the same place in their pages.
    used_ += ceil_div(count, kStagger) * kStagger + kStagger;
    return found;
  }
  int64_t used() const { return used_; }

 private:
  static constexpr int64_t kStagger = 5 * 16;
  float* const block_;
  int64_t used_ = 0;
};

// Memory of a thread: operands of a tile as blocks or rows of float32.
struct Tile {
  Tile(Carver& memory, int64_t chunks) {
    for (float** block : {&key1, &key1_transposed, &value1_transposed, &dk1, &dv1})
      *block = memory.take(chunks * kRange * kBlockStep);
    for (float** block : {&key2, &key2_transposed, &value2, &value2_transposed})
      *block = memory.take(chunks * kColumns * kBlockStep);
    for (float** rows : {&query, &dy}) *rows = memory.take(chunks * kRows * kRowStep);
    for (float** rows : {&scores, &scores_grad}) *rows = memory.take(kRows * kRowStep);
    zeros = memory.take(kPairRows * kBlockStep);
    if (zeros) std::fill_n(zeros, kPairRows * kBlockStep, 0.0f);
    mask = reinterpret_cast<int32_t*>(memory.take(std::max(kRange, kColumns) * kBlock));
    soon.reserve(kPairRows + 3 * chunks);
    later.reserve(2 * (kBlock + kRows));
  }
  float* zeros;  // as many blocks as are taken together
  int32_t* mask;
  Ahead soon, later;
  float *key1, *key1_transposed, *value1_transposed, *dk1, *dv1;  // [chunk of d][n]
  float *key2, *key2_transposed, *value2, *value2_transposed;     // [chunk of d][m]
  float *query, *dy;            // [chunk of d][n][m][d]
  float *scores, *scores_grad;  // [n][m][k]; the products they are made from at first
};

// Places in them.
NPUGRAD_INLINE int64_t n_block(int64_t chunk, int64_t i) { return (chunk * kRange + i) * kBlockStep; }
NPUGRAD_INLINE int64_t m_block(int64_t chunk, int64_t j) { return (chunk * kColumns + j) * kBlockStep; }
NPUGRAD_INLINE int64_t row(int64_t chunk, int64_t i) { return (chunk * kRows + i) * kRowStep; }

}  // namespace floyd
}  // namespace npugrad
#endif
