// Expressions in a loop nest -> a tile program: the instructions and their slots. Tile sizes are chosen in sizes.cpp,
// registers get their places in registers.cpp.
#include <algorithm>
#include <bit>
#include <limits>
#include <map>

#include "core/error.h"
#include "executors/cpu/tile/nest.h"
#include "executors/cpu/tile/sizes.h"

namespace fulmen::cpu::tile {
namespace {

class Scheduler {
 public:
  Scheduler(Analysis analysis, Nest nest, Isa isa) : analysis_(std::move(analysis)), nest_(std::move(nest)), isa_(isa) {}

  Program make() {
    choose_tiles(analysis_, nest_, program_);
    const size_t count = analysis_.expressions.size();
    slots_.assign(count, -1);
    wide_slots_.assign(count, -1);
    late_slots_.assign(count, -1);
    int last_level = 0;
    for (size_t i = 0; i < count; ++i)
      if (placement(static_cast<int>(i)).is_live && !placement(static_cast<int>(i)).is_late) last_level = std::max(last_level, placement(static_cast<int>(i)).level);
    program_.levels.resize(static_cast<size_t>(last_level) + 1);
    assign_outputs();
    for (int level = 0; level <= last_level; ++level) emit_level(level);
    emit_late();
    allocate_registers(program_);
    program_.item_nanoseconds = item_cost(analysis_, nest_, program_);
    return std::move(program_);
  }

 private:
  const Expression& at(int i) const { return analysis_.expressions[static_cast<size_t>(i)]; }
  const Placement& placement(int i) const { return nest_.placements[static_cast<size_t>(i)]; }
  bool single_chunk() const { return program_.tile_cols == program_.cols; }
  const KernelTable& table(Domain domain) const { return kernel_table(domain, isa_); }

  // --- slots ---

  int add_slot(Slot slot) {
    program_.slots.push_back(slot);
    return static_cast<int>(program_.slots.size()) - 1;
  }
  int register_slot(Extent extent, Domain domain) {
    Slot slot;
    slot.kind = Slot::Kind::tile_register;
    slot.extent = extent;
    slot.element_bytes = domain_bytes(domain);
    return add_slot(slot);
  }
  int constant_slot(int expression) {
    int& slot = slots_[static_cast<size_t>(expression)];
    if (slot >= 0) return slot;
    const Expression& e = at(expression);
    uint64_t bits = 0;
    if (e.domain == Domain::f32) bits = std::bit_cast<uint32_t>(static_cast<float>(e.number));
    else if (e.domain == Domain::f64) bits = std::bit_cast<uint64_t>(e.number);
    else bits = static_cast<uint64_t>(e.integer);
    Slot constant;
    constant.kind = Slot::Kind::constant;
    constant.offset = static_cast<int64_t>(program_.constants.size()) * 8;
    constant.extent = Extent::scalar;
    program_.constants.push_back(bits);
    return slot = add_slot(constant);
  }
  int add_memory(const Memory& memory) {
    program_.memories.push_back(memory);
    return static_cast<int>(program_.memories.size()) - 1;
  }
  int memory_slot(const Memory& memory, Extent extent) {
    Slot slot;
    slot.kind = Slot::Kind::memory;
    slot.memory = add_memory(memory);
    slot.extent = extent;
    slot.element_bytes = static_cast<int>(dtype_bytes(memory.dtype));
    const int added = add_slot(slot);
    program_.memory_slots.push_back(added);
    return added;
  }
  int late_slot(Extent extent, Domain domain) {
    Slot slot;
    slot.kind = Slot::Kind::late;
    slot.extent = extent;
    slot.element_bytes = domain_bytes(domain);
    slot.offset = program_.workspace_bytes;
    program_.workspace_bytes += aligned_bytes(slot.element_bytes * (extent == Extent::column ? program_.cols : 1));
    return add_slot(slot);
  }

