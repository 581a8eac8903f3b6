// Linear scan over the steps of a tile program. Registers of a level that runs once a chunk and cross into another level
// hold a whole row; those that a level only reads live through all of its chunks.
#include <algorithm>
#include <limits>
#include <map>

#include "executors/cpu/tile/sizes.h"

namespace fulmen::cpu::tile {
namespace {

class RegisterAllocator {
 public:
  explicit RegisterAllocator(Program& program) : program_(program) {}

  void allocate() {
    Program& p = program_;
    // Positions of all steps, section by section.
    std::vector<const Step*> steps;
    std::vector<int> section_of;
    std::vector<std::pair<int, int>> sections;  // first and last position
    std::vector<bool> repeats;                  // runs once a chunk
    const auto add_section = [&](const std::vector<Step>& list, bool repeat) {
      const int begin = static_cast<int>(steps.size());
      for (const Step& step : list) steps.push_back(&step), section_of.push_back(static_cast<int>(sections.size()));
      sections.push_back({begin, static_cast<int>(steps.size()) - 1});
      repeats.push_back(repeat);
    };
    add_section(p.prologue, false);
    for (const Level& level : p.levels) {
      add_section(level.row_steps, false);
      add_section(level.tile_steps, !is_single_chunk());
    }
    const int end = static_cast<int>(steps.size());
    std::vector<Interval> intervals(p.slots.size());
    std::vector<int> first_section(p.slots.size(), -1);
    const auto touch = [&](int slot, int position) {
      if (slot < 0) return;
      Interval& interval = intervals[static_cast<size_t>(slot)];
      const int section = section_of[static_cast<size_t>(position)];
      int begin = position, last = position;
      if (first_section[static_cast<size_t>(slot)] < 0) first_section[static_cast<size_t>(slot)] = section;
      const bool crosses = first_section[static_cast<size_t>(slot)] != section;
      Slot& s = p.slots[static_cast<size_t>(slot)];
      if (repeats[static_cast<size_t>(section)] && (crosses || s.extent == Extent::row)) {
        begin = std::min(begin, sections[static_cast<size_t>(section)].first);
        last = sections[static_cast<size_t>(section)].second;
      }
      if (crosses && first_section[static_cast<size_t>(slot)] == 0) last = end;  // from the prologue: kept
      if (crosses && s.kind == Slot::Kind::tile_register && s.extent == Extent::full && first_section[static_cast<size_t>(slot)] != 0 && !is_single_chunk()) {
        s.kind = Slot::Kind::row_buffer;
        interval.begin = std::min(interval.begin, sections[static_cast<size_t>(first_section[static_cast<size_t>(slot)])].first);
      }
      interval.begin = std::min(interval.begin, begin);
      interval.end = std::max(interval.end, last);
    };
    for (int position = 0; position < end; ++position) {
      for (int src : steps[static_cast<size_t>(position)]->src) touch(src, position);
      touch(steps[static_cast<size_t>(position)]->dst, position);
    }
    place_intervals(steps, intervals);
  }

 private:
  struct Interval {
    int begin = std::numeric_limits<int>::max(), end = -1;
  };

  bool is_single_chunk() const { return program_.tile_cols == program_.cols; }

  int64_t slot_bytes(const Slot& slot) const {
    const Program& p = program_;
    int64_t elements = 1;
    if (slot.kind == Slot::Kind::row_buffer) elements = p.cols;
    else if (slot.extent == Extent::row) elements = p.tile_rows;
    else if (slot.extent == Extent::column) elements = p.tile_cols;
    else if (slot.extent == Extent::full) elements = p.tile_rows * p.tile_cols;
    return aligned_bytes(elements * slot.element_bytes + 64);  // whole vectors may be read past the end
  }

  void place_intervals(const std::vector<const Step*>& steps, const std::vector<Interval>& intervals) {
    Program& p = program_;
    std::vector<std::vector<int>> starting(steps.size() + 1), ending(steps.size() + 1);
    const auto is_register = [&](int slot) {
      const Slot::Kind kind = p.slots[static_cast<size_t>(slot)].kind;
      return kind == Slot::Kind::tile_register || kind == Slot::Kind::row_buffer;
    };
    for (int slot = 0; slot < static_cast<int>(p.slots.size()); ++slot) {
      const Interval& interval = intervals[static_cast<size_t>(slot)];
      if (!is_register(slot) || interval.end < 0) continue;
      starting[static_cast<size_t>(interval.begin)].push_back(slot);
      ending[static_cast<size_t>(std::min<int>(interval.end, static_cast<int>(steps.size())))].push_back(slot);
    }
    std::map<int64_t, std::vector<int64_t>> free;
    const auto release = [&](int slot) { free[slot_bytes(p.slots[static_cast<size_t>(slot)])].push_back(p.slots[static_cast<size_t>(slot)].offset); };
    for (size_t position = 0; position < steps.size(); ++position) {
      // An operand that dies here may give its place to the result, element by element.
      const Step& step = *steps[position];
      std::vector<int> late_release;
      for (int slot : ending[position]) {
        bool in_place = step.action == Action::compute && step.dst >= 0 && step.dst != slot && is_elementwise(step);
        for (int k = 0; k < 4; ++k)
          if (step.src[k] == slot && p.slots[static_cast<size_t>(slot)].extent != p.slots[static_cast<size_t>(step.dst >= 0 ? step.dst : slot)].extent) in_place = false;
        if (in_place && p.slots[static_cast<size_t>(slot)].element_bytes != p.slots[static_cast<size_t>(step.dst)].element_bytes) in_place = false;
        if (in_place) release(slot);
        else late_release.push_back(slot);
      }
      for (int slot : starting[position]) {
        Slot& s = p.slots[static_cast<size_t>(slot)];
        auto& list = free[slot_bytes(s)];
        if (!list.empty()) {
          s.offset = list.back();
          list.pop_back();
        } else {
          s.offset = p.frame_bytes;
          p.frame_bytes += slot_bytes(s);
        }
      }
      for (int slot : late_release) release(slot);
    }
  }

  static bool is_elementwise(const Step& step) {
    return step.span == Span::tile_flat || step.span == Span::rows_flat || step.span == Span::columns_flat || step.span == Span::one;
  }

  Program& program_;
};

}  // namespace

void allocate_registers(Program& program) { RegisterAllocator(program).allocate(); }

}  // namespace fulmen::cpu::tile
