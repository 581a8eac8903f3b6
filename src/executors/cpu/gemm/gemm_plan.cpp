#include "executors/cpu/gemm/gemm_plan.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "executors/cpu/dispatch.h"

namespace fulmen::cpu {
namespace {

constexpr int64_t packed_a_bytes = 384 << 10;      // a thread's block of A, which stays in the second-level cache
constexpr int64_t packed_b_chunk_bytes = 8 << 20;  // of the workspace, for B
constexpr int64_t packed_b_block_bytes = 512 << 10;
constexpr int64_t own_b_block_bytes = 384 << 10;   // of B, packed by a task for itself
constexpr int64_t small_b_bytes = 1 << 20;         // up to here packing B together costs little
constexpr int64_t least_own_blocks = 12;           // tasks that leave no thread idle for long
constexpr int64_t most_shared_a_bytes = 16 << 20;
constexpr int64_t most_block_rows = 256;
constexpr int64_t longest_sum = 2048;              // own_b: elements of a sum made in one go
constexpr int64_t longest_chunk = 1024;            // elements of a sum whose operands are packed together
constexpr int64_t most_split_c_bytes = 512 << 10;  // split_sum: of C, which each part has once
constexpr int64_t most_wide_columns = 512;         // of B, where A is read as it lies
constexpr int64_t most_wide_k = 1024;
constexpr int64_t few_row_tiles = 256;             // rows up to which A is small, packed or not
constexpr int64_t most_split_columns = 2048;
constexpr int64_t most_sum_parts = 4;              // the same for any number of threads, for the same sums
constexpr int64_t most_row_bytes = 16 << 10;       // between rows of A that are read where they are
constexpr int64_t most_sum_bytes = 64 << 20;       // of the workspace, for sums between chunks

MatrixLayout layout_of(const GemmOperand& operand) {
  return {operand.dtype, operand.row_stride, operand.column_stride, operand.batch_strides};
}

void transpose(MatrixLayout& layout) { std::swap(layout.row_stride, layout.column_stride); }

void swap_roles(GemmPlan::State& s) {
  std::swap(s.a, s.b);
  transpose(s.a);
  transpose(s.b);
  transpose(s.c);
  transpose(s.residual);
  std::swap(s.m, s.n);
  std::swap(s.bias_row_stride, s.bias_column_stride);
  s.swapped = true;
}

void drop_batch_dim(GemmPlan::State& s, int dim) {
  for (int d = dim; d + 1 < s.batch_dims; ++d) {
    const size_t to = static_cast<size_t>(d), from = to + 1;
    s.batch_sizes[to] = s.batch_sizes[from];
    for (MatrixLayout* layout : {&s.a, &s.b, &s.c, &s.residual}) layout->batch_strides[to] = layout->batch_strides[from];
  }
  --s.batch_dims;
}

// A batch that shares B is more rows, if rows follow one another from matrix to matrix: x[4,256,k] * w is one product
// of 1024 rows.
void merge_batch_into_rows(GemmPlan::State& s) {
  for (int d = s.batch_dims - 1; d >= 0; --d) {
    const size_t i = static_cast<size_t>(d);
    const auto follows = [&](const MatrixLayout& layout) {
      return s.m == 1 || layout.batch_strides[i] == s.m * layout.row_stride;
    };
    const bool all_follow = follows(s.a) && follows(s.c) && (!s.has_residual || follows(s.residual));
    if (s.b.batch_strides[i] != 0 || s.bias_row_stride != 0 || !all_follow) return;
    if (s.m == 1)
      for (MatrixLayout* layout : {&s.a, &s.c, &s.residual}) layout->row_stride = layout->batch_strides[i];
    s.m *= s.batch_sizes[i];
    drop_batch_dim(s, d);
  }
}

void choose_kernels(GemmPlan::State& s) {
  const Isa isa = chosen_isa();
  switch (isa) {
    case Isa::generic:
      s.kernels = &generic::f32_block_kernels();
      s.few_rows = generic::multiply_few_rows;
      s.rows_to_float = generic::rows_to_float;
      return;
#if defined(FULMEN_X86)
    case Isa::avx2:
      s.kernels = &avx2::f32_block_kernels();
      s.few_rows = avx2::multiply_few_rows;
      s.rows_to_float = avx2::rows_to_float;
      return;
    default:
      s.kernels = &avx512::f32_block_kernels();
      s.few_rows = avx512::multiply_few_rows;
      s.rows_to_float = avx512::rows_to_float;
      if (s.compute == DType::bf16 && isa == Isa::avx512_bf16) s.kernels = &avx512_bf16::bf16_block_kernels();
      if (s.compute == DType::bf16 && isa == Isa::amx) s.kernels = &amx::bf16_block_kernels();
      return;
#else
    default: throw InternalError("internal: gemm has no kernels for this instruction set");
#endif
  }
}

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Rows of A are read where they lie for a B of few columns, in wide tiles if they fit; what many columns read is packed.
void choose_tile(GemmPlan::State& s) {
  if (!s.reads_rows || s.m <= few_row_tiles) return;
  if (s.n > most_wide_columns || s.k > most_wide_k) {
    s.reads_rows = false;
    return;
  }
#if defined(FULMEN_X86)
  const BlockKernels& wide = avx512::f32_wide_block_kernels();
  if (chosen_isa() >= Isa::avx512 && (round_up(s.n, wide.nr) - s.n) * 16 <= s.n) s.kernels = &wide;
#endif
}

// A weight's gradient: both operands lie across the sum, so both are packed, and a core that packs together with others
// waits for what they hold in their caches. Parts of the sum need nothing of one another.
bool splits_sum(const GemmPlan::State& s) {
  const bool lies_across = s.a.row_stride == 1 && s.b.column_stride == 1 && s.m > 1 && s.n > 1;
  const bool is_plain = s.c.dtype == DType::f32 && s.c.column_stride == 1 && s.alpha == 1.0f && s.activation == Activation::none && !s.has_bias &&
                        !s.has_residual && !s.accumulate;
  return s.compute == DType::f32 && lies_across && is_plain && s.batch_count == 1 && s.k >= 2 * split_chunk && s.n <= most_split_columns &&
         s.m * s.n * static_cast<int64_t>(sizeof(float)) <= most_split_c_bytes;
}


}  // namespace

GemmPlan::State decide_gemm(const GemmProblem& p) {
  FULMEN_CHECK(gemm_takes(p.a.dtype) && gemm_takes(p.b.dtype) && gemm_takes(p.c.dtype) && gemm_takes(p.compute));
  FULMEN_CHECK(p.m >= 0 && p.n >= 0 && p.k >= 0 && p.batch_dims >= 0 && p.batch_dims <= max_batch_dims);
  GemmPlan::State s;
  s.m = p.m, s.n = p.n, s.k = p.k;
  s.batch_dims = p.batch_dims;
  s.batch_sizes = p.batch_sizes;
  s.a = layout_of(p.a), s.b = layout_of(p.b), s.c = layout_of(p.c);
  const Epilogue& e = p.epilogue;
  s.residual = {e.residual_dtype, e.residual_row_stride, e.residual_column_stride, e.residual_batch_strides};
  s.has_bias = e.has_bias, s.has_residual = e.has_residual, s.accumulate = e.accumulate;
  s.bias_dtype = e.bias_dtype, s.bias_column_stride = e.bias_stride;
  s.alpha = e.alpha, s.residual_scale = e.residual_scale, s.activation = e.activation;
  s.compute = p.compute;

  for (int d = s.batch_dims - 1; d >= 0; --d)
    if (s.batch_sizes[static_cast<size_t>(d)] == 1) drop_batch_dim(s, d);
  for (int d = 0; d < s.batch_dims; ++d) s.batch_count *= s.batch_sizes[static_cast<size_t>(d)];
  if (s.m == 0 || s.n == 0 || s.batch_count == 0) return s;
  merge_batch_into_rows(s);
  if (s.n == 1) s.b.column_stride = s.c.column_stride = 1;  // never stepped along
  if (s.k == 1) s.a.column_stride = s.b.row_stride = 1;
  const bool columns_are_rows = s.c.column_stride != 1 && s.c.row_stride == 1;
  if ((s.n <= max_few_rows && s.n < s.m) || (columns_are_rows && s.m > max_few_rows)) swap_roles(s);
  s.batch_count = 1;
  for (int d = 0; d < s.batch_dims; ++d) s.batch_count *= s.batch_sizes[static_cast<size_t>(d)];

  choose_kernels(s);
  // Rows a multiple of a page apart would meet in the same few lines of the first-level cache.
  s.reads_rows = s.kernels->reads_rows && s.a.dtype == DType::f32 && s.compute == DType::f32 && s.a.column_stride == 1 && s.k > 1 &&
                 s.a.row_stride >= 0 && s.a.row_stride * 4 <= most_row_bytes && s.a.row_stride % 1024 != 0;
  choose_tile(s);
  const BlockKernels& kernels = *s.kernels;
  s.work = static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(std::max<int64_t>(s.k, 1)) *
           static_cast<double>(s.batch_count);
  s.k_padded = round_up(s.k, kernels.k_step);
  s.k_part = s.k <= longest_sum + longest_sum / 2 ? std::max<int64_t>(s.k, 1) : longest_sum;
  s.b_panel_bytes = kernels.nr * s.k_padded * kernels.element_bytes;
  const int64_t a_row_bytes = round_up(s.k_part, kernels.k_step) * kernels.element_bytes;
  const int64_t fitting = packed_a_bytes / a_row_bytes / kernels.mr * kernels.mr;
  s.block_rows = std::clamp<int64_t>(fitting, kernels.mr, most_block_rows / kernels.mr * kernels.mr);

  const bool b_has_unit_stride = s.b.row_stride == 1 || s.b.column_stride == 1;
  if (s.m <= max_few_rows && b_has_unit_stride) {
    s.mode = GemmMode::few_rows;
  } else if (s.k == 0 || s.m <= s.block_rows || (s.batch_count > 1 && s.work / static_cast<double>(s.batch_count) < 3e7)) {
    s.mode = GemmMode::own_b;
  } else if (splits_sum(s)) {
    s.mode = GemmMode::split_sum;
    const int64_t chunks = (s.k + split_chunk - 1) / split_chunk, parts = std::min(chunks, most_sum_parts);
    s.sum_part = (chunks + parts - 1) / parts * split_chunk;
    s.block_rows = s.m;
  } else {
    s.mode = GemmMode::together;
    const int64_t chunks = s.k <= longest_chunk + longest_chunk / 2 ? 1 : (s.k + longest_chunk - 1) / longest_chunk;
    s.chunk_k = chunks == 1 ? s.k_padded : round_up((s.k + chunks - 1) / chunks, std::max<int64_t>(kernels.k_step, 32));
    s.sums_in_c = s.c.dtype == DType::f32 && s.activation == Activation::none && s.alpha == 1.0f;
    // Too large to keep: all of the sum at a time.
    if (!s.sums_in_c && static_cast<double>(s.m) * static_cast<double>(s.n) * sizeof(float) > most_sum_bytes) s.chunk_k = s.k_padded;
    const int64_t row_bytes = std::max<int64_t>(1, s.chunk_k * kernels.element_bytes), panel_bytes = kernels.nr * row_bytes;
    const int64_t a_bytes = round_up(s.m, kernels.mr) * row_bytes, b_bytes = round_up(s.n, kernels.nr) * row_bytes;
    const int64_t b_panels = round_up(s.n, kernels.nr) / kernels.nr;
    s.block_rows = std::clamp<int64_t>(packed_a_bytes / row_bytes / kernels.mr * kernels.mr, kernels.mr, most_block_rows / kernels.mr * kernels.mr);
    // Packing is paid for in memory traffic. Of two operands to pack, the larger is packed piece by piece, by the task
    // that needs the piece, and stays in that thread's cache.
    const bool a_is_small = s.reads_rows || (a_bytes <= b_bytes && a_bytes <= most_shared_a_bytes);
    const int64_t own_panels = std::min(std::max<int64_t>(1, own_b_block_bytes / panel_bytes), b_panels / least_own_blocks);
    // Each task reads all of A: that must come from the cache, or serve several panels.
    const bool reads_pay = own_panels >= 2 || (own_panels >= 1 && a_bytes <= packed_a_bytes * 2);
    if (a_is_small && b_bytes > small_b_bytes && reads_pay) {
      s.own_columns = own_panels * kernels.nr;
      s.chunk_columns = round_up(s.n, kernels.nr);
      s.shares_a = !s.reads_rows;
      return s;
    }
    s.chunk_columns = std::min(std::max<int64_t>(1, packed_b_chunk_bytes / panel_bytes) * kernels.nr, round_up(s.n, kernels.nr));
    s.shares_a = !s.reads_rows && a_bytes <= b_bytes && a_bytes <= most_shared_a_bytes;
    // Without a shared A each block packs its rows itself, so blocks are as wide as they can be.
    const int64_t block_panels = std::max<int64_t>(4, packed_b_block_bytes / panel_bytes);
    s.block_columns = s.shares_a || s.reads_rows ? std::min(s.chunk_columns, block_panels * kernels.nr) : s.chunk_columns;
  }
  return s;
}

}  // namespace fulmen::cpu