  // May steps work on this memory in place, as on a packed tile?
  bool is_direct(const Memory& memory, Extent extent, bool whole = false) const {
    const Program& p = program_;
    const bool cols_adjacent = p.cols == 1 || (memory.is_even && memory.col_stride == 1);
    if (extent == Extent::scalar) return true;
    if (extent == Extent::column) return cols_adjacent;
    const int64_t row_step = extent == Extent::row ? 1 : p.cols;
    const bool rows_adjacent = p.rows == 1 || (p.outer_sizes.size() == 1 && memory.outer_strides[0] == row_step);
    if (extent == Extent::row) return whole ? rows_adjacent : p.tile_rows == 1 || rows_adjacent;
    return cols_adjacent && (p.tile_rows == 1 || (single_chunk() && rows_adjacent));
  }

  // --- steps ---

  std::vector<Step>& tile_steps(int level) { return program_.levels[static_cast<size_t>(level)].tile_steps; }
  std::vector<Step>& row_steps(int level) { return program_.levels[static_cast<size_t>(level)].row_steps; }

  Step load_step(const Memory& memory, Domain domain, Extent extent, int dst) {
    Step step;
    step.action = Action::load;
    step.load = memory.is_draw ? table(domain).draw_mask : table(domain).load[static_cast<int>(memory.dtype)];
    step.memory = add_memory(memory);
    step.extent = extent;
    step.dst = dst;
    return step;
  }
  Step store_step(int output, Domain domain, Extent extent, int src) {
    const Memory& memory = nest_.output_memories[static_cast<size_t>(output)];
    Step step;
    step.action = Action::store;
    step.store = table(domain).store[static_cast<int>(memory.dtype)];
    step.memory = add_memory(memory);
    step.extent = extent;
    step.src[0] = src;
    return step;
  }

  static Span flat_span(Extent extent) {
    switch (extent) {
      case Extent::scalar: return Span::one;
      case Extent::row: return Span::rows_flat;
      case Extent::column: return Span::columns_flat;
      case Extent::full: return Span::tile_flat;
    }
    return Span::one;
  }

  // A step that computes the expression over `extent` from slots; which operands are spread follows from their extents.
  Step compute_step(int expression, Extent extent, const std::vector<int>& slots, int dst) {
    const Expression& e = at(expression);
    Step step;
    step.dst = dst;
    step.span = flat_span(extent);
    int form = 0;
    for (size_t i = 0; i < slots.size(); ++i) {
      step.src[i] = slots[i];
      const Extent from = program_.slots[static_cast<size_t>(slots[i])].extent;
      const bool is_operand = e.code != Code::pointwise || static_cast<int>(i) < e.operands;
      if (from == extent || extent == Extent::scalar || !is_operand) continue;
      form |= 1 << i;
      step.step[i] = from == Extent::row ? 1 : 0;
      if (from == Extent::row) step.span = Span::tile;
    }
    switch (e.code) {
      case Code::pointwise:
        step.kernel = table(at(e.args[static_cast<size_t>(e.operands - 1)]).domain).pointwise[static_cast<int>(e.op)][form];
        break;
      case Code::convert: step.kernel = convert_kernel(at(e.args[0]).domain, e.domain); break;
      case Code::round: step.kernel = e.dtype == DType::bf16 ? table(Domain::f32).round_bf16 : table(Domain::f32).round_f16; break;
      case Code::wrap:
        step.kernel = wrap_kernel();
        step.bits = static_cast<uint8_t>(dtype_bytes(e.dtype));
        step.is_signed = e.dtype != DType::u8;
        break;
      default: break;
    }
    FULMEN_CHECK(step.kernel != nullptr);
    return step;
  }

  // A full tile of what varies along less: a step that spreads or repeats it.
  int widened(int slot, Domain domain, std::vector<Step>& steps) {
    const Extent from = program_.slots[static_cast<size_t>(slot)].extent;
    if (from == Extent::full || (from == Extent::column && program_.tile_rows == 1)) return slot;
    Step step;
    step.src[0] = slot;
    step.dst = register_slot(Extent::full, domain);
    step.span = Span::tile;
    step.kernel = from == Extent::column ? table(domain).repeat : table(domain).spread;
    step.step[0] = from == Extent::row ? 1 : 0;
    steps.push_back(step);
    return step.dst;
  }

