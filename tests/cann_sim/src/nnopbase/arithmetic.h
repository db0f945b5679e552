// The arithmetic of generated operators, done by another process; see tests/cann_sim/arithmetic.py.
#pragma once

#include <string>
#include <vector>

#include "kernel_run.h"

namespace cann_sim {

struct ArithmeticCall {
  std::string op;
  std::string arguments;  // JSON, as the recorder writes them
  bool in_order;          // the same bits at each launch, whatever the option says
  std::vector<std::string> operands, results;
};

// Has the call computed; throws a Refusal if there is no process that does, it fails, or it takes too long.
void compute_elsewhere(KernelRun& run, const ArithmeticCall& call);

}  // namespace cann_sim
