#include "executors/cpu/tile/nest.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

namespace fulmen::cpu::tile {
namespace {

using AxisSet = std::set<int>;

AxisSet set_of(const std::vector<int>& axes) { return {axes.begin(), axes.end()}; }

class NestChooser {
 public:
  explicit NestChooser(const Analysis& analysis) : analysis_(analysis) {}

  std::variant<Nest, std::string> choose() {
    find_live();
    if (const char* reason = collect_axes()) return std::string(reason);
    std::string reason = "it has no axes";
    for (const AxisSet& inner : candidates()) {
      nest_ = Nest{};
      nest_.placements = live_;
      if (auto refusal = place(inner)) {
        reason = *refusal;
        continue;
      }
      describe_memories(inner);
      return std::move(nest_);
    }
    return reason;
  }

 private:
  const Expression& at(int i) const { return analysis_.expressions[static_cast<size_t>(i)]; }
  Placement& placement(int i) { return nest_.placements[static_cast<size_t>(i)]; }

  void find_live() {
    live_.resize(analysis_.expressions.size());
    for (int output : analysis_.outputs) {
      live_[static_cast<size_t>(output)].is_live = true;
      ++live_[static_cast<size_t>(output)].uses;
    }
    for (size_t i = live_.size(); i-- > 0;) {
      if (!live_[i].is_live) continue;
      for (int arg : analysis_.expressions[i].args) {
        live_[static_cast<size_t>(arg)].is_live = true;
        ++live_[static_cast<size_t>(arg)].uses;
      }
    }
  }

  std::vector<int> view_axes(const MemoryView& view) const {
    std::vector<int> axes;
    for (const AxisDim& dim : view.dims)
      for (int axis : analysis_.space.resolve(dim.axes)) axes.push_back(axis);
    return axes;
  }

  // All axes, in the order of the value that has most of them.
  const char* collect_axes() {
    std::vector<std::vector<int>> lists;
    for (const MemoryView& view : analysis_.output_views) lists.push_back(view_axes(view));
    for (size_t i = 0; i < live_.size(); ++i) {
      if (!live_[i].is_live) continue;
      lists.push_back(analysis_.expressions[i].axes);
      lists.push_back(analysis_.expressions[i].reduced_axes);
      if (analysis_.expressions[i].code == Code::load)
        lists.push_back(view_axes(analysis_.views[static_cast<size_t>(analysis_.expressions[i].view)]));
    }
    const std::vector<int>* longest = nullptr;
    for (const auto& list : lists) {
      if (set_of(list).size() != list.size()) return "two dims of one value run along the same axis";
      if (!longest || list.size() > longest->size()) longest = &list;
    }
    if (longest) order_ = *longest;
    for (const auto& list : lists)
      for (int axis : list)
        if (std::find(order_.begin(), order_.end(), axis) == order_.end()) order_.push_back(axis);
    all_ = set_of(order_);
    return nullptr;
  }

  AxisSet others(const AxisSet& axes) const {
    AxisSet rest;
    std::set_difference(all_.begin(), all_.end(), axes.begin(), axes.end(), std::inserter(rest, rest.end()));
    return rest;
  }

  std::vector<AxisSet> candidates() const {
    std::vector<AxisSet> list;
    bool reduces_all = false;
    for (size_t i = 0; i < live_.size(); ++i) {
      if (!live_[i].is_live || analysis_.expressions[i].code != Code::reduce) continue;
      const AxisSet reduced = set_of(analysis_.expressions[i].reduced_axes);
      if (reduced == all_) {
        reduces_all = true;
        continue;
      }
      list.push_back(reduced);
      list.push_back(others(reduced));
    }
    if (list.empty()) {
      list.push_back(evenly_spaced_end());
      if (reduces_all) list.push_back(all_);
      return list;
    }
    // The nest that walks memory along its rows comes first.
    std::stable_sort(list.begin(), list.end(), [&](const AxisSet& a, const AxisSet& b) { return adjacent_elements(a) > adjacent_elements(b); });
    list.erase(std::unique(list.begin(), list.end()), list.end());
    return list;
  }

  // Elements of all memory in which neighbours along the columns are neighbours in memory.
  double adjacent_elements(const AxisSet& inner) const {
    double total = 0;
    for_each_view([&](const MemoryView& view) {
      double elements = 1;
      bool is_adjacent = false;
      for (const auto& [axis, stride] : axis_strides(view)) {
        elements *= static_cast<double>(analysis_.space.size(axis));
        is_adjacent = is_adjacent || (stride == 1 && inner.count(axis));
      }
      if (is_adjacent) total += elements;
    });
    return total;
  }

  // The longest run of trailing axes that every piece of memory walks evenly.
  AxisSet evenly_spaced_end() const {
    AxisSet inner;
    for (size_t k = order_.size(); k-- > 0;) {
      inner.insert(order_[k]);
      if (k == 0 || !merges(order_[k - 1], order_[k])) break;
    }
    return inner;
  }

  std::map<int, int64_t> axis_strides(const MemoryView& view) const {
    std::map<int, int64_t> strides;
    for (size_t d = 0; d < view.dims.size(); ++d) {
      const std::vector<int> axes = analysis_.space.resolve(view.dims[d].axes);
      int64_t stride = view.strides[d];
      for (size_t k = axes.size(); k-- > 0;) {
        strides[axes[k]] = stride;
        stride *= analysis_.space.size(axes[k]);
      }
    }
    return strides;
  }

  template <class F>
  void for_each_view(F&& f) const {
    for (size_t i = 0; i < live_.size(); ++i)
      if (live_[i].is_live && analysis_.expressions[i].code == Code::load) f(analysis_.views[static_cast<size_t>(analysis_.expressions[i].view)]);
    for (const MemoryView& view : analysis_.output_views) f(view);
  }

