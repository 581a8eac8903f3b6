// The last step of a product, for one tile of sums: earlier parts of the sum, bias, activation, residual, conversion,
// store. Included by the kernels of each instruction set.
#pragma once

#include "executors/cpu/gemm/gemm_isa.h"
#include "executors/cpu/vec.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

// `count` elements from `stride` apart, as floats.
inline vfloat load_any(const void* data, DType dtype, int64_t offset, int64_t stride, int count) {
  if (stride == 1) {
    const bool full = count == lanes;
    switch (dtype) {
      case DType::bf16: {
        const auto* p = static_cast<const bf16*>(data) + offset;
        return full ? load(p) : load_partial(p, count);
      }
      case DType::f16: {
        const auto* p = static_cast<const f16*>(data) + offset;
        return full ? load(p) : load_partial(p, count);
      }
      default: {
        const auto* p = static_cast<const float*>(data) + offset;
        return full ? load(p) : load_partial(p, count);
      }
    }
  }
  float buffer[lanes] = {};
  for (int i = 0; i < count; ++i) {
    const int64_t at = offset + i * stride;
    switch (dtype) {
      case DType::bf16: buffer[i] = static_cast<float>(static_cast<const bf16*>(data)[at]); break;
      case DType::f16: buffer[i] = static_cast<float>(static_cast<const f16*>(data)[at]); break;
      default: buffer[i] = static_cast<const float*>(data)[at];
    }
  }
  return load(buffer);
}

inline void store_any(void* data, DType dtype, int64_t offset, int64_t stride, int count, vfloat v) {
  if (stride == 1) {
    const bool full = count == lanes;
    switch (dtype) {
      case DType::bf16: {
        auto* p = static_cast<bf16*>(data) + offset;
        return full ? store(p, v) : store_partial(p, v, count);
      }
      case DType::f16: {
        auto* p = static_cast<f16*>(data) + offset;
        return full ? store(p, v) : store_partial(p, v, count);
      }
      default: {
        auto* p = static_cast<float*>(data) + offset;
        return full ? store(p, v) : store_partial(p, v, count);
      }
    }
  }
  float buffer[lanes];
  store(buffer, v);
  for (int i = 0; i < count; ++i) {
    const int64_t at = offset + i * stride;
    switch (dtype) {
      case DType::bf16: static_cast<bf16*>(data)[at] = bf16(buffer[i]); break;
      case DType::f16: static_cast<f16*>(data)[at] = f16(buffer[i]); break;
      default: static_cast<float*>(data)[at] = buffer[i];
    }
  }
}

// x * (1 + erf(x / sqrt 2)) / 2 by erfc, so that large negative x keep their relative accuracy:
// erfc(t) = u exp(-t^2) P(u) with u = 1 / (1 + t / 2), P fitted for this file (least squares in Chebyshev points,
// t in [0, 9.3], relative error 1.8e-7).
inline vfloat gelu_erf(vfloat x) {
  const vfloat a = abs(x);
  const vfloat u = 1.0f / fma(a, splat(0.35355339059f), splat(1.0f));
  vfloat p = splat(-0.0598510222f);
  p = fma(p, u, splat(0.288213642f));
  p = fma(p, u, splat(-0.494333211f));
  p = fma(p, u, splat(0.285727713f));
  p = fma(p, u, splat(-0.0315292578f));
  p = fma(p, u, splat(0.204591846f));
  p = fma(p, u, splat(0.242667731f));
  p = fma(p, u, splat(0.282428768f));
  p = fma(p, u, splat(0.282083742f));
  const vfloat half_erfc = 0.5f * u * p * exp(a * a * -0.5f);
  const vfloat y = x * select((vint)(x < 0.0f), half_erfc, 1.0f - half_erfc);
  return select((vint)(x < -14.5f), vfloat{}, y);  // also for -inf, where the product would be NaN
}

