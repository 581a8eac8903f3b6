// The two ways to multiply: FloatMode (f32 tiles; inputs of any dtype are widened when packed) and PairMode (bf16 tiles
// for the bf16 dot product or the tile unit). The kernels are templates over a mode. Compiled per target.
//   Left: the element of A operands; Right: that of B operands
//   unit: columns and depths are padded to multiples of it; strip: query rows that go through scores together
#pragma once

#include "executors/cpu/attention/pack.h"
#include "executors/cpu/attention/scores.h"
#include "executors/cpu/attention/tile_product.h"

namespace fulmen::cpu::FULMEN_TARGET {

struct FloatMode {
  using Left = float;
  using Right = float;
  static constexpr int64_t unit = lanes, strip = 24, exp_degree = 5;
  static constexpr bool pairs = false;
  static int64_t right_rows(int64_t k) { return k; }

  static void pack_left(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols,
                        float factor, float* target, int64_t target_row) {
    pack_float_rows(source, rows, cols, padded_rows, padded_cols, factor, target, target_row);
  }
  static bool lies_packed(const Source& source, int64_t cols) {
    return source.dtype == DType::f32 && source.col_stride == 1 && source.row_stride == cols;
  }
  // Rows of an A operand, where they lie or packed into `target`. Products read no row past the last and no column past
  // `cols`, so neither needs padding.
  static const float* left(const Source& source, int64_t rows, int64_t cols, int64_t, int64_t padded_cols, float* target, int64_t& row) {
    row = cols;
    if (lies_packed(source, cols)) return reinterpret_cast<const float*>(source.data);
    row = padded_cols;
    pack_float_rows(source, rows, cols, rows, padded_cols, 1.0f, target, padded_cols);
    return target;
  }
  static int64_t left_cols(int64_t cols, int64_t) { return cols; }
  // Rows of a B operand; whole vectors of columns are read.
  static void pack_right(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols, Left*, float* target) {
    pack_float_rows(source, rows, cols, padded_rows, padded_cols, 1.0f, target, padded_cols);
  }
  static const float* right(const Source& source, int64_t rows, int64_t cols, int64_t, int64_t padded_cols, Left* stage, float* target) {
    if (cols == padded_cols && lies_packed(source, cols)) return reinterpret_cast<const float*>(source.data);
    pack_right(source, rows, cols, rows, padded_cols, stage, target);
    return target;
  }
  static void pack_right_transposed(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows,
                                    int64_t padded_cols, Left* stage, float* target, int64_t target_row) {
    pack_float_columns(source, rows, cols, padded_rows, padded_cols, stage, target, target_row);
  }
  static void product(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, const float* b, int64_t b_row,
                      float* c, int64_t c_row, bool accumulate) {
    float_product(m, n, k, a, a_row, 1, b, b_row, c, c_row, accumulate);
  }
  // C += A^T B over the rows [first, first + k) of both, A packed by rows; the pairs need A `turned` instead.
  static void transposed_product(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, const float*, int64_t, int64_t first,
                                 const float* b, int64_t b_row, float* c, int64_t c_row) {
    float_product(m, n, k, a + first * a_row, 1, a_row, b + first * b_row, b_row, c, c_row, true);
  }
  static void turn(const float*, int64_t, int64_t, int64_t, uint32_t*, float*) {}
};

#if defined(__AVX512BF16__)
struct PairMode {
  using Left = bf16;
  using Right = uint32_t;
  static constexpr int64_t unit = 32, strip = 32, exp_degree = 4;
  static constexpr bool pairs = true;
  static int64_t right_rows(int64_t k) { return k / 2; }

  static void pack_left(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols, float,
                        bf16* target, int64_t target_row) {
    pack_half_rows(source, rows, cols, padded_rows, padded_cols, target, target_row);
  }
  static void pack_right_transposed(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows,
                                    int64_t padded_cols, Left* stage, uint32_t* target, int64_t target_row) {
    pack_half_columns(source, rows, cols, padded_rows, padded_cols, stage, target, target_row);
  }
  // Whole tiles of rows are read.
  static const bf16* left(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols, bf16* target, int64_t& row) {
    row = padded_cols;
    if (rows == padded_rows && cols == padded_cols && source.col_stride == 1 && source.row_stride == cols)
      return reinterpret_cast<const bf16*>(source.data);
    pack_half_rows(source, rows, cols, padded_rows, padded_cols, target, padded_cols);
    return target;
  }
  static int64_t left_cols(int64_t, int64_t padded_cols) { return padded_cols; }
  static void pack_right(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols, Left* stage, uint32_t* target) {
    pack_half_row_pairs(source, rows, cols, padded_rows, padded_cols, stage, target, padded_cols);
  }
  static const uint32_t* right(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols, Left* stage, uint32_t* target) {
    pack_right(source, rows, cols, padded_rows, padded_cols, stage, target);
    return target;
  }
  static void product(int64_t m, int64_t n, int64_t k, const bf16* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                      float* c, int64_t c_row, bool accumulate) {
    pair_product(m, n, k, a, a_row, b, b_row, c, c_row, accumulate);
  }
  static void transposed_product(int64_t m, int64_t n, int64_t k, const bf16*, int64_t, const bf16* turned, int64_t turned_row, int64_t first,
                                 const uint32_t* b, int64_t b_row, float* c, int64_t c_row) {
    pair_product(m, n, k, turned + first, turned_row, b + first / 2 * b_row, b_row, c, c_row, true);
  }
  // turned[cols][rows] of packed rows (multiples of 32 both); `pairs` holds rows / 2 x cols.
  static void turn(const bf16* source, int64_t source_row, int64_t rows, int64_t cols, uint32_t* pairs, bf16* turned) {
    pack_half_row_pairs(Source(reinterpret_cast<const char*>(source), source_row, 1, DType::bf16), rows, cols, rows, cols,
                        nullptr, pairs, cols);
    transpose_words(pairs, cols, rows / 2, cols, rows / 2, reinterpret_cast<uint32_t*>(turned), rows / 2);
  }
};
#endif

// A target compiles one mode. Calls that aren't bf16 throughout run on the best target with FloatMode (attention.cpp).
#if defined(__AVX512BF16__)
using TargetMode = PairMode;
#else
using TargetMode = FloatMode;
#endif

// Rows of the key and value tiles. Wide heads get shorter tiles, so that scratch stays within the second-level cache.
inline int64_t block_keys_for(int64_t padded_dims) {
  return std::clamp<int64_t>(round_down(32768 / std::max<int64_t>(padded_dims, 1), 64), 64, 256);
}

// Hands out pieces of a thread's scratch, each on its own cache line. With a null base it only counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64) + 64;
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace fulmen::cpu::FULMEN_TARGET
