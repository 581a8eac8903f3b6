// Float products: every instruction set, also for bf16 and f16 operands where there is no unit for them (they are
// widened while they are packed, and products of two bf16 are exact in float).
#include <array>
#include <utility>

#include "executors/cpu/gemm/pack_cells.h"
#include "executors/cpu/gemm/register_tile.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

// Sums fill the registers, but for two vectors of B and one of A: 12 x 2 of 32, 6 x 2 of 16.
constexpr int rows_of_tile = lanes == 16 ? 12 : 6;
constexpr int64_t inner_k = 256;

void pack_a(const PackSource& source, int64_t width, int64_t k, void* packed) { pack_single<rows_of_tile>(source, width, k, packed); }
void pack_b(const PackSource& source, int64_t width, int64_t k, void* packed) { pack_single<2 * lanes>(source, width, k, packed); }
void multiply(const MultiplyArgs& args) { multiply_block<FloatCell, rows_of_tile, 2, true>(args, inner_k, args.k); }

#if defined(__AVX512F__)
// Half the rows, twice the columns: fewer loads for the same sums, and rows read where they are are few at a time.
constexpr int rows_of_wide_tile = 6;
constexpr int wide_vectors = 4;
constexpr int64_t wide_inner_k = 128;

void pack_wide_a(const PackSource& source, int64_t width, int64_t k, void* packed) { pack_single<rows_of_wide_tile>(source, width, k, packed); }
void pack_wide_b(const PackSource& source, int64_t width, int64_t k, void* packed) { pack_single<wide_vectors * lanes>(source, width, k, packed); }
void multiply_wide(const MultiplyArgs& args) { multiply_block<FloatCell, rows_of_wide_tile, wide_vectors, true>(args, wide_inner_k, args.k); }
#endif

}  // namespace

const BlockKernels& f32_block_kernels() {
  static constexpr BlockKernels kernels{rows_of_tile, 2 * lanes, 1, 4, inner_k, true, pack_a, pack_b, multiply};
  return kernels;
}

#if defined(__AVX512F__)
const BlockKernels& f32_wide_block_kernels() {
  static constexpr BlockKernels kernels{rows_of_wide_tile, wide_vectors * lanes, 1, 4, wide_inner_k, true, pack_wide_a, pack_wide_b, multiply_wide};
  return kernels;
}
#endif

}  // namespace fulmen::cpu::FULMEN_TARGET
