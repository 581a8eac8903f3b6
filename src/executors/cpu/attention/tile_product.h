// Products of packed tiles, C (+)= A B with C in f32: the inner loops of attention. Compiled per target.
//   float_product   A: f32, any strides;   B: f32 rows [k][n];             fused multiply-adds, any target
//   pair_product    A: bf16 rows [m][k];   B: bf16 pairs [k / 2][n], k even in the low half of each 32 bits;
//                   the bf16 dot product (avx512_bf16) or the tile unit (amx)
// n is a multiple of the lanes. For pair_product, A's k is padded with zeros to a multiple of 32, and buffers of A and
// C have room for m rounded up to 16. An element of C is summed in the order of k whatever the blocking, so results do
// not depend on m, n or where a tile begins.
#pragma once

#include "executors/cpu/vec.h"

namespace fulmen::cpu::FULMEN_TARGET {

#if defined(__AVX512F__)
inline constexpr int panel_vectors = 4;
#else
inline constexpr int panel_vectors = 2;
#endif
inline constexpr int panel_rows = 6;    // with panel_vectors
inline constexpr int narrow_rows = 8;   // with fewer: enough sums to hide the latency of a multiply-add

struct FloatDot {
  using Element = float;
  static FULMEN_INLINE vfloat broadcast(const float* p) { return splat(*p); }
  static FULMEN_INLINE vfloat load_right(const float* p) { return load(p); }
  static FULMEN_INLINE vfloat dot(vfloat a, vfloat b, vfloat c) { return fma(a, b, c); }
};

#if defined(__AVX512BF16__)
struct PairDot {
  using Element = uint32_t;
  static FULMEN_INLINE __m512i broadcast(const void* p) { int pair; std::memcpy(&pair, p, 4); return _mm512_set1_epi32(pair); }  // any alignment
  static FULMEN_INLINE __m512i load_right(const uint32_t* p) { return _mm512_loadu_si512(p); }
  static FULMEN_INLINE vfloat dot(__m512i a, __m512i b, vfloat c) {
    return (vfloat)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
};
#endif

template <class Dot, int rows, int vectors>
void product_panel(int64_t k_count, const typename Dot::Element* a, int64_t a_row, int64_t a_col,
                   const typename Dot::Element* b, int64_t b_row, float* c, int64_t c_row, bool accumulate) {
  vfloat sum[rows][vectors];
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < vectors; ++n) sum[m][n] = accumulate ? load(c + m * c_row + n * lanes) : vfloat{};
  for (int64_t k = 0; k < k_count; ++k) {
    decltype(Dot::load_right(b)) right[vectors];
#pragma GCC unroll 8
    for (int n = 0; n < vectors; ++n) right[n] = Dot::load_right(b + n * lanes);
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m) {
      const auto left = Dot::broadcast(a + m * a_row);
#pragma GCC unroll 8
      for (int n = 0; n < vectors; ++n) sum[m][n] = Dot::dot(left, right[n], sum[m][n]);
    }
    a += a_col;
    b += b_row;
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < vectors; ++n) store(c + m * c_row + n * lanes, sum[m][n]);
}

template <class Dot, int vectors>
FULMEN_INLINE void product_rows(int rows, int64_t k_count, const typename Dot::Element* a, int64_t a_row, int64_t a_col,
                                const typename Dot::Element* b, int64_t b_row, float* c, int64_t c_row, bool accumulate) {
  if constexpr (vectors < panel_vectors) {
    if (rows == 8) return product_panel<Dot, 8, vectors>(k_count, a, a_row, a_col, b, b_row, c, c_row, accumulate);
    if (rows == 7) return product_panel<Dot, 7, vectors>(k_count, a, a_row, a_col, b, b_row, c, c_row, accumulate);
  }
  switch (rows) {
    case 1: return product_panel<Dot, 1, vectors>(k_count, a, a_row, a_col, b, b_row, c, c_row, accumulate);
    case 2: return product_panel<Dot, 2, vectors>(k_count, a, a_row, a_col, b, b_row, c, c_row, accumulate);
    case 3: return product_panel<Dot, 3, vectors>(k_count, a, a_row, a_col, b, b_row, c, c_row, accumulate);
    case 4: return product_panel<Dot, 4, vectors>(k_count, a, a_row, a_col, b, b_row, c, c_row, accumulate);
    case 5: return product_panel<Dot, 5, vectors>(k_count, a, a_row, a_col, b, b_row, c, c_row, accumulate);
    default: return product_panel<Dot, 6, vectors>(k_count, a, a_row, a_col, b, b_row, c, c_row, accumulate);
  }
}

template <class Dot, int vectors>
void product_columns(int64_t m_count, int64_t k_count, const typename Dot::Element* a, int64_t a_row, int64_t a_col,
                     const typename Dot::Element* b, int64_t b_row, float* c, int64_t c_row, bool accumulate) {
  constexpr int64_t most = vectors == panel_vectors ? panel_rows : narrow_rows;
  for (int64_t m = 0; m < m_count; m += most)
    product_rows<Dot, vectors>(static_cast<int>(m_count - m < most ? m_count - m : most), k_count, a + m * a_row, a_row, a_col, b, b_row,
                               c + m * c_row, c_row, accumulate);
}

// Vectors of the next panel: the widest, unless that would leave a single one, which is bound by its loads.
FULMEN_INLINE int next_vectors(int64_t left) {
  if (left >= panel_vectors) return panel_vectors > 2 && left == panel_vectors + 1 ? panel_vectors - 1 : panel_vectors;
  return static_cast<int>(left);
}

