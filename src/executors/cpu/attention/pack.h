// Copies between tensors of any stride and dtype and the packed tiles that tile_product.h multiplies. Compiled per
// target. Everything past the rows and columns that exist is filled with zeros up to the padded sizes.
#pragma once

#include "core/dtype.h"
#include "executors/cpu/attention/arguments.h"
#include "executors/cpu/vec.h"

namespace fulmen::cpu::FULMEN_TARGET {

// A matrix somewhere in a tensor.
struct Source {
  const char* data = nullptr;
  DType dtype = DType::f32;
  int64_t row_stride = 0, col_stride = 0;
  Source() = default;
  Source(const char* at, int64_t rows, int64_t cols, DType type) : data(at), dtype(type), row_stride(rows), col_stride(cols) {}
  Source(const void* base, const AttentionView& view, int64_t batch, int64_t head, int64_t row)
      : data(static_cast<const char*>(base) + view.offset(batch, head, row) * static_cast<int64_t>(dtype_bytes(view.dtype))),
        dtype(view.dtype), row_stride(view.stride[2]), col_stride(view.stride[3]) {}
  const char* row(int64_t r) const { return data + r * row_stride * static_cast<int64_t>(dtype_bytes(dtype)); }
};

template <class T>
FULMEN_INLINE void widen_row(const T* source, int64_t stride, int64_t count, int64_t padded, float factor, float* target) {
  int64_t c = 0;
  if (stride == 1) {
    for (; c + lanes <= count; c += lanes) store(target + c, load(source + c) * factor);
    if (c < count) {
      const vfloat last = load_partial(source + c, static_cast<int>(count - c)) * factor;
      const int64_t room = padded - c;  // the padded size need not be a multiple of the lanes
      if (room >= lanes) store(target + c, last);
      else store_partial(target + c, last, static_cast<int>(room));
      c = room >= lanes ? c + lanes : padded;
    }
  } else {
    for (; c < count; ++c) target[c] = static_cast<float>(source[c * stride]) * factor;
  }
  for (; c < padded; ++c) target[c] = 0.0f;
}

inline void widen_row(const char* source, DType dtype, int64_t stride, int64_t count, int64_t padded, float factor, float* target) {
  if (dtype == DType::f32) widen_row(reinterpret_cast<const float*>(source), stride, count, padded, factor, target);
  else if (dtype == DType::bf16) widen_row(reinterpret_cast<const bf16*>(source), stride, count, padded, factor, target);
  else widen_row(reinterpret_cast<const f16*>(source), stride, count, padded, factor, target);
}

template <class T>
FULMEN_INLINE void narrow_row(const float* source, int64_t count, T* target, int64_t stride) {
  int64_t c = 0;
  if (stride == 1) {
    for (; c + lanes <= count; c += lanes) store(target + c, load(source + c));
    if (c < count) store_partial(target + c, load_partial(source + c, static_cast<int>(count - c)), static_cast<int>(count - c));
  } else {
    for (; c < count; ++c) target[c * stride] = T(source[c]);
  }
}

// Writes a row of f32 numbers to a tensor. `at` counts elements.
inline void narrow_row(const float* source, int64_t count, void* base, DType dtype, int64_t at, int64_t stride) {
  if (dtype == DType::f32) narrow_row(source, count, static_cast<float*>(base) + at, stride);
  else if (dtype == DType::bf16) narrow_row(source, count, static_cast<bf16*>(base) + at, stride);
  else narrow_row(source, count, static_cast<f16*>(base) + at, stride);
}

// f32 rows [padded_rows][padded_cols].
inline void pack_float_rows(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols,
                            float factor, float* target, int64_t target_row) {
  for (int64_t r = 0; r < rows; ++r)
    widen_row(source.row(r), source.dtype, source.col_stride, cols, padded_cols, factor, target + r * target_row);
  for (int64_t r = rows; r < padded_rows; ++r) std::memset(target + r * target_row, 0, static_cast<size_t>(padded_cols) * 4);
}

// Square of lanes x lanes 32-bit elements, in registers.
template <int step>
FULMEN_INLINE void transpose_step(vuint (&rows)[lanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) {
    if (i & step) continue;
    const vuint a = rows[i], b = rows[i + step];
    vint first, second;
    for (int l = 0; l < lanes; ++l) {
      first[l] = (l & step) ? lanes + l - step : l;
      second[l] = (l & step) ? lanes + l : l + step;
    }
    rows[i] = __builtin_shuffle(a, b, first);
    rows[i + step] = __builtin_shuffle(a, b, second);
  }
}
FULMEN_INLINE void transpose_square(vuint (&rows)[lanes]) {
  if constexpr (lanes > 8) transpose_step<8>(rows);
  if constexpr (lanes > 4) transpose_step<4>(rows);
  transpose_step<2>(rows);
  transpose_step<1>(rows);
}

// target[c][r] = source[r][c] of 32-bit elements; cols is a multiple of the lanes, rows is padded to padded_rows.
inline void transpose_words(const uint32_t* source, int64_t source_row, int64_t rows, int64_t cols, int64_t padded_rows,
                            uint32_t* target, int64_t target_row) {
  for (int64_t r = 0; r < padded_rows; r += lanes)
    for (int64_t c = 0; c < cols; c += lanes) {
      vuint square[lanes];
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) {
        if (r + i < rows) std::memcpy(&square[i], source + (r + i) * source_row + c, sizeof(vuint));
        else square[i] = vuint{};
      }
      transpose_square(square);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) std::memcpy(target + (c + i) * target_row + r, &square[i], sizeof(vuint));
    }
}

