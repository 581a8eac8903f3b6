// What the driver (gemm.cpp) asks of each instruction set's kernels: pack an operand into panels, multiply packed
// panels into a block of C, and the unpacked form for few rows. Plain structs, the same for every compilation.
#pragma once

#include <cstdint>

#include "executors/cpu/gemm/gemm.h"

namespace fulmen::cpu {

// One operand as a packer sees it: "width" is the row of A or the column of B, which the result has too.
struct PackSource {
  const void* data;
  DType dtype;
  DType round;  // f32: keep; bf16 or f16: round elements to it
  int64_t width_stride, k_stride;
};

// A block of C and what is done to it; pointers are those of element (0, 0) of the block's matrix.
struct TileOutput {
  void* c;
  DType c_dtype;
  int64_t c_row_stride, c_column_stride;
  const void* bias;  // null: none
  DType bias_dtype;
  int64_t bias_row_stride, bias_column_stride;
  const void* residual;  // null: none
  DType residual_dtype;
  int64_t residual_row_stride, residual_column_stride;
  float alpha, residual_scale;
  Activation activation;
  bool accumulate;
  // Long sums come in several parts: the sums so far, row-major; null if there is one part only.
  float* partial;
  int64_t partial_row_stride;
  bool first_part, last_part;
};

struct MultiplyArgs {
  const void* a;  // panels of `mr` rows, one after the other; or A as it lies, if a_row_stride isn't 0
  int64_t a_row_stride;
  const void* b;  // panels of `nr` columns
  int64_t b_panel_bytes;
  int64_t rows, columns;
  int64_t k;              // padded to k_step
  int64_t row0, column0;  // where the block stands in C
  float* scratch;         // (rows rounded up to mr) * nr floats
  const TileOutput* output;
};

// Packed panels: [panel][k / elements a cell][width in panel] cells of 4 bytes, where a cell is one float or, for bf16
// products, two neighbours along k. The tile unit's A panels are described where they are packed.
struct BlockKernels {
  int mr, nr;
  int k_step;         // k is padded to a multiple of this, with zeros
  int element_bytes;  // of a packed element
  int64_t inner_k;    // longer sums are cut here so that a panel of B stays in the first-level cache
  bool reads_rows;    // multiply takes an f32 A unpacked, if its elements lie together along k
  // Packs `width` rows (columns) and `k` elements; a panel takes mr (nr) * padded k * element_bytes bytes. The last
  // panel of A may be followed by up to 64 bytes that are written too.
  void (*pack_a)(const PackSource& source, int64_t width, int64_t k, void* packed);
  void (*pack_b)(const PackSource& source, int64_t width, int64_t k, void* packed);
  void (*multiply)(const MultiplyArgs& args);
};

inline constexpr int max_few_rows = 4;

// C's rows are few (at most max_few_rows) and B is read once, unpacked: one of its strides must be 1.
struct FewRowsArgs {
  const float* a;
  int64_t a_row_stride;
  int64_t rows, k;
  PackSource b;  // data is that of the first column
  int64_t columns;
  float* scratch;  // few_rows_scratch floats
  const TileOutput* output;  // pointers are those of the first column
};
inline constexpr int64_t few_rows_strip = 1024;  // columns summed at a time
inline constexpr int64_t few_rows_scratch = max_few_rows * few_rows_strip;

// Defined once an instruction set.
#define FULMEN_GEMM_KERNELS(target)       \
  namespace target {                      \
  const BlockKernels& f32_block_kernels(); \
  void multiply_few_rows(const FewRowsArgs& args); \
  /* out[rows][k], converted to float and rounded as the source asks */ \
  void rows_to_float(const PackSource& source, int64_t rows, int64_t k, float* out); \
  }
FULMEN_GEMM_KERNELS(generic)
FULMEN_GEMM_KERNELS(avx2)
FULMEN_GEMM_KERNELS(avx512)
#undef FULMEN_GEMM_KERNELS
namespace avx512 {
const BlockKernels& f32_wide_block_kernels();  // wide, low tiles, for a B of few columns
}
namespace avx512_bf16 {
const BlockKernels& bf16_block_kernels();
}
namespace amx {
const BlockKernels& bf16_block_kernels();
}

}  // namespace fulmen::cpu
