// Packing: copies an operand of any strides and dtype into panels (see BlockKernels), converting on the way. Elements
// travel as 4-byte cells: one float, or two bf16 neighbours along k. Included by the kernels of each instruction set.
#pragma once

#include "executors/cpu/gemm/gemm_isa.h"
#include "executors/cpu/vec.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

typedef uint16_t vhalf_pair __attribute__((vector_size(vector_bytes)));  // 2 * lanes halves

template <int Step>
FULMEN_INLINE void swap_blocks(vuint (&rows)[lanes]) {
  vuint low, high;
  for (int l = 0; l < lanes; ++l) {
    low[l] = static_cast<uint32_t>((l & Step) ? lanes + l - Step : l);
    high[l] = static_cast<uint32_t>((l & Step) ? lanes + l : l + Step);
  }
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) {
    if (i & Step) continue;
    const vuint a = rows[i], b = rows[i + Step];
    rows[i] = __builtin_shuffle(a, b, low);
    rows[i + Step] = __builtin_shuffle(a, b, high);
  }
}

// rows[i][j] <-> rows[j][i]
FULMEN_INLINE void transpose(vuint (&rows)[lanes]) {
  swap_blocks<1>(rows);
  swap_blocks<2>(rows);
  if constexpr (lanes > 4) swap_blocks<4>(rows);
  if constexpr (lanes > 8) swap_blocks<8>(rows);
}

FULMEN_INLINE void store_cells(uint32_t* p, vuint v) { std::memcpy(p, &v, sizeof(v)); }

inline vfloat round_to(vfloat v, DType dtype) {
  if (dtype == DType::bf16) return widen_bf16(narrow_bf16(v));
  f16 buffer[lanes];
  store(buffer, v);
  return load(buffer);
}

// A cell is one float.
template <class T>
struct SingleCells {
  static constexpr int k_per_cell = 1;
  const T* data;
  int64_t width_stride, k_stride, k;
  DType round;

  vuint finish(vfloat v) const { return std::bit_cast<vuint>(round == DType::f32 ? v : round_to(v, round)); }
  // `count` neighbours along the width; needs width_stride 1. Lanes past count are 0.
  vuint along_width(int64_t w, int64_t cell, int64_t count) const {
    const T* p = data + w + cell * k_stride;
    return finish(count >= lanes ? load(p) : load_partial(p, static_cast<int>(count)));
  }
  // Neighbours along k, 0 past its end; needs k_stride 1.
  vuint along_k(int64_t w, int64_t cell) const {
    const T* p = data + w * width_stride + cell;
    return finish(k - cell >= lanes ? load(p) : load_partial(p, static_cast<int>(k - cell)));
  }
  uint32_t one(int64_t w, int64_t cell) const {
    vfloat v{};
    v[0] = static_cast<float>(data[w * width_stride + cell * k_stride]);
    return finish(v)[0];
  }
};

FULMEN_INLINE vhalf halves(const bf16* p, int64_t count) {
  vhalf h{};
  if (count >= lanes)
    std::memcpy(&h, p, sizeof(h));
  else
    std::memcpy(&h, p, static_cast<size_t>(count) * sizeof(bf16));
  return h;
}
template <class T>
FULMEN_INLINE vhalf halves(const T* p, int64_t count) {
  return narrow_bf16(count >= lanes ? load(p) : load_partial(p, static_cast<int>(count)));
}

// A cell is two bf16 neighbours along k, the first in its low half.
template <class T>
struct PairCells {
  static constexpr int k_per_cell = 2;
  const T* data;
  int64_t width_stride, k_stride, k;

