// Windows whose pixels are crowded: what points give to them is summed in float64, and rounded once.
#ifndef NPUGRAD_GRID_EXACT_H
#define NPUGRAD_GRID_EXACT_H

#include "grid_task.h"

namespace npugrad {

template <typename T>
template <int L>
__attribute__((noinline)) void GridSampler<T>::Task::sum_exactly(int64_t index, const Window& window, int64_t block,
                                                                 int channels) {
  const int64_t doubles = window.pixels() * L;
  if (slot_.doubles < doubles) {
    slot_.doubles = doubles;
    slot_.exact = whole_.call_.template scratch<double>(doubles);
  }
  std::memset(slot_.exact.get(), 0, static_cast<size_t>(doubles) * sizeof(double));
  const ExactSums<L> sums{slot_.exact.get()};
  const Touching groups = touching(index);
  const bool in_a_row = grad_in_a_row();
  alignas(64) float grad[(kGroup + kWidth) * L];
  Ready ready;
  for (int64_t i = 0; i < groups.count; ++i) {
    prepare<L, false, false>(groups[i], window, false, ready);
    read_grad<L>(groups[i], block, channels, in_a_row, grad);
    for (int j = 0; j < kGroup; ++j)
      for (int corner = 0; corner < (whole_.sampling_.nearest ? 1 : 4); ++corner)
        sums.add(ready.pixel[j] + (corner & 1) + (corner >> 1) * window.pitch(),
                 whole_.sampling_.nearest ? 1.0f : ready.weight[corner][j], grad + j * L);
  }
  T* to = whole_.input_grad_.template data<T>() + (n_ * whole_.c_ + block * whole_.block_) * whole_.h_ * whole_.w_ +
          window.row * whole_.w_ + window.column;
  for (int64_t y = 0; y < window.rows; ++y, to += whole_.w_)
    sums.write((y + 1) * window.pitch() + 1, window.columns, to, whole_.h_ * whole_.w_, channels);
}

}  // namespace npugrad
#endif