// The panel of B stays in the nearest cache that holds it while the rows of A pass by.
template <class Dot>
void vector_product(int64_t m_count, int64_t n_count, int64_t k_count, const typename Dot::Element* a, int64_t a_row,
                    int64_t a_col, const typename Dot::Element* b, int64_t b_row, float* c, int64_t c_row, bool accumulate) {
  for (int64_t n = 0; n < n_count;) {
    const int vectors = next_vectors((n_count - n) / lanes);
    if (vectors == panel_vectors) product_columns<Dot, panel_vectors>(m_count, k_count, a, a_row, a_col, b + n, b_row, c + n, c_row, accumulate);
    else if (panel_vectors > 3 && vectors == 3) product_columns<Dot, panel_vectors - 1>(m_count, k_count, a, a_row, a_col, b + n, b_row, c + n, c_row, accumulate);
    else if (vectors == 2) product_columns<Dot, 2>(m_count, k_count, a, a_row, a_col, b + n, b_row, c + n, c_row, accumulate);
    else product_columns<Dot, 1>(m_count, k_count, a, a_row, a_col, b + n, b_row, c + n, c_row, accumulate);
    n += vectors * lanes;
  }
}

inline void float_product(int64_t m, int64_t n, int64_t k, const float* a, int64_t a_row, int64_t a_col, const float* b,
                          int64_t b_row, float* c, int64_t c_row, bool accumulate) {
  vector_product<FloatDot>(m, n, k, a, a_row, a_col, b, b_row, c, c_row, accumulate);
}

#if defined(__AMX_BF16__)
// Tiles 0-3 hold C (two by two), 4-5 A, 6-7 B; all are 16 rows of 64 bytes. Each thread loads the layout once a region.
class TileUnit {
 public:
  TileUnit() {
    struct alignas(64) Layout {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } layout;
    for (int i = 0; i < 8; ++i) layout.row_bytes[i] = 64, layout.rows[i] = 16;
    _tile_loadconfig(&layout);
  }
  ~TileUnit() { _tile_release(); }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;
};

template <bool two_rows, bool two_columns>
FULMEN_INLINE void tile_block(int64_t k_steps, const bf16* a, int64_t a_row, const uint32_t* b, int64_t b_row, float* c,
                              int64_t c_row, bool accumulate) {
  const int64_t a_bytes = a_row * 2, b_bytes = b_row * 4, c_bytes = c_row * 4;
  if (accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (two_columns) _tile_loadd(1, c + 16, c_bytes);
    if constexpr (two_rows) _tile_loadd(2, c + 16 * c_row, c_bytes);
    if constexpr (two_rows && two_columns) _tile_loadd(3, c + 16 * c_row + 16, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (two_columns) _tile_zero(1);
    if constexpr (two_rows) _tile_zero(2);
    if constexpr (two_rows && two_columns) _tile_zero(3);
  }
  for (int64_t k = 0; k < k_steps; ++k) {
    _tile_loadd(6, b, b_bytes);
    _tile_loadd(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (two_columns) {
      _tile_loadd(7, b + 16, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (two_rows) {
      _tile_loadd(5, a + 16 * a_row, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (two_rows && two_columns) _tile_dpbf16ps(3, 5, 7);
    a += 32;
    b += 16 * b_row;
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (two_columns) _tile_stored(1, c + 16, c_bytes);
  if constexpr (two_rows) _tile_stored(2, c + 16 * c_row, c_bytes);
  if constexpr (two_rows && two_columns) _tile_stored(3, c + 16 * c_row + 16, c_bytes);
}

inline void pair_product(int64_t m_count, int64_t n_count, int64_t k_count, const bf16* a, int64_t a_row, const uint32_t* b,
                         int64_t b_row, float* c, int64_t c_row, bool accumulate) {
  const int64_t k_steps = (k_count + 31) / 32;
  for (int64_t n = 0; n < n_count; n += 32)
    for (int64_t m = 0; m < m_count; m += 32) {
      const bool two_rows = m_count - m > 16, two_columns = n_count - n > 16;
      const bf16* left = a + m * a_row;
      float* target = c + m * c_row + n;
      if (two_rows && two_columns)
        tile_block<true, true>(k_steps, left, a_row, b + n, b_row, target, c_row, accumulate);
      else if (two_rows)
        tile_block<true, false>(k_steps, left, a_row, b + n, b_row, target, c_row, accumulate);
      else if (two_columns)
        tile_block<false, true>(k_steps, left, a_row, b + n, b_row, target, c_row, accumulate);
      else
        tile_block<false, false>(k_steps, left, a_row, b + n, b_row, target, c_row, accumulate);
    }
}
#else
struct TileUnit {
  TileUnit() {}
  ~TileUnit() {}
};
#if defined(__AVX512BF16__)
inline void pair_product(int64_t m, int64_t n, int64_t k, const bf16* a, int64_t a_row, const uint32_t* b, int64_t b_row,
                         float* c, int64_t c_row, bool accumulate) {
  vector_product<PairDot>(m, n, (k + 1) / 2, reinterpret_cast<const uint32_t*>(a), a_row / 2, 1, b, b_row, c, c_row, accumulate);
}
#endif
#endif

}  // namespace fulmen::cpu::FULMEN_TARGET