  vuint along_width(int64_t w, int64_t cell, int64_t count) const {
    const T* p = data + w + 2 * cell * k_stride;
    const vuint low = __builtin_convertvector(halves(p, count), vuint);
    if (2 * cell + 1 >= k) return low;
    return low | (__builtin_convertvector(halves(p + k_stride, count), vuint) << 16);
  }
  vuint along_k(int64_t w, int64_t cell) const {
    const T* p = data + w * width_stride + 2 * cell;
    const int64_t left = k - 2 * cell;
    vhalf parts[2] = {};
    if (left >= 2 * lanes) {
      parts[0] = halves(p, lanes);
      parts[1] = halves(p + lanes, lanes);
    } else {
      parts[0] = halves(p, left);
      if (left > lanes) parts[1] = halves(p + lanes, left - lanes);
    }
    vuint cells;
    std::memcpy(&cells, parts, sizeof(cells));
    return cells;
  }
  uint32_t one(int64_t w, int64_t cell) const {
    const T* p = data + w * width_stride + 2 * cell * k_stride;
    const uint32_t low = half(p[0]);
    return 2 * cell + 1 >= k ? low : low | (static_cast<uint32_t>(half(p[k_stride])) << 16);
  }
  static uint16_t half(bf16 x) { return x.bits; }
  static uint16_t half(float x) { return bf16(x).bits; }
  static uint16_t half(f16 x) { return bf16(static_cast<float>(x)).bits; }
};

// Panels [cell along k][Width]. k_cells >= the cells that k fills: the rest are zeros.
template <int Width, class Cells>
inline void pack_panels(const Cells& cells, int64_t width, int64_t k_cells, uint32_t* packed) {
  constexpr int blocks = (Width + lanes - 1) / lanes;
  const int64_t filled = (cells.k + Cells::k_per_cell - 1) / Cells::k_per_cell;
  for (int64_t w0 = 0; w0 < width; w0 += Width, packed += Width * k_cells) {
    const int64_t live = width - w0 < Width ? width - w0 : Width;
    if (cells.width_stride == 1) {
      for (int64_t c = 0; c < filled; ++c)
        for (int b = 0; b < blocks; ++b) {
          const int64_t left = live - b * lanes;
          store_cells(packed + c * Width + b * lanes, left > 0 ? cells.along_width(w0 + b * lanes, c, left) : vuint{});
        }
    } else if (cells.k_stride == 1) {
      for (int64_t c = 0; c < filled; c += lanes) {
        vuint block[blocks][lanes];
        for (int b = 0; b < blocks; ++b) {
#pragma GCC unroll 16
          for (int i = 0; i < lanes; ++i) block[b][i] = b * lanes + i < live ? cells.along_k(w0 + b * lanes + i, c) : vuint{};
          transpose(block[b]);
        }
        const int64_t rows = filled - c < lanes ? filled - c : lanes;
        for (int64_t i = 0; i < rows; ++i)
          for (int b = 0; b < blocks; ++b) store_cells(packed + (c + i) * Width + b * lanes, block[b][i]);
      }
    } else {
      for (int64_t c = 0; c < filled; ++c)
        for (int w = 0; w < Width; ++w) packed[c * Width + w] = w < live ? cells.one(w0 + w, c) : 0;
    }
    std::memset(packed + filled * Width, 0, static_cast<size_t>((k_cells - filled) * Width) * sizeof(uint32_t));
  }
}

template <int Width>
inline void pack_single(const PackSource& s, int64_t width, int64_t k, void* packed) {
  auto* out = static_cast<uint32_t*>(packed);
  switch (s.dtype) {
    case DType::bf16:
      return pack_panels<Width>(SingleCells<bf16>{static_cast<const bf16*>(s.data), s.width_stride, s.k_stride, k,
                                                  s.round == DType::f16 ? s.round : DType::f32}, width, k, out);
    case DType::f16:
      return pack_panels<Width>(SingleCells<f16>{static_cast<const f16*>(s.data), s.width_stride, s.k_stride, k,
                                                 s.round == DType::bf16 ? s.round : DType::f32}, width, k, out);
    default:
      return pack_panels<Width>(SingleCells<float>{static_cast<const float*>(s.data), s.width_stride, s.k_stride, k, s.round},
                                width, k, out);
  }
}

}  // namespace
}  // namespace fulmen::cpu::FULMEN_TARGET
