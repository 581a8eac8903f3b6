// bf16 products with float sums: the tile unit (amx), or the dot product of bf16 pairs (avx512_bf16). Other
// instruction sets widen to float (gemm_f32.simd.cpp). Both units treat subnormal bf16 operands as zero.
#if defined(__AVX512BF16__)
#include <array>
#include <utility>

#include "executors/cpu/gemm/pack_cells.h"
#include "executors/cpu/gemm/register_tile.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

#define FULMEN_WITH_CELLS(call)                                                                                        \
  switch (source.dtype) {                                                                                              \
    case DType::bf16: return call(PairCells<bf16>{static_cast<const bf16*>(source.data), source.width_stride, source.k_stride, k}); \
    case DType::f16: return call(PairCells<f16>{static_cast<const f16*>(source.data), source.width_stride, source.k_stride, k});    \
    default: return call(PairCells<float>{static_cast<const float*>(source.data), source.width_stride, source.k_stride, k});        \
  }

#if defined(__AMX_TILE__)

// Tiles: 16 rows of 64 bytes. Sums are 2 x 2 tiles (0..3), A two tiles (4, 5), B two tiles (6, 7).
constexpr int rows_of_block = 32, columns_of_block = 32;
constexpr int k_of_tile = 32, cells_of_tile = 16;
constexpr int64_t inner_k = 512;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A's panels: [k / 32][32 rows][32 elements along k], so that a tile is 1024 bytes in a row.
template <class Cells>
void pack_tiles(const Cells& cells, int64_t width, int64_t k_tiles, uint32_t* packed) {
  const int64_t filled = (cells.k + 1) / 2;
  for (int64_t w0 = 0; w0 < width; w0 += rows_of_block, packed += k_tiles * rows_of_block * cells_of_tile) {
    const int64_t live = width - w0 < rows_of_block ? width - w0 : rows_of_block;
    if (cells.k_stride == 1) {
      constexpr int64_t run = 8;  // tiles: rows are read in runs of 512 bytes
      for (int64_t t0 = 0; t0 < k_tiles; t0 += run) {
        const int64_t t1 = k_tiles - t0 < run ? k_tiles : t0 + run;
        for (int64_t w = 0; w < rows_of_block; ++w)
          for (int64_t t = t0; t < t1; ++t)
            store_cells(packed + (t * rows_of_block + w) * cells_of_tile,
                        w < live ? cells.along_k(w0 + w, t * cells_of_tile) : vuint{});
      }
      continue;
    }
    for (int64_t t = 0; t < k_tiles; ++t) {
      uint32_t* const tile = packed + t * rows_of_block * cells_of_tile;
      const int64_t cell0 = t * cells_of_tile;
      if (cells.width_stride == 1) {
        for (int64_t half = 0; half < rows_of_block; half += lanes) {
          vuint block[lanes];
          if (live - half >= lanes && (cell0 + lanes) * 2 <= cells.k) {
#pragma GCC unroll 16
            for (int i = 0; i < lanes; ++i) block[i] = cells.along_width(w0 + half, cell0 + i);
          } else {
            for (int i = 0; i < lanes; ++i)
              block[i] = cell0 + i < filled && half < live ? cells.along_width(w0 + half, cell0 + i, live - half) : vuint{};
          }
          transpose(block);
#pragma GCC unroll 16
          for (int i = 0; i < lanes; ++i) store_cells(tile + (half + i) * cells_of_tile, block[i]);
        }
      } else {
        for (int64_t w = 0; w < rows_of_block; ++w)
          for (int64_t i = 0; i < cells_of_tile; ++i)
            tile[w * cells_of_tile + i] = w < live && cell0 + i < filled ? cells.one(w0 + w, cell0 + i) : 0;
      }
    }
  }
}

void pack_a(const PackSource& source, int64_t width, int64_t k, void* packed) {
  const auto pack = [&](const auto& cells) { pack_tiles(cells, width, (k + k_of_tile - 1) / k_of_tile, static_cast<uint32_t*>(packed)); };
  FULMEN_WITH_CELLS(pack)
}
void pack_b(const PackSource& source, int64_t width, int64_t k, void* packed) {
  const int64_t cells_count = (k + k_of_tile - 1) / k_of_tile * cells_of_tile;
  const auto pack = [&](const auto& cells) { pack_panels<columns_of_block>(cells, width, cells_count, static_cast<uint32_t*>(packed)); };
  FULMEN_WITH_CELLS(pack)
}

