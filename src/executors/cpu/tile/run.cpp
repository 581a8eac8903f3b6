// Runs a tile program over memory: items in parallel, then the partial reductions' parts in order, then the epilogue.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "core/parallel.h"
#include "executors/cpu/tile/program.h"

namespace fulmen::cpu::tile {
namespace {

constexpr double worthwhile_nanoseconds = 12000;  // per thread: below, waking it costs more

// Memory of one thread: registers, slot pointers and offsets. Kept between runs; grows to the largest program.
class Scratch {
 public:
  std::byte* get(size_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64})));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  size_t size_ = 0;
};

inline int64_t offset_of(int64_t position, const Dims& sizes, const Dims& strides) {
  if (sizes.size() == 1) return position * strides[0];
  int64_t offset = 0;
  for (size_t k = sizes.size(); k-- > 0;) {
    offset += position % sizes[k] * strides[k];
    position /= sizes[k];
  }
  return offset;
}

// Offsets of `count` neighbours from `position` on.
void fill_offsets(int64_t position, int64_t count, const Dims& sizes, const Dims& strides, int64_t* out) {
  if (sizes.empty()) {
    for (int64_t i = 0; i < count; ++i) out[i] = 0;
    return;
  }
  const int64_t last = sizes.back(), step = strides.back();
  int64_t i = 0;
  while (i < count) {
    const int64_t within = position % last;
    const int64_t run = std::min(count - i, last - within);
    const int64_t base = offset_of(position, sizes, strides);
    for (int64_t k = 0; k < run; ++k) out[i + k] = base + k * step;
    i += run;
    position += run;
  }
}

class Runner {
 public:
  Runner(const Program& program, const void* const* inputs, void* const* outputs, std::byte* workspace)
      : p_(program), inputs_(inputs), outputs_(outputs), workspace_(workspace) {
    const size_t slot_bytes = (p_.slots.size() * sizeof(void*) + 63) / 64 * 64;
    const size_t offsets = static_cast<size_t>(p_.tile_rows + std::max(p_.tile_cols, p_.epilogue.empty() ? 0 : p_.cols));
    thread_local Scratch scratch;
    frame_ = scratch.get(slot_bytes + offsets * sizeof(int64_t) + 64 + static_cast<size_t>(p_.frame_bytes));
    slots_ = reinterpret_cast<void**>(frame_);
    row_offsets_ = reinterpret_cast<int64_t*>(frame_ + slot_bytes);
    col_offsets_ = row_offsets_ + p_.tile_rows;
    registers_ = frame_ + (slot_bytes + offsets * sizeof(int64_t) + 63) / 64 * 64;
    for (size_t i = 0; i < p_.slots.size(); ++i) {
      const Slot& slot = p_.slots[i];
      switch (slot.kind) {
        case Slot::Kind::constant: slots_[i] = const_cast<uint64_t*>(p_.constants.data()) + slot.offset / 8; break;
        case Slot::Kind::tile_register:
        case Slot::Kind::row_buffer: slots_[i] = registers_ + slot.offset; break;
        case Slot::Kind::partial:
        case Slot::Kind::late: slots_[i] = workspace_ + slot.offset; break;
        case Slot::Kind::memory: slots_[i] = memory_start(p_.memories[static_cast<size_t>(slot.memory)]); break;
      }
    }
  }