  // --- prologue: scalars, and columns if all of them are in every tile ---

  int prologue_slot(int expression) {
    if (at(expression).code == Code::constant) return constant_slot(expression);
    int& slot = slots_[static_cast<size_t>(expression)];
    if (slot >= 0) return slot;
    return slot = emit_narrow(expression, program_.prologue, [this](int arg) { return prologue_slot(arg); });
  }

  // Loads or computes a scalar or column value into `steps`.
  template <class SlotOf>
  int emit_narrow(int expression, std::vector<Step>& steps, SlotOf&& slot_of) {
    const Expression& e = at(expression);
    const Extent extent = placement(expression).extent;
    if (e.code == Code::load) {
      const Memory& memory = nest_.load_memories[static_cast<size_t>(e.view)];
      if (is_native(memory.dtype, e.domain) && is_direct(memory, extent)) return memory_slot(memory, extent);
      const int dst = register_slot(extent, e.domain);
      steps.push_back(load_step(memory, e.domain, extent, dst));
      return dst;
    }
    std::vector<int> args;
    for (int arg : e.args) args.push_back(slot_of(arg));
    const int dst = register_slot(extent, e.domain);
    steps.push_back(compute_step(expression, extent, args, dst));
    return dst;
  }

  // --- levels ---

  // The value of `expression` for tile steps of a level.
  int slot_in(int expression, int level) {
    const Expression& e = at(expression);
    const Placement& p = placement(expression);
    if (e.code == Code::constant) return constant_slot(expression);
    if (p.extent == Extent::scalar || (p.extent == Extent::column && single_chunk())) return prologue_slot(expression);
    if (p.extent == Extent::column) {  // again in each level: a chunk of it is needed at a time
      const auto key = std::make_pair(expression, level);
      if (const auto found = per_level_.find(key); found != per_level_.end()) return found->second;
      const int slot = emit_narrow(expression, tile_steps(level), [&](int arg) { return slot_in(arg, level); });
      return per_level_[key] = slot;
    }
    if (e.code == Code::load) return loaded_slot(expression, level);
    return slots_[static_cast<size_t>(expression)];
  }

  int loaded_slot(int expression, int level) {
    const Expression& e = at(expression);
    const Extent extent = placement(expression).extent;
    int& slot = slots_[static_cast<size_t>(expression)];
    if (slot >= 0) return slot;
    const Memory& memory = nest_.load_memories[static_cast<size_t>(e.view)];
    if (is_native(memory.dtype, e.domain) && is_direct(memory, extent)) return slot = memory_slot(memory, extent);
    if (extent == Extent::row) {
      slot = register_slot(extent, e.domain);
      row_steps(0).push_back(load_step(memory, e.domain, extent, slot));
      return slot;
    }
    // Chunks are read again in each level rather than kept for the whole row.
    const auto key = std::make_pair(expression, single_chunk() ? 0 : level);
    if (const auto found = per_level_.find(key); found != per_level_.end()) return found->second;
    const int dst = register_slot(extent, e.domain);
    tile_steps(level).push_back(load_step(memory, e.domain, extent, dst));
    return per_level_[key] = dst;
  }

  // Full-tile form of an operand, for steps that need every element.
  int wide_slot(int expression, int level) {
    const Placement& p = placement(expression);
    const int slot = slot_in(expression, level);
    if (p.extent == Extent::full || (p.extent == Extent::column && program_.tile_rows == 1)) return slot;
    if (p.extent != Extent::row && single_chunk()) {
      int& wide = wide_slots_[static_cast<size_t>(expression)];
      if (wide < 0) wide = widened(slot, at(expression).domain, program_.prologue);
      return wide;
    }
    const auto key = std::make_pair(~expression, level);
    if (const auto found = per_level_.find(key); found != per_level_.end()) return found->second;
    return per_level_[key] = widened(slot, at(expression).domain, tile_steps(level));
  }

