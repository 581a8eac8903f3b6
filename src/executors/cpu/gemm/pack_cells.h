// Packing: copies an operand of any strides and dtype into panels (see BlockKernels), converting on the way. Elements
// travel as 4-byte cells: one float, or two bf16 neighbours along k. Included by the kernels of each instruction set.
#pragma once

#include "executors/cpu/gemm/gemm_isa.h"
#include "executors/cpu/vec.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

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

#if defined(__AVX512F__)
constexpr bool stores_part = true;  // of a vector, at no cost
FULMEN_INLINE void store_cells(uint32_t* p, vuint v, int count) { _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << count) - 1u), (__m512i)v); }
#else
constexpr bool stores_part = false;
FULMEN_INLINE void store_cells(uint32_t* p, vuint v, int) { store_cells(p, v); }
#endif

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
  // `lanes` neighbours along the width, all there; needs width_stride 1.
  vuint along_width(int64_t w, int64_t cell) const { return finish(load(data + w + cell * k_stride)); }
  // Only `count` of them are there: the others are 0.
  vuint along_width(int64_t w, int64_t cell, int64_t count) const {
    const T* p = data + w + cell * k_stride;
    return finish(count >= lanes ? load(p) : load_partial(p, static_cast<int>(count)));
  }
  // Neighbours along k, 0 past its end; needs k_stride 1.
  vuint along_k(int64_t w, int64_t cell) const {
    const T* p = data + w * width_stride + cell;
    return finish(k - cell >= lanes ? load(p) : load_partial(p, static_cast<int>(k - cell)));
  }
  const void* address(int64_t w, int64_t cell) const { return data + w * width_stride + cell * k_stride; }
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

#if defined(__AVX512BF16__)
// 2 * lanes neighbours in memory as pairs; `count` of them are there, the others are 0.
FULMEN_INLINE vuint pairs(const bf16* p, int64_t count) {
  const __mmask32 mask = count >= 2 * lanes ? 0xffffffffu : (1u << count) - 1u;
  return (vuint)_mm512_maskz_loadu_epi16(mask, p);
}
template <class T>
FULMEN_INLINE vuint pairs(const T* p, int64_t count) {
  vfloat low, high;
  if (count >= 2 * lanes) {
    low = load(p), high = load(p + lanes);
  } else {
    low = count >= lanes ? load(p) : load_partial(p, static_cast<int>(count));
    high = count > lanes ? load_partial(p + lanes, static_cast<int>(count - lanes)) : vfloat{};
  }
  return (vuint)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
#endif

#if defined(__AVX512BF16__)
// A cell is two bf16 neighbours along k, the first in its low half.
template <class T>
struct PairCells {
  static constexpr int k_per_cell = 2;
  const T* data;
  int64_t width_stride, k_stride, k;

  vuint along_width(int64_t w, int64_t cell) const {
    const T* p = data + w + 2 * cell * k_stride;
    return __builtin_convertvector(halves(p, lanes), vuint) | (__builtin_convertvector(halves(p + k_stride, lanes), vuint) << 16);
  }
  vuint along_width(int64_t w, int64_t cell, int64_t count) const {
    const T* p = data + w + 2 * cell * k_stride;
    const vuint low = __builtin_convertvector(halves(p, count), vuint);
    if (2 * cell + 1 >= k) return low;
    return low | (__builtin_convertvector(halves(p + k_stride, count), vuint) << 16);
  }
  vuint along_k(int64_t w, int64_t cell) const { return pairs(data + w * width_stride + 2 * cell, k - 2 * cell); }
  const void* address(int64_t w, int64_t cell) const { return data + w * width_stride + 2 * cell * k_stride; }
  uint32_t one(int64_t w, int64_t cell) const {
    const T* p = data + w * width_stride + 2 * cell * k_stride;
    const uint32_t low = half(p[0]);
    return 2 * cell + 1 >= k ? low : low | (static_cast<uint32_t>(half(p[k_stride])) << 16);
  }
  static uint16_t half(bf16 x) { return x.bits; }
  static uint16_t half(float x) { return bf16(x).bits; }
  static uint16_t half(f16 x) { return bf16(static_cast<float>(x)).bits; }
};
#endif

constexpr int prefetch_distance = 4 * lanes;  // cells

// One panel [cell along k][Width] of an operand whose elements lie together along the width. Several panels are filled
// at a time (see pack_panels), so that memory is read in longer runs.
template <int Width, class Cells>
FULMEN_INLINE void copy_cells(const Cells& cells, int64_t w0, int64_t live, int64_t cell, uint32_t* to) {
  constexpr int blocks = (Width + lanes - 1) / lanes;
  const auto put = [&](int b, vuint v) {
    if (Width - b * lanes >= lanes)
      store_cells(to + b * lanes, v);
    else
      store_cells(to + b * lanes, v, Width - b * lanes);
  };
  if (live >= blocks * lanes && (cell + 1) * Cells::k_per_cell <= cells.k) {
#pragma GCC unroll 2
    for (int b = 0; b < blocks; ++b) put(b, cells.along_width(w0 + b * lanes, cell));
    return;
  }
  for (int b = 0; b < blocks; ++b) {
    const int64_t left = live - b * lanes;
    put(b, left > 0 ? cells.along_width(w0 + b * lanes, cell, left) : vuint{});
  }
}

// One panel of an operand whose elements lie together along k.
template <int Width, class Cells>
inline void transpose_cells(const Cells& cells, int64_t w0, int64_t live, int64_t filled, uint32_t* to) {
  constexpr int blocks = (Width + lanes - 1) / lanes;
  for (int64_t c = 0; c < filled; c += lanes) {
    vuint block[blocks][lanes];
#pragma GCC unroll 2
    for (int b = 0; b < blocks; ++b) {
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) {
        block[b][i] = vuint{};
        if (b * lanes + i >= live) continue;
        block[b][i] = cells.along_k(w0 + b * lanes + i, c);
        __builtin_prefetch(cells.address(w0 + b * lanes + i, c + prefetch_distance));
      }
      transpose(block[b]);
    }
    if (filled - c >= lanes) {
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i)
        for (int b = 0; b < blocks; ++b) store_cells(to + (c + i) * Width + b * lanes, block[b][i]);
    } else {
      for (int64_t i = 0; i < filled - c; ++i)
        for (int b = 0; b < blocks; ++b) store_cells(to + (c + i) * Width + b * lanes, block[b][i]);
    }
  }
}