  bool merges(int outer, int inner) const {
    bool all_merge = true;
    for_each_view([&](const MemoryView& view) {
      const auto strides = axis_strides(view);
      const auto stride = [&](int axis) { return strides.count(axis) ? strides.at(axis) : 0; };
      all_merge = all_merge && stride(outer) == stride(inner) * analysis_.space.size(inner);
    });
    return all_merge;
  }

  std::optional<std::string> place(const AxisSet& inner) {
    const AxisSet outer = others(inner);
    for (size_t i = 0; i < live_.size(); ++i) {
      const Expression& e = analysis_.expressions[i];
      Placement& p = nest_.placements[i];
      if (!p.is_live || e.code == Code::constant) continue;
      if (e.code == Code::load) {
        for (int axis : e.axes) p.extent = join(p.extent, inner.count(axis) ? Extent::column : Extent::row);
        continue;
      }
      if (e.code == Code::reduce) {
        if (auto refusal = place_reduction(e, p, inner, outer)) return refusal;
        continue;
      }
      bool needs_rows = false;
      for (int arg : e.args) {
        const Placement& a = placement(arg);
        p.level = std::max(p.level, a.level);
        p.extent = join(p.extent, a.extent);
        p.is_late = p.is_late || a.is_late;
        needs_rows = needs_rows || (!a.is_late && (a.extent == Extent::row || a.extent == Extent::full));
      }
      if (p.is_late && needs_rows) return "the result of a reduction over rows is used beside the rows";
    }
    for (size_t k = 0; k < analysis_.outputs.size(); ++k) {
      const Placement& p = placement(analysis_.outputs[k]);
      const AxisSet axes = set_of(view_axes(analysis_.output_views[k]));
      Extent extent;
      if (p.is_late) {
        extent = p.extent;
        if (axes != (extent == Extent::column ? inner : AxisSet{})) return "a reduced result is spread out";
      } else if (axes == all_) {
        extent = Extent::full;
      } else if (axes == outer && p.extent <= Extent::row) {
        extent = Extent::row;
      } else {
        return "a result has fewer dims than the group runs over";
      }
      nest_.output_extents.push_back(extent);
    }
    return std::nullopt;
  }

  std::optional<std::string> place_reduction(const Expression& e, Placement& p, const AxisSet& inner, const AxisSet& outer) {
    const Placement& operand = placement(e.args[0]);
    if (operand.is_late) return "a reduced result is reduced again";
    const AxisSet reduced = set_of(e.reduced_axes), kept = set_of(e.axes);
    if (reduced == inner) {
      p.reduction = Reduction::over_columns;
      p.extent = Extent::row;
      p.level = operand.level + 1;
      nest_.has_row_reductions = true;
    } else if (reduced == all_) {
      p.reduction = Reduction::over_all;
      p.is_late = true;
    } else if (reduced == outer && (kept.empty() || kept == inner)) {
      p.reduction = Reduction::over_rows;
      p.extent = kept.empty() ? Extent::scalar : Extent::column;
      p.is_late = true;
      if (kept.empty() && operand.extent > Extent::row) return "a reduction keeps some columns";
    } else {
      return "its reductions run over different dims";
    }
    return std::nullopt;
  }

  void describe_memories(const AxisSet& inner) {
    // Neighbouring axes become one where all memory allows it.
    std::vector<std::vector<int>> outer_runs, inner_runs;
    for (int axis : order_) {
      auto& runs = inner.count(axis) ? inner_runs : outer_runs;
      if (!runs.empty() && merges(runs.back().back(), axis)) runs.back().push_back(axis);
      else runs.push_back({axis});
    }
    const auto sizes = [&](const std::vector<std::vector<int>>& runs) {
      Dims result;
      for (const auto& run : runs) {
        int64_t size = 1;
        for (int axis : run) size *= analysis_.space.size(axis);
        result.push_back(size);
      }
      return result;
    };
    nest_.outer_sizes = sizes(outer_runs);
    nest_.inner_sizes = sizes(inner_runs);
    const auto describe = [&](const MemoryView& view, bool is_output) {
      Memory memory;
      memory.is_output = is_output;
      memory.index = view.index;
      memory.dtype = view.dtype;
      memory.offset = view.offset;
      memory.is_draw = view.is_draw;
      memory.seed_offset = view.seed_offset;
      memory.seed_stride = view.seed_stride;
      memory.draw_offset = view.draw_offset;
      memory.threshold = view.threshold;
      const auto strides = axis_strides(view);
      const auto stride = [&](const std::vector<int>& run) { return strides.count(run.back()) ? strides.at(run.back()) : 0; };
      for (const auto& run : outer_runs) memory.outer_strides.push_back(stride(run));
      for (const auto& run : inner_runs) memory.inner_strides.push_back(stride(run));
      memory.is_even = true;
      memory.col_stride = memory.inner_strides.empty() ? 0 : memory.inner_strides.back();
      for (size_t k = 0; k + 1 < inner_runs.size(); ++k)
        memory.is_even = memory.is_even && memory.inner_strides[k] == memory.inner_strides[k + 1] * nest_.inner_sizes[k + 1];
      return memory;
    };
    for (const MemoryView& view : analysis_.views) nest_.load_memories.push_back(describe(view, false));
    for (const MemoryView& view : analysis_.output_views) nest_.output_memories.push_back(describe(view, true));
  }

  const Analysis& analysis_;
  std::vector<Placement> live_;
  std::vector<int> order_;
  AxisSet all_;
  Nest nest_;
};

}  // namespace

std::variant<Nest, std::string> choose_nest(const Analysis& analysis) { return NestChooser(analysis).choose(); }

}  // namespace fulmen::cpu::tile