  void emit_level(int level) {
    const int count = static_cast<int>(analysis_.expressions.size());
    for (int i = 0; i < count; ++i) {
      const Placement& p = placement(i);
      if (!p.is_live || p.is_late || p.level != level || p.extent != Extent::row) continue;
      if (at(i).code == Code::load) loaded_slot(i, 0);
      else if (at(i).code != Code::reduce) emit_row_value(i, level);
      store_outputs(i, level);
    }
    for (int i = 0; i < count; ++i) {
      const Placement& p = placement(i);
      const Expression& e = at(i);
      if (!p.is_live || e.code == Code::constant) continue;
      if (e.code == Code::reduce) {
        if (placement(e.args[0]).level == level) emit_reduction(i, level);
      } else if (!p.is_late && p.extent == Extent::full && p.level == level) {
        if (e.code != Code::load && !only_multiplied_and_summed(i)) emit_full_value(i, level);
        store_outputs(i, level);
      }
    }
    // Results that vary along less than they are spread to, and constants.
    for (int i = 0; i < count; ++i) {
      const Placement& p = placement(i);
      if (!p.is_live || p.is_late || (p.extent == Extent::full && at(i).code != Code::constant)) continue;
      if (p.level == level && p.extent != Extent::row) store_outputs(i, level);
    }
  }

  void emit_row_value(int i, int level) {
    std::vector<int> args;
    for (int arg : at(i).args) args.push_back(slot_in(arg, level));
    int& slot = slots_[static_cast<size_t>(i)];
    if (slot < 0) slot = register_slot(Extent::row, at(i).domain);
    row_steps(level).push_back(compute_step(i, Extent::row, args, slot));
  }

  void emit_full_value(int i, int level) {
    std::vector<int> args;
    for (int arg : at(i).args) {
      const Extent extent = placement(arg).extent;
      int slot = extent == Extent::column ? wide_slot(arg, level) : slot_in(arg, level);
      // One row a tile: a column value is a whole tile.
      args.push_back(slot);
    }
    int& slot = slots_[static_cast<size_t>(i)];
    if (slot < 0) slot = register_slot(Extent::full, at(i).domain);
    Step step = compute_step_over_tile(i, args, slot);
    tile_steps(level).push_back(step);
  }

  // compute_step, where a column slot of a one-row tile counts as full.
  Step compute_step_over_tile(int i, const std::vector<int>& args, int dst) {
    std::vector<Extent> saved;
    for (int slot : args) {
      Extent& extent = program_.slots[static_cast<size_t>(slot)].extent;
      saved.push_back(extent);
    }
    for (int slot : args) {
      Extent& extent = program_.slots[static_cast<size_t>(slot)].extent;
      if (extent == Extent::column) extent = Extent::full;
    }
    const Step step = compute_step(i, Extent::full, args, dst);
    for (size_t k = 0; k < args.size(); ++k) program_.slots[static_cast<size_t>(args[k])].extent = saved[k];
    return step;
  }

  // sum(a * b) needs no register for the product.
  bool only_multiplied_and_summed(int i) const {
    const Expression& e = at(i);
    if (e.code != Code::pointwise || (e.op != Op::mul && e.op != Op::square) || placement(i).uses != 1) return false;
    for (int arg : e.args)
      if (placement(arg).extent != Extent::full) return false;
    for (int k = i + 1; k < static_cast<int>(analysis_.expressions.size()); ++k) {
      if (!placement(k).is_live || std::find(at(k).args.begin(), at(k).args.end(), i) == at(k).args.end()) continue;
      const Reduction reduction = placement(k).reduction;
      const bool has_kernel = reduction == Reduction::over_columns ||
                              (reduction == Reduction::over_rows && placement(k).extent == Extent::column && e.domain == Domain::f32);
      return at(k).code == Code::reduce && at(k).fold == Fold::sum && at(k).domain == e.domain && has_kernel;
    }
    return false;
  }