// f32, transposed: target [padded_cols][padded_rows]. padded sizes are multiples of the lanes; `stage` holds
// lanes x padded_cols numbers.
inline void pack_float_columns(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols,
                               float* stage, float* target, int64_t target_row) {
  for (int64_t r = 0; r < padded_rows; r += lanes) {
    const int64_t live = std::clamp<int64_t>(rows - r, 0, lanes);
    const float* from = reinterpret_cast<const float*>(source.row(r));
    int64_t from_row = source.row_stride;
    if (source.dtype != DType::f32 || source.col_stride != 1 || cols != padded_cols) {
      for (int64_t i = 0; i < live; ++i)
        widen_row(source.row(r + i), source.dtype, source.col_stride, cols, padded_cols, 1.0f, stage + i * padded_cols);
      from = stage;
      from_row = padded_cols;
    }
    transpose_words(reinterpret_cast<const uint32_t*>(from), from_row, live, padded_cols, lanes,
                    reinterpret_cast<uint32_t*>(target) + r, target_row);
  }
}

#if defined(__AVX512BF16__)
FULMEN_INLINE void copy_half_row(const bf16* source, int64_t stride, int64_t count, int64_t padded, bf16* target) {
  if (stride == 1) std::memcpy(target, source, static_cast<size_t>(count) * 2);
  else
    for (int64_t c = 0; c < count; ++c) target[c] = source[c * stride];
  if (count < padded) std::memset(static_cast<void*>(target + count), 0, static_cast<size_t>(padded - count) * 2);
}

// bf16 rows [padded_rows][padded_cols].
inline void pack_half_rows(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols,
                           bf16* target, int64_t target_row) {
  for (int64_t r = 0; r < rows; ++r)
    copy_half_row(reinterpret_cast<const bf16*>(source.row(r)), source.col_stride, cols, padded_cols, target + r * target_row);
  for (int64_t r = rows; r < padded_rows; ++r) std::memset(static_cast<void*>(target + r * target_row), 0, static_cast<size_t>(padded_cols) * 2);
}

// Pairs along the columns, transposed: target [padded_cols / 2][padded_rows]. padded_cols is a multiple of 32;
// `stage` holds lanes x padded_cols.
inline void pack_half_columns(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols,
                              bf16* stage, uint32_t* target, int64_t target_row) {
  for (int64_t r = 0; r < padded_rows; r += lanes) {
    const int64_t live = std::clamp<int64_t>(rows - r, 0, lanes);
    const bf16* from = reinterpret_cast<const bf16*>(source.row(r));
    int64_t from_row = source.row_stride;
    if (source.col_stride != 1 || cols != padded_cols) {
      pack_half_rows(Source(source.row(r), source.row_stride, source.col_stride, DType::bf16), live, cols, live, padded_cols, stage, padded_cols);
      from = stage;
      from_row = padded_cols;
    }
    for (int64_t c = 0; c < padded_cols / 2; c += lanes) {
      vuint square[lanes];
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) {
        if (i < live) std::memcpy(&square[i], from + i * from_row + 2 * c, sizeof(vuint));
        else square[i] = vuint{};
      }
      transpose_square(square);
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) std::memcpy(target + (c + i) * target_row + r, &square[i], sizeof(vuint));
    }
  }
}

FULMEN_INLINE vuint interleave_halves(vhalf even, vhalf odd) {
  return (vuint)_mm512_or_si512(_mm512_cvtepu16_epi32((__m256i)even), _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)odd), 16));
}

// Pairs along the rows: target [padded_rows / 2][padded_cols]. `stage` holds 2 x padded_cols; null if the rows are
// padded already.
inline void pack_half_row_pairs(const Source& source, int64_t rows, int64_t cols, int64_t padded_rows, int64_t padded_cols,
                                bf16* stage, uint32_t* target, int64_t target_row) {
  for (int64_t r = 0; r < padded_rows; r += 2) {
    uint32_t* to = target + r / 2 * target_row;
    if (r >= rows) {
      std::memset(to, 0, static_cast<size_t>(padded_cols) * 4);
      continue;
    }
    const bf16* even = reinterpret_cast<const bf16*>(source.row(r));
    const bf16* odd = reinterpret_cast<const bf16*>(source.row(r + 1));
    if (stage && (source.col_stride != 1 || cols != padded_cols || r + 1 >= rows)) {
      copy_half_row(even, source.col_stride, cols, padded_cols, stage);
      if (r + 1 < rows) copy_half_row(odd, source.col_stride, cols, padded_cols, stage + padded_cols);
      else std::memset(static_cast<void*>(stage + padded_cols), 0, static_cast<size_t>(padded_cols) * 2);
      even = stage;
      odd = stage + padded_cols;
    }
    for (int64_t c = 0; c < padded_cols; c += lanes) {
      vhalf low, high;
      std::memcpy(&low, even + c, sizeof(low));
      std::memcpy(&high, odd + c, sizeof(high));
      const vuint pairs = interleave_halves(low, high);
      std::memcpy(to + c, &pairs, sizeof(pairs));
    }
  }
}
#endif

}  // namespace fulmen::cpu::FULMEN_TARGET
