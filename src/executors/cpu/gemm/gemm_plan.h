// The decisions of a GemmPlan: the problem with roles settled (which operand is "A", which batch dims are rows), the
// kernels, the block sizes. Made by gemm_plan.cpp, run by gemm.cpp.
#pragma once

#include "executors/cpu/gemm/gemm.h"
#include "executors/cpu/gemm/gemm_isa.h"

namespace fulmen::cpu {

// A matrix of an operand, with the batch strides that are left.
struct MatrixLayout {
  DType dtype = DType::f32;
  int64_t row_stride = 0, column_stride = 0;
  BatchStrides batch_strides{};
};

enum class GemmMode {
  nothing,   // C has no elements
  few_rows,  // B unpacked
  own_b,     // each task packs the panels of B that it needs
  shared_b   // threads pack B together, then share it
};

struct GemmPlan::State {
  int64_t m = 0, n = 0, k = 0;
  int batch_dims = 0;
  std::array<int64_t, max_batch_dims> batch_sizes{};
  int64_t batch_count = 1;
  MatrixLayout a, b, c, residual;
  bool swapped = false;  // C is computed transposed: a and b have changed places
  bool has_bias = false, has_residual = false, accumulate = false;
  DType bias_dtype = DType::f32, compute = DType::f32;
  int64_t bias_row_stride = 0, bias_column_stride = 0;
  float alpha = 1, residual_scale = 1;
  Activation activation = Activation::none;

  GemmMode mode = GemmMode::nothing;
  const BlockKernels* kernels = nullptr;
  void (*few_rows)(const FewRowsArgs&) = nullptr;
  void (*rows_to_float)(const PackSource&, int64_t, int64_t, float*) = nullptr;
  int64_t k_padded = 0;
  int64_t k_part = 0;          // a sum longer than this is made in parts of this length
  int64_t block_rows = 0;      // most rows of A packed at a time
  int64_t b_panel_bytes = 0;
  int64_t chunk_columns = 0;   // shared_b: columns of B packed at a time, a multiple of nr
  int64_t block_columns = 0;   // shared_b: columns of a block, so that its part of B stays in the second-level cache
  int64_t a_panel_bytes = 0;
  bool shares_a = false;       // shared_b: all of A is packed by the threads together, behind B in the workspace
  double work = 0;             // multiply-adds
};

GemmPlan::State decide_gemm(const GemmProblem& problem);

}  // namespace fulmen::cpu