inline vfloat activate(vfloat x, Activation activation) {
  switch (activation) {
    case Activation::none: return x;
    case Activation::relu: return select((vint)(x < 0.0f), vfloat{}, x);  // NaN stays
    case Activation::gelu_erf: return gelu_erf(x);
    case Activation::gelu_tanh: {
      // 0.5 x (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
      const vfloat u = x * fma(x * x, splat(0.07135481283f), splat(1.5957691216f));
      return x * sigmoid(u);
    }
    case Activation::silu: return x * sigmoid(x);
  }
  return x;
}

// True if a finished sum is only converted and stored in rows.
inline bool is_plain(const TileOutput& out) {
  return !out.partial && !out.bias && !out.residual && out.alpha == 1.0f && out.activation == Activation::none &&
         !out.accumulate && out.c_column_stride == 1;
}

template <class T>
inline void store_rows(const float* sums, int64_t sums_stride, int rows, int columns, T* c, int64_t c_stride) {
  for (int r = 0; r < rows; ++r, sums += sums_stride, c += c_stride) {
    int j = 0;
    for (; j + lanes <= columns; j += lanes) store(c + j, load(sums + j));
    if (j < columns) store_partial(c + j, load_partial(sums + j, columns - j), columns - j);
  }
}

// One vector of sums of row `row`, columns [column, column + count).
inline void finish_vector(vfloat v, int64_t row, int64_t column, int count, const TileOutput& out) {
  if (out.partial) {
    float* const part = out.partial + row * out.partial_row_stride + column;
    if (!out.first_part) v += load_partial(part, count);
    if (!out.last_part) {
      store_partial(part, v, count);
      return;
    }
  }
  if (out.alpha != 1.0f) v *= out.alpha;
  if (out.bias)
    v += load_any(out.bias, out.bias_dtype, row * out.bias_row_stride + column * out.bias_column_stride,
                  out.bias_column_stride, count);
  if (out.activation != Activation::none) v = activate(v, out.activation);
  if (out.residual)
    v = fma(load_any(out.residual, out.residual_dtype,
                     row * out.residual_row_stride + column * out.residual_column_stride, out.residual_column_stride, count),
            splat(out.residual_scale), v);
  const int64_t at = row * out.c_row_stride + column * out.c_column_stride;
  if (out.accumulate) v += load_any(out.c, out.c_dtype, at, out.c_column_stride, count);
  store_any(out.c, out.c_dtype, at, out.c_column_stride, count, v);
}

// Asks for the memory of a tile of C while its sums are being made: the stores would wait for it.
FULMEN_INLINE void prefetch_tile(int rows, int columns, int64_t row0, int64_t column0, const TileOutput& out) {
  if (out.c_column_stride != 1) return;
  const int64_t bytes = static_cast<int64_t>(out.c_dtype == DType::f32 ? 4 : 2);
  const char* p = static_cast<const char*>(out.c) + (row0 * out.c_row_stride + column0) * bytes;
  for (int r = 0; r < rows; ++r, p += out.c_row_stride * bytes)
    for (int64_t at = 0; at < columns * bytes; at += 64) __builtin_prefetch(p + at, 1);
}

// `sums` has rows x columns floats, rows sums_stride apart (a multiple of lanes, so whole vectors can be read).
inline void finish_tile(const float* sums, int64_t sums_stride, int rows, int columns, int64_t row0, int64_t column0,
                        const TileOutput& out) {
  if (is_plain(out)) {
    const int64_t at = row0 * out.c_row_stride + column0;
    switch (out.c_dtype) {
      case DType::bf16: return store_rows(sums, sums_stride, rows, columns, static_cast<bf16*>(out.c) + at, out.c_row_stride);
      case DType::f16: return store_rows(sums, sums_stride, rows, columns, static_cast<f16*>(out.c) + at, out.c_row_stride);
      default: return store_rows(sums, sums_stride, rows, columns, static_cast<float*>(out.c) + at, out.c_row_stride);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < columns; j += lanes)
      finish_vector(load(sums + r * sums_stride + j), row0 + r, column0 + j, columns - j < lanes ? columns - j : lanes, out);
}

}  // namespace
}  // namespace fulmen::cpu::FULMEN_TARGET
