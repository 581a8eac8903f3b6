// The register-blocked inner product of panels for vector units: Rows x 2 vectors of sums held in registers, one step
// along k for each cell. `Cell` says what a cell is (a float, or a pair of bf16). Included by the kernels of each
// instruction set.
#pragma once

#include "executors/cpu/gemm/finish_tile.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

struct FloatCell {
  FULMEN_INLINE static vfloat multiply_add(vfloat sum, uint32_t a, vuint b) {
    return fma(splat(std::bit_cast<float>(a)), std::bit_cast<vfloat>(b), sum);
  }
};

template <class Cell, int Stride, int Rows>
void multiply_tile(const uint32_t* a, const uint32_t* b, int64_t cells, float* sums, bool add) {
  constexpr int nr = 2 * lanes;
  vfloat s[Rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    s[r][0] = add ? load(sums + r * nr) : vfloat{};
    s[r][1] = add ? load(sums + r * nr + lanes) : vfloat{};
  }
  for (int64_t c = 0; c < cells; ++c, a += Stride, b += nr) {
    vuint b0, b1;
    std::memcpy(&b0, b, sizeof(b0));
    std::memcpy(&b1, b + lanes, sizeof(b1));
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      s[r][0] = Cell::multiply_add(s[r][0], a[r], b0);
      s[r][1] = Cell::multiply_add(s[r][1], a[r], b1);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    store(sums + r * nr, s[r][0]);
    store(sums + r * nr + lanes, s[r][1]);
  }
}

using TileFn = void (*)(const uint32_t* a, const uint32_t* b, int64_t cells, float* sums, bool add);

template <class Cell, int Stride, size_t... R>
constexpr std::array<TileFn, Stride> tile_functions(std::index_sequence<R...>) {
  return {multiply_tile<Cell, Stride, static_cast<int>(R) + 1>...};
}

// BlockKernels::multiply for panels of MaxRows rows and two vectors of columns.
template <class Cell, int MaxRows>
void multiply_block(const MultiplyArgs& args, int64_t inner_cells, int64_t cells) {
  static constexpr auto tiles = tile_functions<Cell, MaxRows>(std::make_index_sequence<MaxRows>{});
  constexpr int nr = 2 * lanes;
  const int64_t a_panel = MaxRows * cells;
  for (int64_t j = 0; j < args.columns; j += nr) {
    const auto* b = reinterpret_cast<const uint32_t*>(static_cast<const char*>(args.b) + j / nr * args.b_panel_bytes);
    const int columns = static_cast<int>(args.columns - j < nr ? args.columns - j : nr);
    int64_t done = 0;
    do {
      const int64_t now = cells - done <= inner_cells + inner_cells / 2 ? cells - done : inner_cells;
      const bool last = done + now == cells;
      const bool whole = done == 0 && last;
      const auto* a = static_cast<const uint32_t*>(args.a) + done * MaxRows;
      for (int64_t i = 0; i < args.rows; i += MaxRows, a += a_panel) {
        const int rows = static_cast<int>(args.rows - i < MaxRows ? args.rows - i : MaxRows);
        float* sums = args.scratch + (whole ? 0 : i * nr);
        if (last) prefetch_tile(rows, columns, args.row0 + i, args.column0 + j, *args.output);
        tiles[static_cast<size_t>(rows - 1)](a, b + done * nr, now, sums, done > 0);
        if (last) finish_tile(sums, nr, rows, columns, args.row0 + i, args.column0 + j, *args.output);
      }
      done += now;
    } while (done < cells);
  }
}

}  // namespace
}  // namespace fulmen::cpu::FULMEN_TARGET