  void emit_reduction(int i, int level) {
    const Expression& e = at(i);
    const Placement& p = placement(i);
    const int operand = e.args[0];
    Step step;
    if (p.reduction == Reduction::over_columns) {
      int& slot = slots_[static_cast<size_t>(i)];
      if (slot < 0) slot = register_slot(Extent::row, e.domain);
      step.dst = slot;
      step.span = Span::tile;
      if (only_multiplied_and_summed(operand)) {
        step.kernel = table(e.domain).multiply_reduce_rows;
        step.src[0] = slot_in(at(operand).args.front(), level);
        step.src[1] = slot_in(at(operand).args.back(), level);
      } else {
        step.kernel = table(e.domain).reduce_rows[static_cast<int>(e.fold)];
        step.src[0] = wide_slot(operand, level);
      }
      tile_steps(level).push_back(step);
      return;
    }
    PartialReduction partial;
    partial.fold = e.fold;
    partial.domain = e.domain;
    partial.cols = p.extent == Extent::column ? program_.cols : 1;
    partial.workspace_offset = program_.workspace_bytes;
    const int64_t row_items = (program_.rows + program_.item_rows - 1) / program_.item_rows;
    const int64_t col_items = (program_.cols + program_.item_cols - 1) / program_.item_cols;
    // A scalar result has a part for every item.
    partial.parts = partial.cols > 1 || p.extent == Extent::column ? row_items : row_items * col_items;
    program_.workspace_bytes += aligned_bytes(partial.parts * partial.cols * domain_bytes(e.domain));
    Slot slot;
    slot.kind = Slot::Kind::partial;
    slot.offset = partial.workspace_offset;
    slot.extent = p.extent;
    slot.element_bytes = domain_bytes(e.domain);
    step.dst = add_slot(slot);
    step.kernel = table(e.domain).reduce_columns[static_cast<int>(e.fold)];
    if (p.reduction == Reduction::over_all) {
      step.src[0] = wide_slot(operand, level);
      step.span = Span::tile_as_column;
      tile_steps(level).push_back(step);
    } else if (p.extent == Extent::column) {
      step.span = Span::tile;
      step.adds_to_columns = true;
      if (only_multiplied_and_summed(operand)) {
        step.kernel = table(e.domain).multiply_reduce_columns;
        step.src[0] = slot_in(at(operand).args.front(), level);
        step.src[1] = slot_in(at(operand).args.back(), level);
      } else {
        step.src[0] = wide_slot(operand, level);
      }
      tile_steps(level).push_back(step);
    } else {
      int src = slot_in(operand, level);
      if (placement(operand).extent != Extent::row) {  // one value for all rows
        Step spread;
        spread.src[0] = src;
        spread.dst = src = register_slot(Extent::row, e.domain);
        spread.span = Span::rows_flat;
        spread.kernel = table(e.domain).spread;
        row_steps(level).push_back(spread);
      }
      step.src[0] = src;
      step.span = Span::rows_as_column;
      row_steps(level).push_back(step);
    }
    partial.combine = table(e.domain).reduce_columns[static_cast<int>(e.fold)];
    const int late = direct_late_output(i);
    partial.result_slot = late >= 0 ? late : late_slot(p.extent, e.domain);
    late_slots_[static_cast<size_t>(i)] = partial.result_slot;
    program_.partials.push_back(partial);
  }

  // --- outputs ---

