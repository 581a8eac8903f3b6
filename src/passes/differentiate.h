// Reverse-mode differentiation of a trace, by the rules of the op catalogue. The result is one joint trace: the forward,
// then the gradient nodes. Outputs that depend on an input with requires_grad get a gradient input each; the gradients
// of those inputs are appended to the outputs.
//
//   trace f(x: f32[2]!) {                 trace f(x: f32[2]!, grad_t1: f32[2]) {
//     t1 = tanh(x)                          t1 = tanh(x)
//     return t1                     ->      t3 = tanh_grad(t1, grad_t1)
//   }                                       return t1, t3
//                                         }
//
// Every composite in the trace must have its own gradient rule (decompose first).
#pragma once

#include <vector>

#include "ops/op_def.h"

namespace fulmen {

struct JointTrace {
  Trace trace;
  int output_count = 0;               // outputs of the forward; the gradients follow
  int input_count = 0;                // inputs of the forward; the output gradients follow
  std::vector<int> grad_outputs;      // which outputs have a gradient input, in order
  std::vector<int> inputs_with_grad;  // which inputs the gradients belong to, in order
};

JointTrace differentiate(const Trace& trace);

}  // namespace fulmen
