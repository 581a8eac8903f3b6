// Sizes of tiles and items, places of registers, and the estimate of an item's time: what scheduling decides apart from
// the instructions themselves.
#pragma once

#include "executors/cpu/tile/nest.h"

namespace fulmen::cpu::tile {

// Fills the nest, tile and item sizes of `program`.
void choose_tiles(const Analysis& analysis, const Nest& nest, Program& program);

// Nanoseconds of one item, roughly.
double item_cost(const Analysis& analysis, const Nest& nest, const Program& program);

// Gives each register a place in the frame; registers that don't live at the same time share places.
void allocate_registers(Program& program);

// Does memory of the dtype hold what a register of the domain holds?
constexpr bool is_native(DType dtype, Domain domain) {
  return (domain == Domain::f32 && dtype == DType::f32) || (domain == Domain::f64 && dtype == DType::f64) ||
         (domain == Domain::i64 && dtype == DType::i64);
}
constexpr int64_t aligned_bytes(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace fulmen::cpu::tile