  // Values that can be computed right into an output's memory get it as their slot.
  void assign_outputs() {
    stored_.assign(analysis_.outputs.size(), false);
    for (size_t k = 0; k < analysis_.outputs.size(); ++k) {
      const int i = analysis_.outputs[k];
      const Placement& p = placement(i);
      const Memory& memory = nest_.output_memories[k];
      if (p.is_late || at(i).code == Code::load || at(i).code == Code::constant || p.extent != nest_.output_extents[k]) continue;
      if (p.extent != Extent::full && p.extent != Extent::row) continue;
      if (slots_[static_cast<size_t>(i)] >= 0 || !is_native(memory.dtype, at(i).domain) || !is_direct(memory, p.extent)) continue;
      slots_[static_cast<size_t>(i)] = memory_slot(memory, p.extent);
      stored_[k] = true;
    }
  }
  int direct_late_output(int i) {
    for (size_t k = 0; k < analysis_.outputs.size(); ++k) {
      if (analysis_.outputs[k] != i || stored_[k] || !is_native(nest_.output_memories[k].dtype, at(i).domain)) continue;
      if (!is_direct(nest_.output_memories[k], placement(i).extent)) continue;
      stored_[k] = true;
      return memory_slot(nest_.output_memories[k], placement(i).extent);
    }
    return -1;
  }
  void store_outputs(int i, int level) {
    for (size_t k = 0; k < analysis_.outputs.size(); ++k) {
      if (analysis_.outputs[k] != i || stored_[k]) continue;
      stored_[k] = true;
      const Extent extent = nest_.output_extents[k];
      if (extent == Extent::row) {
        int src = slot_in(i, level);
        if (placement(i).extent == Extent::scalar) {
          Step spread;
          spread.src[0] = src;
          spread.dst = src = register_slot(Extent::row, at(i).domain);
          spread.span = Span::rows_flat;
          spread.kernel = table(at(i).domain).spread;
          row_steps(level).push_back(spread);
        }
        row_steps(level).push_back(store_step(static_cast<int>(k), at(i).domain, extent, src));
      } else {
        const int src = wide_slot(i, level);
        tile_steps(level).push_back(store_step(static_cast<int>(k), at(i).domain, extent, src));
      }
    }
  }

  // --- after the loop: results of partial reductions and what follows from them ---

  int late_value(int i) {
    const Expression& e = at(i);
    if (e.code == Code::constant) return constant_slot(i);
    int& slot = late_slots_[static_cast<size_t>(i)];
    if (slot >= 0) return slot;
    const Extent extent = placement(i).extent;
    if (e.code == Code::load) {
      const Memory& memory = nest_.load_memories[static_cast<size_t>(e.view)];
      if (is_native(memory.dtype, e.domain) && is_direct(memory, extent)) return slot = memory_slot(memory, extent);
      slot = late_slot(extent, e.domain);
      program_.epilogue.push_back(load_step(memory, e.domain, extent, slot));
      return slot;
    }
    std::vector<int> args;
    for (int arg : e.args) args.push_back(late_value(arg));
    int dst = placement(i).is_late ? direct_late_output(i) : -1;
    if (dst < 0) dst = late_slot(extent, e.domain);
    program_.epilogue.push_back(compute_step(i, extent, args, dst));
    return late_slots_[static_cast<size_t>(i)] = dst;
  }

  void emit_late() {
    for (size_t i = 0; i < analysis_.expressions.size(); ++i)
      if (placement(static_cast<int>(i)).is_live && placement(static_cast<int>(i)).is_late) late_value(static_cast<int>(i));
    for (size_t k = 0; k < analysis_.outputs.size(); ++k) {
      if (stored_[k]) continue;
      const int i = analysis_.outputs[k];
      FULMEN_CHECK(placement(i).is_late);
      program_.epilogue.push_back(store_step(static_cast<int>(k), at(i).domain, nest_.output_extents[k], late_value(i)));
    }
  }

  Analysis analysis_;
  Nest nest_;
  Isa isa_;
  Program program_;
  std::vector<int> slots_, wide_slots_, late_slots_;
  std::map<std::pair<int, int>, int> per_level_;
  std::vector<bool> stored_;
};

}  // namespace

std::variant<Program, std::string> schedule(Analysis analysis, Isa isa) {
  auto nest = choose_nest(analysis);
  if (const auto* reason = std::get_if<std::string>(&nest)) return *reason;
  return Scheduler(std::move(analysis), std::get<Nest>(std::move(nest)), isa).make();
}

std::variant<Program, std::string> compile_body(const Trace& body, Isa isa) {
  auto analysis = analyse(body);
  if (const auto* reason = std::get_if<std::string>(&analysis)) return *reason;
  return schedule(std::get<Analysis>(std::move(analysis)), isa);
}

}  // namespace fulmen::cpu::tile
