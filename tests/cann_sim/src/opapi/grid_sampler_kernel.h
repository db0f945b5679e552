// The mathematics of aclnnGridSampler2DBackward and aclnnGridSampler3DBackward.
#pragma once

#include "../nnopbase/kernel_run.h"

namespace cann_sim {

enum Interpolation { kBilinear = 0, kNearest = 1, kBicubic = 2 };
enum Padding { kZeros = 0, kBorder = 1, kReflection = 2 };

struct GridOptions {
  int64_t interpolation;
  int64_t padding;
  bool align_corners;
  bool wants_input_grad;
  bool wants_grid_grad;
  bool channels_last = false;  // of gradOutput, input and inputGrad
};

void grid_sampler_kernel(KernelRun& run, const GridOptions& options);

}  // namespace cann_sim
