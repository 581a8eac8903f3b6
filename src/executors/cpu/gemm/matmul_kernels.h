// The cpu executor's kernels for the ops that are matrix products: matmul, bmm, dot, linear, addmm, baddbmm. Strides
// of operands and of the result are read from the call's types, so transposed, sliced and expanded views run without
// copies. Gradients of these ops are matmuls of transposed views, so the same kernels serve training.
#pragma once

#include <memory>
#include <variant>

#include "executors/cpu/gemm/gemm.h"
#include "executors/executor.h"

namespace fulmen::cpu {

// Claims f32, bf16 and f16 calls of those ops on the CPU; others are refused with the reason.
Claim claim_matmul(const Call& call);

// For a call that claim_matmul claims.
std::unique_ptr<Kernel> make_matmul_kernel(const Call& call);

// What a product looks like as a GemmProblem, for callers that add an epilogue of their own; the same refusals.
// Operand numbers say which of the call's inputs play which role, -1 for none.
struct MatmulProblem {
  GemmProblem problem;
  int a = 0, b = 1, bias = -1, residual = -1;
};
std::variant<MatmulProblem, Refusal> matmul_problem(const Call& call);

// A kernel over inputs (a, b), then bias and residual where the problem's epilogue has them, and one output.
std::unique_ptr<Kernel> make_gemm_kernel(const GemmProblem& problem);
// The same with the roles given.
std::unique_ptr<Kernel> make_gemm_kernel(const MatmulProblem& problem);

}  // namespace fulmen::cpu
