// The instructions of the tile machine: functions over a tile in cache, in one table per instruction set. What strings
// them together is lower.cpp; what runs them over memory is run.cpp.
//
// A tile is rows x cols elements, packed. Registers hold f32 (also for bool, as 0 and 1, and for the 16-bit floats) or,
// in the wide functions of wide_kernels.cpp, f64 and i64.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "executors/cpu/dispatch.h"
#include "ops/pointwise_bodies.h"

namespace fulmen::cpu::tile {

// What a register holds.
enum class Domain : uint8_t { f32, f64, i64 };
inline constexpr int domain_count = 3;
constexpr int domain_bytes(Domain domain) { return domain == Domain::f32 ? 4 : 8; }
constexpr Domain domain_of(DType dtype) {
  if (dtype == DType::f64) return Domain::f64;
  return is_integer(dtype) ? Domain::i64 : Domain::f32;
}

// Pointwise instructions, in the order of the shared list.
enum class Op : uint8_t {
#define FULMEN_ENUMERATE(name, body, operands, kind, attributes) name,
  FULMEN_POINTWISE_OPS(FULMEN_ENUMERATE)
#undef FULMEN_ENUMERATE
};
inline constexpr int op_count = 0
#define FULMEN_COUNT(name, body, operands, kind, attributes) +1
    FULMEN_POINTWISE_OPS(FULMEN_COUNT)
#undef FULMEN_COUNT
    ;

enum class Fold : uint8_t { sum, max, min };
inline constexpr int fold_count = 3;

// One piece of work. Operand i is a full tile, or is spread along the rows: element r * step[i] serves all of row r
// (step 1: one value a row; step 0: one value for all).
struct Work {
  void* dst = nullptr;
  const void* src[4] = {};
  int64_t rows = 1, cols = 1;
  uint8_t step[4] = {};
  bool first = true;      // a row reduction starts here; otherwise it goes on from dst
  uint8_t bits = 0;       // wrap: bytes of the integer, negative sign in `is_signed`
  bool is_signed = true;
};
using Kernel = void (*)(const Work&);

// A strided block of memory that a tile is loaded from or stored to. Strides are in elements.
struct Block {
  const void* base = nullptr;     // of element (0, 0); written through when storing
  DType dtype = DType::f32;
  const int64_t* row_offsets = nullptr;  // `rows` offsets
  int64_t rows = 1, cols = 1;
  int64_t col_stride = 1;                // where the inner axes are one axis
  const int64_t* col_offsets = nullptr;  // else `cols` offsets
  // A draw instead of memory: positions count from `first` in the drawn tensor.
  int64_t first = 0;
  uint64_t key = 0, counter_offset = 0, threshold = 0;
};
using LoadKernel = void (*)(void* dst, const Block& block);
using StoreKernel = void (*)(const void* src, const Block& block);

struct KernelTable {
  // [op][form]: bit i of the form is set if tensor operand i is spread. Null where there is no such form.
  Kernel pointwise[op_count][8] = {};
  Kernel reduce_rows[fold_count] = {};      // dst[r] = fold of row r
  Kernel reduce_columns[fold_count] = {};   // dst[c] = fold of dst[c] and column c
  Kernel multiply_reduce_rows = nullptr;    // dst[r] = sum of src[0] * src[1] over row r
  Kernel multiply_reduce_columns = nullptr; // dst[c] += sum of src[0] * src[1] over column c; f32 only
  Kernel repeat = nullptr;                  // dst row r = src, for all r
  Kernel spread = nullptr;                  // dst row r = src[r * step]
  Kernel round_bf16 = nullptr, round_f16 = nullptr;
  LoadKernel load[dtype_count] = {};        // memory of the dtype -> registers of this domain
  StoreKernel store[dtype_count] = {};
  LoadKernel draw_mask = nullptr;           // 1 where Philox's word (core/philox.h) is at least the threshold, else 0
};

// f32 registers: the table of the instruction set. f64 and i64: one table for all.
const KernelTable& kernel_table(Domain domain, Isa isa);

// Between domains, and an i64 register wrapped to a narrower integer (Work::bits bytes).
Kernel convert_kernel(Domain from, Domain to);
Kernel wrap_kernel();
// f64 or i64 comparisons: operands in `domain`, result in f32.
// where: src[0] in f32, src[1] and src[2] in `domain`. Both are in the table of the domain.

}  // namespace fulmen::cpu::tile
