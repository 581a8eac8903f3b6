// The register-blocked inner product for vector units: Rows x Vectors vectors of sums held in registers, one step along k for
// each cell of a panel of B and of A's rows, which are packed or, where A lies well, read where they are. `Cell` says
// what a cell is (a float, or a pair of bf16). Whole tiles of floats go from registers to C. Included by the kernels of
// each instruction set.
#pragma once

#include "executors/cpu/gemm/finish_tile.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

struct FloatCell {
  FULMEN_INLINE static vfloat multiply_add(vfloat sum, uint32_t a, vuint b) {
    return fma(splat(std::bit_cast<float>(a)), std::bit_cast<vfloat>(b), sum);
  }
};

// Where the sums of a tile go, and what is added to them on the way.
struct TileSums {
  float* to;
  int64_t row_stride;
  const float* added;  // null: nothing; else a matrix like `to`, which it may be
  int64_t added_row_stride;
  const float* bias;  // null: none; one a column
};

// A's cells of Rows rows: packed, they follow one another; as they lie, rows are row_stride apart. There few address
// registers must do: rows are reached from every third one.
template <int Stride, int Rows, bool InRows>
struct RowCells {
  static constexpr int bases = InRows ? (Rows + 2) / 3 : 1;
  const char* base[bases];
  int64_t row_bytes;

  FULMEN_INLINE RowCells(const uint32_t* a, int64_t row_stride) : row_bytes(row_stride * 4) {
#pragma GCC unroll 4
    for (int i = 0; i < bases; ++i) base[i] = reinterpret_cast<const char*>(a) + 3 * i * row_bytes;
  }
  template <int Step>
  FULMEN_INLINE uint32_t cell(int row) const {
    const char* const p = InRows ? base[row / 3] + row % 3 * row_bytes + Step * 4 : base[0] + (Step * Stride + row) * 4;
    return *reinterpret_cast<const uint32_t*>(p);
  }
  FULMEN_INLINE void advance(int steps) {
#pragma GCC unroll 4
    for (int i = 0; i < bases; ++i) base[i] += steps * (InRows ? 4 : Stride * 4);
  }
};

template <class Cell, int Rows, int Vectors, int Step, class Cells>
FULMEN_INLINE void add_products(vfloat (&s)[Rows][Vectors], const Cells& a, const uint32_t* b) {
  vuint columns[Vectors];
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) std::memcpy(&columns[v], b + (Step * Vectors + v) * lanes, sizeof(columns[v]));
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    const uint32_t cell = a.template cell<Step>(r);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) s[r][v] = Cell::multiply_add(s[r][v], cell, columns[v]);
  }
}

template <class Cell, int Stride, int Rows, int Vectors, bool InRows>
void multiply_tile(const uint32_t* a, int64_t a_row_stride, const uint32_t* b, int64_t cells, const TileSums& sums) {
  constexpr int nr = Vectors * lanes;
  vfloat s[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) s[r][v] = vfloat{};
  RowCells<Stride, Rows, InRows> rows(a, a_row_stride);
  int64_t c = 0;
  for (; c + 2 <= cells; c += 2, b += 2 * nr) {
    add_products<Cell, Rows, Vectors, 0>(s, rows, b);
    add_products<Cell, Rows, Vectors, 1>(s, rows, b);
    rows.advance(2);
  }
  if (c < cells) add_products<Cell, Rows, Vectors, 0>(s, rows, b);
  if (sums.bias) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      const vfloat bias = load(sums.bias + v * lanes);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) s[r][v] += bias;
    }
  }
  if (sums.added) {
    const float* added = sums.added;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r, added += sums.added_row_stride)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) s[r][v] += load(added + v * lanes);
  }
  float* to = sums.to;
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r, to += sums.row_stride)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(to + v * lanes, s[r][v]);
}

using TileFn = void (*)(const uint32_t* a, int64_t a_row_stride, const uint32_t* b, int64_t cells, const TileSums& sums);

