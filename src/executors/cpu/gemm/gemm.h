// Matrix products on the CPU: C = epilogue(A[m,k] * B[k,n]), batched, any strides, with the conversions that autocast
// asks for made while operands are packed. The result of a given problem doesn't depend on the thread count: work is
// split over rows and columns only, and each element is summed in the same order.
//
// Kernels for each instruction set are in gemm_f32.simd.cpp, gemm_bf16.matrix.cpp and few_rows.simd.cpp; the ops that
// use them are in matmul_kernels.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/dtype.h"

namespace fulmen::cpu {

inline constexpr int max_batch_dims = 4;
using BatchStrides = std::array<int64_t, max_batch_dims>;  // in elements; 0 repeats a matrix

enum class Activation : uint8_t { none, relu, gelu_erf, gelu_tanh, silu };

// What happens to a finished sum s, in this order, all in float, rounded to C's dtype once:
//   s = alpha * s + bias[column];  s = activation(s);  s += residual_scale * residual[row, column];  s += C if accumulate
struct Epilogue {
  float alpha = 1.0f;
  bool has_bias = false;
  DType bias_dtype = DType::f32;  // f32, bf16 or f16, like every operand
  int64_t bias_stride = 1;
  Activation activation = Activation::none;
  bool has_residual = false;
  DType residual_dtype = DType::f32;
  int64_t residual_row_stride = 0, residual_column_stride = 1;
  BatchStrides residual_batch_strides{};
  float residual_scale = 1.0f;
  bool accumulate = false;
};

struct GemmOperand {
  DType dtype = DType::f32;  // f32, bf16 or f16
  int64_t row_stride = 0, column_stride = 1;  // in elements, any value; C's must not make elements overlap
  BatchStrides batch_strides{};
};

struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;  // 0 is allowed: k = 0 gives the epilogue of zeros
  int batch_dims = 0;
  std::array<int64_t, max_batch_dims> batch_sizes{};
  GemmOperand a, b, c;
  // What products are made in: f32 is true float; bf16 and f16 round the operands to that dtype first. Sums are
  // always float.
  DType compute = DType::f32;
  Epilogue epilogue;
};

// A problem with its decisions made: which kernels, which blocks. Thread-safe, run as often as wanted.
class GemmPlan {
 public:
  explicit GemmPlan(const GemmProblem& problem);  // InternalError for dtypes it can't take
  ~GemmPlan();
  GemmPlan(GemmPlan&&) noexcept;
  GemmPlan& operator=(GemmPlan&&) noexcept;

  size_t workspace_bytes() const;
  // bias and residual may be null when the epilogue has none; workspace is workspace_bytes() bytes, 64-byte aligned.
  // C must not overlap the operands; the residual may be C itself.
  void run(const void* a, const void* b, void* c, const void* bias, const void* residual, void* workspace) const;

  // Inference: B is packed once (into packed_b_bytes() bytes, 64-byte aligned) and passed instead of B. Not for
  // problems whose B differs along the batch: can_prepack_b() says so.
  bool can_prepack_b() const;
  size_t packed_b_bytes() const;
  void pack_b(const void* b, void* packed) const;
  void run_packed(const void* a, const void* packed_b, void* c, const void* bias, const void* residual,
                  void* workspace) const;

  struct State;

 private:
  std::unique_ptr<const State> state_;
};

bool gemm_takes(DType dtype);  // f32, bf16, f16

size_t gemm_workspace_bytes(const GemmProblem& problem);
void gemm(const GemmProblem& problem, const void* a, const void* b, void* c, const void* bias, const void* residual,
          void* workspace);

}  // namespace fulmen::cpu
