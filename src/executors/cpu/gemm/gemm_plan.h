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

inline constexpr int64_t split_chunk = 256;  // split_sum: elements of the sum packed at a time

enum class GemmMode {
  nothing,   // C has no elements
  few_rows,  // B unpacked
  own_b,     // each task packs the panels of B that it needs, and its rows of A
  together,  // threads pack operands together, then share them; a large B is still packed by the task that needs it
  split_sum  // a small C of long sums: tasks make parts of the sums from what they pack themselves, which are then added
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
  int64_t k_part = 0;          // own_b: a sum longer than this is made in parts of this length
  int64_t block_rows = 0;      // most rows of A packed at a time
  int64_t b_panel_bytes = 0;
  int64_t chunk_k = 0;         // together: elements of the sum whose operands are packed at a time, a multiple of k_step
  int64_t own_columns = 0;     // together: columns of B that a task packs for itself; 0: B is shared
  int64_t chunk_columns = 0;   // together: columns of B packed at a time, a multiple of nr
  int64_t block_columns = 0;   // together: columns of a block, so that its part of B stays in the second-level cache
  int64_t sum_part = 0;        // split_sum: elements of a part of the sum
  bool reads_rows = false;     // A isn't packed: the kernels read its rows where they are
  bool shares_a = false;       // together: all of A is packed by the threads together, behind B in the workspace
  bool sums_in_c = false;      // together: C holds the sums between chunks of k; otherwise the workspace does
  double work = 0;             // multiply-adds
};

GemmPlan::State decide_gemm(const GemmProblem& problem);

}  // namespace fulmen::cpu
