// The loop nest of a group: which axes are rows, which are columns, in which order, and how each value and each piece of
// memory lies along it. The first half of scheduling; schedule.cpp emits the instructions.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "executors/cpu/tile/program.h"

namespace fulmen::cpu::tile {

// What the nest makes of one expression.
struct Placement {
  bool is_live = false;
  Extent extent = Extent::scalar;
  Reduction reduction = Reduction::none;
  bool is_late = false;  // known only when all items are done
  int level = 0;
  int uses = 0;  // by live expressions and outputs
};

struct Nest {
  std::vector<Placement> placements;  // one an expression
  Dims outer_sizes, inner_sizes;
  std::vector<Memory> load_memories;    // parallel to the analysis' views
  std::vector<Memory> output_memories;  // parallel to its output_views
  std::vector<Extent> output_extents;
  bool has_row_reductions = false;
};

// The nest in which every reduction is over all rows, over all columns or over everything; else the reason.
std::variant<Nest, std::string> choose_nest(const Analysis& analysis);

}  // namespace fulmen::cpu::tile
