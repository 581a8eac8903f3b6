// Tile and item sizes: tiles so small that what lives at once stays in the cache, items so large that starting one costs
// nothing, both by the group alone and never by the number of threads.
#include <algorithm>
#include <map>

#include "executors/cpu/tile/sizes.h"

namespace fulmen::cpu::tile {
namespace {

constexpr int64_t item_elements = 16384;
constexpr int64_t block_rows = 64;
constexpr int64_t least_rows_of_parts = 8;
constexpr int64_t row_items_limit = 64;  // partial results of a column: bounded memory, enough parts for threads

int64_t product(const Dims& dims) {
  int64_t result = 1;
  for (int64_t size : dims) result *= size;
  return result;
}
int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
class Sizer {
 public:
  Sizer(const Analysis& analysis, const Nest& nest, Program& program) : analysis_(analysis), nest_(nest), program_(program) {}

  void choose_tiles() {
    Program& p = program_;
    p.outer_sizes = nest_.outer_sizes;
    p.inner_sizes = nest_.inner_sizes;
    p.rows = product(p.outer_sizes);
    p.cols = product(p.inner_sizes);
    const int registers = registers_wanted();
    const int64_t elements = registers <= 6 ? 2048 : 1024;
    // Memory in which neighbours along the columns lie apart is read in blocks of many rows: whole cache lines at a time.
    bool is_transposed = false;
    for_each_live_memory([&](const Memory& memory) { is_transposed = is_transposed || memory.col_stride > 1; });
    is_transposed = is_transposed && p.rows >= block_rows / 4;
    if (is_transposed && !nest_.has_row_reductions) {
      p.tile_cols = std::min(p.cols, std::max<int64_t>(16, elements / block_rows));
      p.tile_rows = std::min(p.rows, p.tile_cols == p.cols ? std::max<int64_t>(1, elements / p.cols) : block_rows);
    } else if (p.cols <= elements) {
      p.tile_cols = p.cols;
      p.tile_rows = std::min(p.rows, std::max<int64_t>(is_transposed ? 16 : 1, elements / p.cols));
    } else if (nest_.has_row_reductions) {
      p.tile_cols = p.cols * 4 * registers <= 65536 ? p.cols : elements;
      p.tile_rows = 1;
    } else {
      p.tile_rows = 1;
      p.tile_cols = elements;
    }
    bool has_partials = false;
    for (size_t i = 0; i < analysis_.expressions.size(); ++i) {
      const Placement& placed = placement(static_cast<int>(i));
      has_partials = has_partials || (placed.is_live && (placed.reduction == Reduction::over_rows || placed.reduction == Reduction::over_all));
    }
    p.item_cols = p.cols;
    int64_t item_rows = std::max<int64_t>(1, item_elements / p.cols);
    if (!nest_.has_row_reductions && p.cols > item_elements) {
      p.item_cols = std::min(p.cols, round_up(std::max<int64_t>(1, item_elements / p.tile_rows), p.tile_cols));
      item_rows = 1;
    }
    if (has_partials) {
      // Each row of items writes partial results for its columns and reads them back: worth it only for several rows, and
      // only as many as threads need beside the items along the columns.
      const int64_t col_items = (p.cols + p.item_cols - 1) / p.item_cols;
      const int64_t row_items = std::max<int64_t>(1, row_items_limit / col_items);
      item_rows = std::max({item_rows, (p.rows + row_items - 1) / row_items, least_rows_of_parts});
    }
    p.item_rows = std::min(p.rows, round_up(item_rows, p.tile_rows));
  }

 private:
  const Expression& at(int i) const { return analysis_.expressions[static_cast<size_t>(i)]; }
  const Placement& placement(int i) const { return nest_.placements[static_cast<size_t>(i)]; }

  // Tile registers alive at once, roughly: what memory holds already doesn't count.
  int registers_wanted() const {
    std::map<int, size_t> last_use;
    for (size_t i = 0; i < analysis_.expressions.size(); ++i)
      if (placement(static_cast<int>(i)).is_live)
        for (int arg : at(static_cast<int>(i)).args) last_use[arg] = i;
    int alive = 0, most = 1;
    for (size_t i = 0; i < analysis_.expressions.size(); ++i) {
      const auto counts = [&](int e) {
        return placement(e).is_live && placement(e).extent == Extent::full && !(at(e).code == Code::load && is_native(at(e).dtype, at(e).domain));
      };
      if (counts(static_cast<int>(i))) most = std::max(most, ++alive);
      for (int arg : at(static_cast<int>(i)).args)
        if (counts(arg) && last_use.count(arg) && last_use[arg] == i) last_use.erase(arg), --alive;
    }
    return most;
  }

  template <class F>
  void for_each_live_memory(F&& f) const {
    for (size_t i = 0; i < analysis_.expressions.size(); ++i)
      if (placement(static_cast<int>(i)).is_live && at(static_cast<int>(i)).code == Code::load)
        f(nest_.load_memories[static_cast<size_t>(at(static_cast<int>(i)).view)]);
    for (const Memory& memory : nest_.output_memories) f(memory);
  }

  const Analysis& analysis_;
  const Nest& nest_;
  Program& program_;
};

}  // namespace

void choose_tiles(const Analysis& analysis, const Nest& nest, Program& program) { Sizer(analysis, nest, program).choose_tiles(); }

double item_cost(const Analysis& analysis, const Nest& nest, const Program& program) {
  const double full = static_cast<double>(program.item_rows) * static_cast<double>(program.item_cols);
  double nanoseconds = 0;
  for (size_t i = 0; i < analysis.expressions.size(); ++i) {
    const Placement& p = nest.placements[i];
    if (!p.is_live || p.extent != Extent::full) continue;
    const Expression& e = analysis.expressions[i];
    double each = 0.08;
    if (e.code == Code::load) each = analysis.views[static_cast<size_t>(e.view)].is_draw ? 1.0 : 0.1 * static_cast<double>(dtype_bytes(e.dtype));
    if (e.code == Code::pointwise) {
      switch (e.op) {
        case Op::exp: case Op::log: case Op::sigmoid: case Op::silu: case Op::div: case Op::sqrt: case Op::rsqrt: each = 0.4; break;
        case Op::tanh: case Op::erf: case Op::gelu: case Op::gelu_tanh: case Op::gelu_grad: case Op::gelu_tanh_grad: case Op::expm1:
        case Op::log1p: case Op::log2: case Op::sin: case Op::cos: case Op::tan: case Op::silu_grad: case Op::softplus: each = 0.8; break;
        case Op::pow: case Op::fmod: case Op::remainder: case Op::atan2: each = 8; break;
        default: break;
      }
      if (e.domain != Domain::f32) each *= 4;
    }
    nanoseconds += each * full;
  }
  for (const Memory& memory : nest.output_memories) nanoseconds += 0.1 * full * static_cast<double>(dtype_bytes(memory.dtype));
  return nanoseconds;
}

}  // namespace fulmen::cpu::tile