// RowTiles x ColumnTiles tiles of sums over `tiles` steps of 32 along k.
template <int RowTiles, int ColumnTiles>
void multiply_tile(const char* a, const char* b, int64_t tiles, float* sums, bool add) {
  constexpr int stride = columns_of_block * 4;
  constexpr int down = 16 * columns_of_block;
  asm volatile("" ::: "memory");  // the tile loads below don't tell the compiler that they read memory
  if (add) {
    _tile_loadd(0, sums, stride);
    if constexpr (ColumnTiles > 1) _tile_loadd(1, sums + 16, stride);
    if constexpr (RowTiles > 1) _tile_loadd(2, sums + down, stride);
    if constexpr (RowTiles > 1 && ColumnTiles > 1) _tile_loadd(3, sums + down + 16, stride);
  } else {
    _tile_zero(0);
    if constexpr (ColumnTiles > 1) _tile_zero(1);
    if constexpr (RowTiles > 1) _tile_zero(2);
    if constexpr (RowTiles > 1 && ColumnTiles > 1) _tile_zero(3);
  }
  for (int64_t t = 0; t < tiles; ++t, a += 2048, b += 2048) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 128);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (ColumnTiles > 1) {
      _tile_loadd(7, b + 64, 128);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (RowTiles > 1) {
      _tile_loadd(5, a + 1024, 64);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (ColumnTiles > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, stride);
  if constexpr (ColumnTiles > 1) _tile_stored(1, sums + 16, stride);
  if constexpr (RowTiles > 1) _tile_stored(2, sums + down, stride);
  if constexpr (RowTiles > 1 && ColumnTiles > 1) _tile_stored(3, sums + down + 16, stride);
}

void multiply(const MultiplyArgs& args) {
  static constexpr TileConfig config;
  _tile_loadconfig(&config);
  const int64_t tiles = args.k / k_of_tile;
  constexpr int64_t inner_tiles = inner_k / k_of_tile;
  for (int64_t j = 0; j < args.columns; j += columns_of_block) {
    const char* const b = static_cast<const char*>(args.b) + j / columns_of_block * args.b_panel_bytes;
    const int columns = static_cast<int>(args.columns - j < columns_of_block ? args.columns - j : columns_of_block);
    int64_t done = 0;
    do {
      const int64_t now = tiles - done <= inner_tiles + inner_tiles / 2 ? tiles - done : inner_tiles;
      const bool last = done + now == tiles;
      const bool whole = done == 0 && last;
      for (int64_t i = 0; i < args.rows; i += rows_of_block) {
        const int rows = static_cast<int>(args.rows - i < rows_of_block ? args.rows - i : rows_of_block);
        const char* const a = static_cast<const char*>(args.a) + (i / rows_of_block * tiles + done) * 2048;
        float* const sums = args.scratch + (whole ? 0 : i * columns_of_block);
        const auto tile = rows > 16 ? (columns > 16 ? multiply_tile<2, 2> : multiply_tile<2, 1>)
                                    : (columns > 16 ? multiply_tile<1, 2> : multiply_tile<1, 1>);
        if (last) prefetch_tile(rows, columns, args.row0 + i, args.column0 + j, *args.output);
        tile(a, b + done * 2048, now, sums, done > 0);
        if (last) finish_tile(sums, columns_of_block, rows, columns, args.row0 + i, args.column0 + j, *args.output);
      }
      done += now;
    } while (done < tiles);
  }
  _tile_release();
}

constexpr BlockKernels kernels{rows_of_block, columns_of_block, k_of_tile, 2, inner_k, false, pack_a, pack_b, multiply};

#else

struct PairCell {
  FULMEN_INLINE static vfloat multiply_add(vfloat sum, uint32_t a, vuint b) {
    const __m512i pair = _mm512_set1_epi32(static_cast<int>(a));
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)b);
  }
};

constexpr int rows_of_tile = 12;
constexpr int64_t inner_k = 512;

void pack_a(const PackSource& source, int64_t width, int64_t k, void* packed) {
  const auto pack = [&](const auto& cells) { pack_panels<rows_of_tile>(cells, width, (k + 1) / 2, static_cast<uint32_t*>(packed)); };
  FULMEN_WITH_CELLS(pack)
}
void pack_b(const PackSource& source, int64_t width, int64_t k, void* packed) {
  const auto pack = [&](const auto& cells) { pack_panels<2 * lanes>(cells, width, (k + 1) / 2, static_cast<uint32_t*>(packed)); };
  FULMEN_WITH_CELLS(pack)
}
void multiply(const MultiplyArgs& args) { multiply_block<PairCell, rows_of_tile, 2, false>(args, inner_k / 2, args.k / 2); }

constexpr BlockKernels kernels{rows_of_tile, 2 * lanes, 2, 2, inner_k, false, pack_a, pack_b, multiply};

#endif
#undef FULMEN_WITH_CELLS

}  // namespace

const BlockKernels& bf16_block_kernels() { return kernels; }

}  // namespace fulmen::cpu::FULMEN_TARGET
#endif
