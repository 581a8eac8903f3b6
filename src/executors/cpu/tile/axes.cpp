#include "executors/cpu/tile/axes.h"

namespace fulmen::cpu::tile {

int AxisSpace::add(int64_t size) {
  axes_.push_back({size, -1, {}});
  return static_cast<int>(axes_.size()) - 1;
}

int AxisSpace::root(int axis) const {
  while (axes_[static_cast<size_t>(axis)].merged_into >= 0) axis = axes_[static_cast<size_t>(axis)].merged_into;
  return axis;
}

void AxisSpace::resolve_into(int axis, std::vector<int>& out) const {
  axis = root(axis);
  const Axis& a = axes_[static_cast<size_t>(axis)];
  if (a.parts.empty()) {
    out.push_back(axis);
    return;
  }
  for (int part : a.parts) resolve_into(part, out);
}

std::vector<int> AxisSpace::resolve(const std::vector<int>& axes) const {
  std::vector<int> out;
  for (int axis : axes) resolve_into(axis, out);
  return out;
}

void AxisSpace::split(int axis, int64_t leading) {
  const int64_t rest = size(axis) / leading;
  const int first = add(leading), second = add(rest);
  axes_[static_cast<size_t>(axis)].parts = {first, second};
}

bool AxisSpace::unify(const std::vector<int>& left, const std::vector<int>& right) {
  // Each split or merge changes what the lists resolve to, so they are resolved again after it; lists are short.
  for (;;) {
    const std::vector<int> a = resolve(left), b = resolve(right);
    size_t i = 0;
    while (i < a.size() && i < b.size() && a[i] == b[i]) ++i;
    if (i == a.size() && i == b.size()) return true;
    if (i == a.size() || i == b.size()) return false;
    const int64_t x = size(a[i]), y = size(b[i]);
    if (x == y) {
      axes_[static_cast<size_t>(b[i])].merged_into = a[i];
    } else if (x > y && x % y == 0) {
      split(a[i], y);
    } else if (y > x && y % x == 0) {
      split(b[i], x);
    } else {
      return false;
    }
  }
}

void AxisSpace::give_axis(AxisDim& dim) {
  if (dim.size > 1 && dim.axes.empty()) dim.axes = {add(dim.size)};
}

std::optional<AxisDims> AxisSpace::regroup(AxisDims dims, const Dims& shape) {
  std::vector<int> all;
  for (AxisDim& dim : dims) {
    give_axis(dim);
    all.insert(all.end(), dim.axes.begin(), dim.axes.end());
  }
  AxisDims result;
  size_t next = 0;
  for (int64_t want : shape) {
    AxisDim dim{want, {}};
    while (want > 1) {
      all = resolve(all);
      if (next >= all.size()) return std::nullopt;
      const int axis = all[next];
      const int64_t have = size(axis);
      if (want % have == 0) {
        dim.axes.push_back(axis);
        want /= have;
        ++next;
      } else if (have % want == 0) {
        split(axis, want);
      } else {
        return std::nullopt;
      }
    }
    result.push_back(std::move(dim));
  }
  return result;
}

}  // namespace fulmen::cpu::tile
