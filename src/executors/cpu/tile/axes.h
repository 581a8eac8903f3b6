// Loop axes of a fused group. Each dim of each value runs along a list of axes; ops say which dims run together
// (unify), reshapes say how dims split and merge (regroup). In the end every value is known by its set of axes, and the
// group's loop nest is the set of all of them, in whatever order suits.
//
//   reshape [6,8] -> [2,3,8] splits the axis of size 6 into one of 2 and one of 3, in every value that runs along it
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/tensor_type.h"

namespace fulmen::cpu::tile {

// A dim without axes has size 1 or holds the same value all along.
struct AxisDim {
  int64_t size = 1;
  std::vector<int> axes;
};
using AxisDims = std::vector<AxisDim>;

class AxisSpace {
 public:
  int add(int64_t size);
  int64_t size(int axis) const { return axes_[static_cast<size_t>(axis)].size; }

  // The axes that these have become: merged ones by their representative, split ones by their parts, in order.
  std::vector<int> resolve(const std::vector<int>& axes) const;

  // Makes two lists of the same total size run together; false if their sizes don't split alike.
  bool unify(const std::vector<int>& a, const std::vector<int>& b);

  // A dim that is the same all along gets an axis of its own.
  void give_axis(AxisDim& dim);

  // The dims of a reshaped value; empty if an axis would have to be split unevenly.
  std::optional<AxisDims> regroup(AxisDims dims, const Dims& shape);

 private:
  struct Axis {
    int64_t size;
    int merged_into = -1;
    std::vector<int> parts;
  };
  int root(int axis) const;
  void split(int axis, int64_t leading);
  void resolve_into(int axis, std::vector<int>& out) const;

  std::vector<Axis> axes_;
};

}  // namespace fulmen::cpu::tile
