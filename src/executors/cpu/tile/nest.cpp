#include "executors/cpu/tile/nest.h"

#include <algorithm>
#include <optional>

namespace fulmen::cpu::tile {
namespace {

// Axes of the group by their place in its order: a set is a word.
using AxisSet = uint64_t;
constexpr size_t most_axes = 64;
constexpr AxisSet only(size_t place) { return AxisSet{1} << place; }

class NestChooser {
 public:
  explicit NestChooser(const Analysis& analysis) : analysis_(analysis) {}

  std::variant<Nest, std::string> choose() {
    find_live();
    if (const char* reason = collect_axes()) return std::string(reason);
    collect_strides();
    std::string reason = "it has no axes";
    for (const AxisSet inner : candidates()) {
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
    std::vector<std::vector<int>> view_lists;
    for (const MemoryView& view : analysis_.output_views) view_lists.push_back(view_axes(view));
    for (size_t i = 0; i < live_.size(); ++i)
      if (live_[i].is_live && analysis_.expressions[i].code == Code::load)
        view_lists.push_back(view_axes(analysis_.views[static_cast<size_t>(analysis_.expressions[i].view)]));
    std::vector<const std::vector<int>*> lists;
    for (const auto& list : view_lists) lists.push_back(&list);
    for (size_t i = 0; i < live_.size(); ++i) {
      if (!live_[i].is_live) continue;
      lists.push_back(&analysis_.expressions[i].axes);
      lists.push_back(&analysis_.expressions[i].reduced_axes);
    }
    const std::vector<int>* longest = nullptr;
    for (const auto* list : lists) {
      for (size_t k = 1; k < list->size(); ++k)
        if (std::find(list->begin(), list->begin() + static_cast<std::ptrdiff_t>(k), (*list)[k]) != list->begin() + static_cast<std::ptrdiff_t>(k))
          return "two dims of one value run along the same axis";
      if (!longest || list->size() > longest->size()) longest = list;
    }
    if (longest) order_ = *longest;
    for (const auto* list : lists)
      for (int axis : *list)
        if (std::find(order_.begin(), order_.end(), axis) == order_.end()) order_.push_back(axis);
    if (order_.size() >= most_axes) return "it has too many axes";
    all_ = only(order_.size()) - 1;
    for (int axis : order_) sizes_.push_back(analysis_.space.size(axis));
    for (size_t i = 0; i < analysis_.output_views.size(); ++i) output_sets_.push_back(set_of(view_lists[i]));
    axes_.resize(live_.size());
    reduced_.resize(live_.size());
    for (size_t i = 0; i < live_.size(); ++i) {
      if (!live_[i].is_live) continue;
      axes_[i] = set_of(analysis_.expressions[i].axes);
      reduced_[i] = set_of(analysis_.expressions[i].reduced_axes);
    }
    return nullptr;
  }

  size_t place_of(int axis) const { return static_cast<size_t>(std::find(order_.begin(), order_.end(), axis) - order_.begin()); }
  AxisSet set_of(const std::vector<int>& axes) const {
    AxisSet set = 0;
    for (int axis : axes) set |= only(place_of(axis));
    return set;
  }
  AxisSet others(AxisSet axes) const { return all_ & ~axes; }

  // Strides by place in the order, of loads that live and of outputs.
  void collect_strides() {
    const auto strides_of = [&](const MemoryView& view) {
      Dims strides(order_.size(), 0);
      for (size_t d = 0; d < view.dims.size(); ++d) {
        const std::vector<int> axes = analysis_.space.resolve(view.dims[d].axes);
        int64_t stride = view.strides[d];
        for (size_t k = axes.size(); k-- > 0;) {
          strides[place_of(axes[k])] = stride;
          stride *= analysis_.space.size(axes[k]);
        }
      }
      return strides;
    };
    load_strides_.resize(analysis_.views.size());
    for (size_t i = 0; i < live_.size(); ++i) {
      if (!live_[i].is_live || analysis_.expressions[i].code != Code::load) continue;
      const auto view = static_cast<size_t>(analysis_.expressions[i].view);
      if (load_strides_[view].empty()) load_strides_[view] = strides_of(analysis_.views[view]);
      walked_.push_back(&load_strides_[view]);
    }
    output_strides_.reserve(analysis_.output_views.size());
    for (const MemoryView& view : analysis_.output_views) {
      output_strides_.push_back(strides_of(view));
      walked_.push_back(&output_strides_.back());
    }
  }

  std::vector<AxisSet> candidates() const {
    std::vector<AxisSet> list;
    bool reduces_all = false;
    for (size_t i = 0; i < live_.size(); ++i) {
      if (!live_[i].is_live || analysis_.expressions[i].code != Code::reduce) continue;
      if (reduced_[i] == all_) {
        reduces_all = true;
        continue;
      }
      for (const AxisSet set : {reduced_[i], others(reduced_[i])})
        if (std::find(list.begin(), list.end(), set) == list.end()) list.push_back(set);
    }
    if (list.empty()) {
      list.push_back(evenly_spaced_end());
      if (reduces_all) list.push_back(all_);
      return list;
    }
    // The nest that walks memory along its rows comes first.
    std::stable_sort(list.begin(), list.end(), [&](AxisSet a, AxisSet b) { return adjacent_elements(a) > adjacent_elements(b); });
    return list;
  }

  // Elements of all memory in which neighbours along the columns are neighbours in memory.
  double adjacent_elements(AxisSet inner) const {
    double total = 0;
    for (const Dims* strides : walked_) {
      double elements = 1;
      bool is_adjacent = false;
      for (size_t k = 0; k < strides->size(); ++k) {
        if ((*strides)[k] != 0) elements *= static_cast<double>(sizes_[k]);
        is_adjacent = is_adjacent || ((*strides)[k] == 1 && (inner & only(k)));
      }
      if (is_adjacent) total += elements;
    }
    return total;
  }

  // The longest run of trailing axes that every piece of memory walks evenly.
  AxisSet evenly_spaced_end() const {
    AxisSet inner = 0;
    for (size_t k = order_.size(); k-- > 0;) {
      inner |= only(k);
      if (k == 0 || !merges(k - 1, k)) break;
    }
    return inner;
  }

  bool merges(size_t outer, size_t inner) const {
    for (const Dims* strides : walked_)
      if ((*strides)[outer] != (*strides)[inner] * sizes_[inner]) return false;
    return true;
  }

  std::optional<std::string> place(AxisSet inner) {
    const AxisSet outer = others(inner);
    for (size_t i = 0; i < live_.size(); ++i) {
      const Expression& e = analysis_.expressions[i];
      Placement& p = nest_.placements[i];
      if (!p.is_live || e.code == Code::constant) continue;
      if (e.code == Code::load) {
        if (axes_[i] & inner) p.extent = join(p.extent, Extent::column);
        if (axes_[i] & outer) p.extent = join(p.extent, Extent::row);
        continue;
      }
      if (e.code == Code::reduce) {
        if (auto refusal = place_reduction(i, p, inner, outer)) return refusal;
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
      const AxisSet axes = output_sets_[k];
      Extent extent;
      if (p.is_late) {
        extent = p.extent;
        if (axes != (extent == Extent::column ? inner : 0)) return "a reduced result is spread out";
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

  std::optional<std::string> place_reduction(size_t i, Placement& p, AxisSet inner, AxisSet outer) {
    const Placement& operand = placement(analysis_.expressions[i].args[0]);
    if (operand.is_late) return "a reduced result is reduced again";
    const AxisSet reduced = reduced_[i], kept = axes_[i];
    if (reduced == inner) {
      p.reduction = Reduction::over_columns;
      p.extent = Extent::row;
      p.level = operand.level + 1;
      nest_.has_row_reductions = true;
    } else if (reduced == all_) {
      p.reduction = Reduction::over_all;
      p.is_late = true;
    } else if (reduced == outer && (kept == 0 || kept == inner)) {
      p.reduction = Reduction::over_rows;
      p.extent = kept == 0 ? Extent::scalar : Extent::column;
      p.is_late = true;
      if (kept == 0 && operand.extent > Extent::row) return "a reduction keeps some columns";
    } else {
      return "its reductions run over different dims";
    }
    return std::nullopt;
  }

  void describe_memories(AxisSet inner) {
    // Neighbouring axes become one where all memory allows it: the last axis of each run, and the run's size.
    struct Runs {
      std::vector<size_t> last;
      Dims sizes;
    } outer_runs, inner_runs;
    for (size_t k = 0; k < order_.size(); ++k) {
      Runs& runs = inner & only(k) ? inner_runs : outer_runs;
      if (!runs.last.empty() && merges(runs.last.back(), k)) {
        runs.last.back() = k;
        runs.sizes.back() *= sizes_[k];
      } else {
        runs.last.push_back(k);
        runs.sizes.push_back(sizes_[k]);
      }
    }
    nest_.outer_sizes = outer_runs.sizes;
    nest_.inner_sizes = inner_runs.sizes;
    const auto describe = [&](const MemoryView& view, const Dims& strides, bool is_output) {
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
      if (strides.empty() && !order_.empty()) return memory;  // nobody reads it
      for (size_t k : outer_runs.last) memory.outer_strides.push_back(strides[k]);
      for (size_t k : inner_runs.last) memory.inner_strides.push_back(strides[k]);
      memory.col_stride = memory.inner_strides.empty() ? 0 : memory.inner_strides.back();
      for (size_t k = 0; k + 1 < memory.inner_strides.size(); ++k)
        memory.is_even = memory.is_even && memory.inner_strides[k] == memory.inner_strides[k + 1] * nest_.inner_sizes[k + 1];
      return memory;
    };
    for (size_t i = 0; i < analysis_.views.size(); ++i) nest_.load_memories.push_back(describe(analysis_.views[i], load_strides_[i], false));
    for (size_t i = 0; i < analysis_.output_views.size(); ++i) nest_.output_memories.push_back(describe(analysis_.output_views[i], output_strides_[i], true));
  }

  const Analysis& analysis_;
  std::vector<Placement> live_;
  std::vector<int> order_;   // axes
  Dims sizes_;               // by place in the order, as all below
  AxisSet all_ = 0;
  std::vector<AxisSet> axes_, reduced_, output_sets_;  // of expressions, of outputs
  std::vector<Dims> load_strides_, output_strides_;
  std::vector<const Dims*> walked_;
  Nest nest_;
};

}  // namespace

std::variant<Nest, std::string> choose_nest(const Analysis& analysis) { return NestChooser(analysis).choose(); }

}  // namespace fulmen::cpu::tile
