// aclnnGridSampler2DBackward: input (N, C, H, W) sampled at the points of grid (N, OH, OW, 2).
//
//   input_grad[corner]  += w * grad_output[point]      for the pixels around each point, w their weights
//   grid_grad[point]     = slope * sum over channels of grad_output[point] * (differences between those pixels)
//
// The limits are the loads and stores at the corners. Up to 16 channels of an image are laid side by side, so that a
// corner is one cache line: input once more in scratch memory, input_grad as sums in scratch memory, each with a border
// of one pixel; of up to 8 channels, the sums of a pixel beside its input. Corners outside fall on the border, which is
// 0 in the one and never read in the other: no point needs a branch. An image too large for that is cut into windows,
// and each window goes through the groups of points that touch it. With few channels a point waits for memory longer
// than it computes: whatever it reads or writes is fetched groups ahead.
//
// A task is an image and some of its blocks of channels; where these are few, one band of rows of them (grid_bands.h).
// Sums of grid_grad are float32 over a block, float64 over blocks, in order. Where one is not finite it is computed again
// in float64, term by term as the reference does.
#include "grid_exact.h"

namespace npugrad {

void grid_sampler_2d_backward(Call& call) {
  const Tensor grad_output = call.tensor(kGradOutput), input = call.tensor(kInput), grid = call.tensor(kGrid);
  const Tensor input_grad = call.tensor(kInputGrad), grid_grad = call.tensor(kGridGrad);
  require(grad_output.given() && input.given() && grid.given() && grad_output.rank() == 4 && input.rank() == 4);
  const int64_t n = input.shape(0), c = input.shape(1), h = input.shape(2), w = input.shape(3);
  const int64_t oh = grad_output.shape(2), ow = grad_output.shape(3);
  require_shape(grad_output, {n, c, oh, ow});
  require_shape(grid, {n, oh, ow, 2});
  require_shape(input_grad, {n, c, h, w}, true);
  require_shape(grid_grad, {n, oh, ow, 2}, true);
  const Sampling sampling{call.integer(0) == 1, call.integer(1), call.boolean(0), false, call.float64_coordinates()};
  require(call.integer(0) >= 0 && call.integer(0) <= 1);
  require(sampling.padding >= kZeros && sampling.padding <= kReflection);
  const int32_t dtype = input.dtype();
  for (const Tensor& tensor : {grad_output, grid, input_grad, grid_grad})
    if (tensor.given() && tensor.dtype() != dtype) throw Unsupported();
  constexpr int64_t kLongest = 1 << 30;  // pixels are counted in 32 bits
  if (!is_float(dtype) || h > kLongest || w > kLongest) throw Unsupported();
  if (!input.count() || !grad_output.count()) {
    if (input_grad.given()) input_grad.zero();
    if (grid_grad.given()) grid_grad.zero();
    return;
  }
  with_float_type(dtype, [&](auto type) { GridSampler<decltype(type)>(call, sampling).run(); });
}

}  // namespace npugrad
