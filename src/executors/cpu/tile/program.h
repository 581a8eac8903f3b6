// A tile program: a loop nest over rows and columns, and the instructions that run on each tile. Made by schedule.cpp,
// run by run.cpp. Plain data.
//
// The rows and columns are cut into a grid of items by size alone, so results don't depend on the number of threads.
// An item is walked tile by tile. Within a tile the instructions form levels, one more after each row reduction; a
// level runs its row instructions once and its tile instructions for each chunk of columns.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "executors/cpu/tile/expression.h"

namespace fulmen::cpu::tile {

// Memory along the loop nest, in elements.
struct Memory {
  bool is_output = false;
  int index = 0;  // of the kernel's inputs or outputs
  DType dtype = DType::f32;
  int64_t offset = 0;
  Dims outer_strides, inner_strides;  // parallel to the program's outer and inner sizes
  bool is_even = true;                // the inner axes are evenly spaced: one column stride
  int64_t col_stride = 0;
  bool is_draw = false;  // see MemoryView
  int64_t seed_offset = 0, seed_stride = 1;
  uint64_t draw_offset = 0, threshold = 0;
};

// The rows and columns that an instruction works on, as its kernel sees them.
enum class Span : uint8_t {
  tile,         // the tile, row by row
  tile_flat,    // all its elements as one row
  rows_flat,    // one value a row, as one row
  columns_flat, // one value a column
  one,
  rows_as_column, tile_as_column,  // reduced to one value
};

enum class Action : uint8_t { compute, load, store };

struct Step {
  Action action = Action::compute;
  Span span = Span::tile_flat;
  Kernel kernel = nullptr;
  LoadKernel load = nullptr;
  StoreKernel store = nullptr;
  int dst = -1, src[4] = {-1, -1, -1, -1};  // slots
  int memory = -1;                          // load, store
  Extent extent = Extent::full;             // load, store: what part of the nest
  uint8_t step[4] = {};
  uint8_t bits = 0;
  bool is_signed = true;
  bool adds_to_columns = false;  // dst is a partial result along the columns
};

// A slot is a pointer that steps name. Constants and registers are set once a thread; the others follow the tile.
struct Slot {
  enum class Kind : uint8_t { constant, tile_register, row_buffer, memory, partial, late } kind = Kind::tile_register;
  int64_t offset = 0;  // bytes: into the frame (register, row_buffer), the constants, or the workspace (partial, late)
  int memory = -1;
  Extent extent = Extent::full;
  int element_bytes = 4;
};

// A reduction over rows (or all): each row of items has its partial results, combined in order at the end.
struct PartialReduction {
  Fold fold = Fold::sum;
  Domain domain = Domain::f32;
  int64_t cols = 1;           // results
  int64_t parts = 1;             // one for each row of items; of a scalar, one for each item
  int64_t workspace_offset = 0;  // parts x cols elements
  int result_slot = -1;
  Kernel combine = nullptr;  // reduces the parts
};

struct Level {
  std::vector<Step> row_steps, tile_steps;
};

struct Program {
  Dims outer_sizes, inner_sizes;
  int64_t rows = 1, cols = 1;
  int64_t tile_rows = 1, tile_cols = 1;
  int64_t item_rows = 1, item_cols = 1;  // multiples of the tile's, or everything
  std::vector<Memory> memories;
  std::vector<Slot> slots;
  std::vector<int> memory_slots;    // those that follow the tile over memory
  std::vector<uint64_t> constants;  // 8 bytes each
  std::vector<Step> prologue;       // column and scalar values, once for a range of items
  std::vector<Level> levels;
  std::vector<PartialReduction> partials;
  std::vector<Step> epilogue;  // on results of partial reductions
  int64_t frame_bytes = 0, workspace_bytes = 0;
  double item_nanoseconds = 0;  // rough estimate, to decide on threads
};

// `isa` chooses the kernels.
std::variant<Program, std::string> schedule(Analysis analysis, Isa isa);

// Analyse and schedule.
std::variant<Program, std::string> compile_body(const Trace& body, Isa isa);

// Reads and writes the memory that the body's types describe. `workspace` has workspace_bytes, 64-byte aligned.
void run(const Program& program, const void* const* inputs, void* const* outputs, void* workspace);

}  // namespace fulmen::cpu::tile