template <class Cell, int Stride, int Vectors, bool InRows, size_t... R>
constexpr std::array<TileFn, Stride> tile_functions(std::index_sequence<R...>) {
  return {multiply_tile<Cell, Stride, static_cast<int>(R) + 1, Vectors, InRows>...};
}

// Can whole tiles be written from registers to where they belong, with no more than a bias and one addend?
inline bool is_direct(const TileOutput& out) {
  const bool plain_bias = !out.bias || (out.bias_dtype == DType::f32 && out.bias_column_stride == 1 && out.bias_row_stride == 0);
  const bool plain_residual =
      !out.residual || (out.residual_dtype == DType::f32 && out.residual_column_stride == 1 && out.residual_scale == 1.0f && !out.accumulate);
  return out.c_dtype == DType::f32 && out.c_column_stride == 1 && !out.partial && out.alpha == 1.0f && out.activation == Activation::none && plain_bias &&
         plain_residual;
}

// BlockKernels::multiply for panels of MaxRows rows and of Vectors vectors of columns.
template <class Cell, int MaxRows, int Vectors, bool TakesRows>
void multiply_block(const MultiplyArgs& args, int64_t inner_cells, int64_t cells) {
  static constexpr auto packed_tiles = tile_functions<Cell, MaxRows, Vectors, false>(std::make_index_sequence<MaxRows>{});
  static constexpr auto row_tiles = tile_functions<Cell, MaxRows, Vectors, TakesRows>(std::make_index_sequence<MaxRows>{});
  constexpr int nr = Vectors * lanes;
  const TileOutput& out = *args.output;
  const bool in_rows = TakesRows && args.a_row_stride != 0;
  const auto& tiles = in_rows ? row_tiles : packed_tiles;
  const int64_t a_panel = in_rows ? MaxRows * args.a_row_stride : MaxRows * cells;
  const bool may_be_direct = is_direct(out);
  for (int64_t j = 0; j < args.columns; j += nr) {
    const auto* b = reinterpret_cast<const uint32_t*>(static_cast<const char*>(args.b) + j / nr * args.b_panel_bytes);
    const int columns = static_cast<int>(args.columns - j < nr ? args.columns - j : nr);
    const bool direct = may_be_direct && columns == nr;
    const int64_t column = args.column0 + j;
    int64_t done = 0;
    do {
      const int64_t now = cells - done <= inner_cells + inner_cells / 2 ? cells - done : inner_cells;
      const bool first = done == 0, last = done + now == cells;
      const auto* a = static_cast<const uint32_t*>(args.a) + (in_rows ? done : done * MaxRows);
      for (int64_t i = 0; i < args.rows; i += MaxRows, a += a_panel) {
        const int rows = static_cast<int>(args.rows - i < MaxRows ? args.rows - i : MaxRows);
        const int64_t row = args.row0 + i;
        if (last || direct) prefetch_tile(rows, columns, row, column, out);
        TileSums sums{};
        if (direct) {
          sums.to = static_cast<float*>(out.c) + row * out.c_row_stride + column;
          sums.row_stride = out.c_row_stride;
          if (!first || out.accumulate) {
            sums.added = sums.to, sums.added_row_stride = sums.row_stride;
          } else if (out.residual) {
            sums.added = static_cast<const float*>(out.residual) + row * out.residual_row_stride + column;
            sums.added_row_stride = out.residual_row_stride;
          }
          if (last && out.bias) sums.bias = static_cast<const float*>(out.bias) + column;
          tiles[static_cast<size_t>(rows - 1)](a, args.a_row_stride, b + done * nr, now, sums);
          continue;
        }
        sums.to = args.scratch + (first && last ? 0 : i * nr), sums.row_stride = nr;
        if (!first) sums.added = sums.to, sums.added_row_stride = nr;
        tiles[static_cast<size_t>(rows - 1)](a, args.a_row_stride, b + done * nr, now, sums);
        if (last) finish_tile(sums.to, nr, rows, columns, row, column, out);
      }
      done += now;
    } while (done < cells);
  }
}

}  // namespace
}  // namespace fulmen::cpu::FULMEN_TARGET