// Panels [cell along k][Width]. k_cells >= the cells that k fills: the rest are zeros. A panel's last cell may be
// followed by up to 64 bytes that are written and then belong to the next panel, so panels are finished in order, or
// are written together where nothing goes past their ends.
template <int Width, class Cells>
inline void pack_panels(const Cells& cells, int64_t width, int64_t k_cells, uint32_t* packed) {
  const int64_t filled = (cells.k + Cells::k_per_cell - 1) / Cells::k_per_cell;
  const int64_t panel_cells = Width * k_cells;
  const bool exact = Width % lanes == 0 || (stores_part && cells.width_stride == 1);
  const int64_t together = exact ? 8 * Width : Width;
  for (int64_t w0 = 0; w0 < width; w0 += together, packed += together / Width * panel_cells) {
    const int64_t live = width - w0 < together ? width - w0 : together;
    if (cells.width_stride == 1) {
      for (int64_t c = 0; c < filled; ++c)
        for (int64_t w = 0; w < live; w += Width)
          copy_cells<Width>(cells, w0 + w, live - w < Width ? live - w : Width, c, packed + w / Width * panel_cells + c * Width);
    } else {
      for (int64_t w = 0; w < live; w += Width) {
        const int64_t here = live - w < Width ? live - w : Width;
        uint32_t* const to = packed + w / Width * panel_cells;
        if (cells.k_stride == 1) {
          transpose_cells<Width>(cells, w0 + w, here, filled, to);
        } else {
          for (int64_t c = 0; c < filled; ++c)
            for (int i = 0; i < Width; ++i) to[c * Width + i] = i < here ? cells.one(w0 + w + i, c) : 0;
        }
      }
    }
    for (int64_t w = 0; w < live; w += Width)
      std::memset(packed + w / Width * panel_cells + filled * Width, 0, static_cast<size_t>((k_cells - filled) * Width) * sizeof(uint32_t));
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
