// aclnnGridSampler3DBackward: input (N, C, D, H, W) sampled at the points of grid (N, OD, OH, OW, 3).
//
// Up to 16 channels of a volume are laid side by side in scratch memory, and so are those of grad_output: a voxel is a
// cache line. Points are placed once, and sorted by the slice of the volume in which they lie. Products for grid_grad go
// by ranges of points, float32 in a block of channels and float64 over blocks; input_grad goes by bands of slices, each
// summed in scratch memory by one task, its points in an order that no cut of the bands changes. Where a product is not
// finite it is computed again in float64 as the reference does. Mode nearest and float64 are simpler, and have ways of
// their own.
#include "grid_doubles.h"
#include "grid_nearest.h"
#include "grid_volume.h"

namespace npugrad {

void grid_sampler_3d_backward(Call& call) {
  const Tensor grad_output = call.tensor(0), input = call.tensor(1), grid = call.tensor(2);
  const Tensor input_grad = call.tensor(3), grid_grad = call.tensor(4);
  require(grad_output.given() && input.given() && grid.given() && grad_output.rank() == 5 && input.rank() == 5);
  const int64_t n = input.shape(0), c = input.shape(1), d = input.shape(2), h = input.shape(3), w = input.shape(4);
  const int64_t od = grad_output.shape(2), oh = grad_output.shape(3), ow = grad_output.shape(4);
  require_shape(grad_output, {n, c, od, oh, ow});
  require_shape(grid, {n, od, oh, ow, 3});
  require_shape(input_grad, {n, c, d, h, w}, true);
  require_shape(grid_grad, {n, od, oh, ow, 3}, true);
  const Sampling sampling{call.integer(0) == 1, call.integer(1), call.boolean(0), true, call.float64_coordinates()};
  require(call.integer(0) >= 0 && call.integer(0) <= 1);
  require(sampling.padding >= kZeros && sampling.padding <= kReflection);
  const int32_t dtype = input.dtype();
  for (const Tensor& tensor : {grad_output, grid, input_grad, grid_grad})
    if (tensor.given() && tensor.dtype() != dtype) throw Unsupported();
  constexpr int64_t kMost = 1 << 30;     // axes and points are counted in 32 bits
  constexpr int64_t kDeepest = 1 << 20;  // each slice has numbers of its own, whatever it holds
  const bool doubles = dtype == NPUGRAD_FLOAT64;
  if (!is_float(dtype) && !doubles) throw Unsupported();
  if (d > kDeepest || h > kMost || w > kMost || product({od, oh, ow}) > kMost) throw Unsupported();
  if (!input.count() || !grad_output.count()) {
    if (input_grad.given()) input_grad.zero();
    if (grid_grad.given()) grid_grad.zero();
    return;
  }
  if (doubles) return GridDoubles(call, sampling).run();
  with_float_type(dtype, [&](auto type) {
    using T = decltype(type);
    return sampling.nearest ? GridNearest<T>(call, sampling).run() : GridVolume<T>(call, sampling).run();
  });
}

}  // namespace npugrad
