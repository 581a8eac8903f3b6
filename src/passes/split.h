// Splits a joint trace into the forward and the backward program and chooses what the forward saves. Everything that
// doesn't depend on an output's gradient may run in either; the choice is a minimum cut of the bytes saved, where cheap
// nodes (views, pointwise, row reductions) may be computed again in the backward and costly ones (matrix products,
// attention, scatter) may not. Trace inputs are kept alive anyway and cost nothing.
//
//   t1 = linear(x, w)                          forward: t1, t2, returns t2, saves t1
//   t2 = gelu(t1)                        ->    backward: t3 = gelu_grad(t1, grad_t2); ...
//   t3 = gelu_grad(t1, grad_t2) ...
#pragma once

#include "passes/differentiate.h"

namespace fulmen {

struct SplitTrace {
  Trace forward;   // outputs: the forward's, then the saved values
  Trace backward;  // inputs: saved inputs, saved values, output gradients; outputs: the input gradients
  int output_count = 0;
  std::vector<int> saved_inputs;  // forward inputs that the backward reads
  size_t saved_bytes = 0;
};

SplitTrace split(const JointTrace& joint);

}  // namespace fulmen