  void run_items(int64_t begin, int64_t end) {
    const int64_t col_items = (p_.cols + p_.item_cols - 1) / p_.item_cols;
    rows_ = std::min(p_.tile_rows, p_.rows);
    cols_ = p_.tile_cols;
    for (const Step& step : p_.prologue) execute(step);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row_item = item / col_items, col_item = item % col_items;
      const int64_t row_begin = row_item * p_.item_rows, row_end = std::min(p_.rows, row_begin + p_.item_rows);
      const int64_t col_begin = col_item * p_.item_cols, col_end = std::min(p_.cols, col_begin + p_.item_cols);
      start_partials(item, row_item, col_begin, col_end);
      for (int64_t row = row_begin; row < row_end; row += p_.tile_rows) {
        row_ = row;
        rows_ = std::min(p_.tile_rows, row_end - row);
        run_tile(col_begin, col_end);
      }
    }
  }

  void run_epilogue() {
    rows_ = 1;
    cols_ = p_.cols;
    row_ = col_ = 0;
    for (const PartialReduction& partial : p_.partials) {
      // Column by column, in the order of the parts: the same sum whoever ran the items.
      void* result = slots_[partial.result_slot];
      fill_neutral(partial, result, partial.cols);
      Work work;
      work.dst = result;
      work.src[0] = workspace_ + partial.workspace_offset;
      work.rows = partial.parts;
      work.cols = partial.cols;
      partial.combine(work);
    }
    for (const Step& step : p_.epilogue) execute(step);
  }

 private:
  std::byte* memory_start(const Memory& memory) const {
    std::byte* base = memory.is_output ? static_cast<std::byte*>(outputs_[memory.index])
                                       : static_cast<std::byte*>(const_cast<void*>(inputs_[memory.index]));
    return base + memory.offset * static_cast<int64_t>(dtype_bytes(memory.dtype));
  }

  static void fill_neutral(const PartialReduction& partial, void* at, int64_t count) {
    const auto fill = [&](auto* values, auto low, auto high) {
      std::fill_n(values, count, partial.fold == Fold::sum ? decltype(low)(0) : partial.fold == Fold::max ? low : high);
    };
    if (partial.domain == Domain::f32) fill(static_cast<float*>(at), -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::infinity());
    else if (partial.domain == Domain::f64) fill(static_cast<double*>(at), -std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity());
    else fill(static_cast<int64_t*>(at), std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  }

  void start_partials(int64_t item, int64_t row_item, int64_t col_begin, int64_t col_end) {
    size_t k = 0;
    for (size_t i = 0; i < p_.slots.size() && k < p_.partials.size(); ++i) {
      const Slot& slot = p_.slots[i];
      if (slot.kind != Slot::Kind::partial) continue;
      const PartialReduction& partial = p_.partials[k++];
      const bool by_column = slot.extent == Extent::column;
      std::byte* part = workspace_ + slot.offset + (by_column ? row_item * p_.cols : item) * slot.element_bytes;
      slots_[i] = part;
      fill_neutral(partial, by_column ? part + col_begin * slot.element_bytes : part, by_column ? col_end - col_begin : 1);
    }
  }

  void run_tile(int64_t col_begin, int64_t col_end) {
    for (int i : p_.memory_slots) set_memory_slot(static_cast<size_t>(i), col_begin);
    for (const Level& level : p_.levels) {
      col_ = col_begin;
      cols_ = std::min(p_.tile_cols, col_end - col_begin);
      work_.first = true;
      for (const Step& step : level.row_steps) execute(step);
      if (level.tile_steps.empty()) continue;
      for (col_ = col_begin; col_ < col_end; col_ += p_.tile_cols) {
        cols_ = std::min(p_.tile_cols, col_end - col_);
        if (p_.tile_cols != p_.cols) move_to_column();
        for (const Step& step : level.tile_steps) execute(step);
        work_.first = false;
      }
    }
  }

  void set_memory_slot(size_t i, int64_t col) {
    const Slot& slot = p_.slots[i];
    const Memory& memory = p_.memories[static_cast<size_t>(slot.memory)];
    int64_t offset = 0;
    if (slot.extent == Extent::row || slot.extent == Extent::full) offset += offset_of(row_, p_.outer_sizes, memory.outer_strides);
    if (slot.extent == Extent::column || slot.extent == Extent::full) offset += col * memory.col_stride;
    slots_[i] = memory_start(memory) + offset * slot.element_bytes;
  }

  // Slots that follow the columns, at col_.
  void move_to_column() {
    for (size_t i = 0; i < p_.slots.size(); ++i) {
      const Slot& slot = p_.slots[i];
      if (slot.kind == Slot::Kind::memory && (slot.extent == Extent::full || slot.extent == Extent::column)) set_memory_slot(i, col_);
      else if (slot.kind == Slot::Kind::row_buffer) slots_[i] = registers_ + slot.offset + col_ * slot.element_bytes;
    }
  }

  void execute(const Step& step) {
    if (step.action != Action::compute) {
      move(step);
      return;
    }
    work_.dst = slots_[step.dst];
    for (int k = 0; k < 4 && step.src[k] >= 0; ++k) work_.src[k] = slots_[step.src[k]];
    std::memcpy(work_.step, step.step, sizeof(step.step));
    work_.bits = step.bits;
    work_.is_signed = step.is_signed;
    work_.rows = work_.cols = 1;
    switch (step.span) {
      case Span::tile: work_.rows = rows_, work_.cols = cols_; break;
      case Span::tile_flat: work_.cols = rows_ * cols_; break;
      case Span::rows_flat: work_.cols = rows_; break;
      case Span::columns_flat: work_.cols = cols_; break;
      case Span::one: break;
      case Span::rows_as_column: work_.rows = rows_; break;
      case Span::tile_as_column: work_.rows = rows_ * cols_; break;
    }
    if (step.adds_to_columns) work_.dst = static_cast<std::byte*>(work_.dst) + col_ * p_.slots[static_cast<size_t>(step.dst)].element_bytes;
    step.kernel(work_);
  }

  void move(const Step& step) {
    const Memory& memory = p_.memories[static_cast<size_t>(step.memory)];
    Block block;
    block.dtype = memory.dtype;
    const int64_t bytes = static_cast<int64_t>(dtype_bytes(memory.dtype));
    std::byte* base = memory.is_draw ? nullptr : memory_start(memory);
    block.row_offsets = row_offsets_;
    if (step.extent == Extent::row || step.extent == Extent::full) {
      block.rows = rows_;
      fill_offsets(row_, rows_, p_.outer_sizes, memory.outer_strides, row_offsets_);
    } else {
      row_offsets_[0] = 0;
    }
    if (step.extent == Extent::column || step.extent == Extent::full) {
      block.cols = cols_;
      if (memory.is_even) {
        if (base) base += col_ * memory.col_stride * bytes;
        block.col_stride = memory.col_stride;
      } else {
        fill_offsets(col_, cols_, p_.inner_sizes, memory.inner_strides, col_offsets_);
        block.col_offsets = col_offsets_;
      }
    } else if (block.rows > 1 && p_.outer_sizes.size() == 1) {
      // One value a row, evenly spaced: as one row.
      block.cols = block.rows;
      block.rows = 1;
      block.col_stride = memory.outer_strides[0];
    }
    block.base = base;
    if (memory.is_draw) {
      const int64_t* seed = static_cast<const int64_t*>(inputs_[memory.index]) + memory.seed_offset;
      block.key = static_cast<uint64_t>(seed[0]);
      block.counter_offset = static_cast<uint64_t>(seed[memory.seed_stride]) + memory.draw_offset;
      block.threshold = memory.threshold;
      block.first = memory.offset + (block.col_offsets || step.extent == Extent::row ? 0 : col_ * memory.col_stride);
    }
    if (step.action == Action::load) step.load(slots_[step.dst], block);
    else step.store(slots_[step.src[0]], block);
  }

  const Program& p_;
  const void* const* inputs_;
  void* const* outputs_;
  std::byte* workspace_;
  std::byte* frame_ = nullptr;
  void** slots_ = nullptr;
  int64_t* row_offsets_ = nullptr;
  int64_t* col_offsets_ = nullptr;
  std::byte* registers_ = nullptr;
  int64_t row_ = 0, rows_ = 1, col_ = 0, cols_ = 1;
  Work work_;
};

}  // namespace

void run(const Program& program, const void* const* inputs, void* const* outputs, void* workspace) {
  const int64_t row_items = (program.rows + program.item_rows - 1) / program.item_rows;
  const int64_t col_items = (program.cols + program.item_cols - 1) / program.item_cols;
  const int64_t grain = std::max<int64_t>(1, static_cast<int64_t>(worthwhile_nanoseconds / std::max(1.0, program.item_nanoseconds)));
  parallel_for(row_items * col_items, grain, [&](int64_t begin, int64_t end) {
    Runner(program, inputs, outputs, static_cast<std::byte*>(workspace)).run_items(begin, end);
  });
  if (!program.partials.empty()) Runner(program, inputs, outputs, static_cast<std::byte*>(workspace)).run_epilogue();
}

}  // namespace fulmen::cpu::tile
