// The attributes of slice and slice_scatter, and what they mean for a shape: Python's rules.
#pragma once

#include "ops/rules/dims.h"

namespace fulmen {

struct SliceRange {
  int64_t dim = 0, begin = 0, count = 0, step = 1;  // dim and begin are not negative
  // The position in the whole of a position in the slice.
  Dims source_index(Dims index) const {
    auto& at = index[static_cast<size_t>(dim)];
    at = begin + at * step;
    return index;
  }
};

inline std::vector<AttrDef> slice_attributes() {
  return {{"dim", AttrKind::integer, AttrValue(int64_t{0})},
          {"begin", AttrKind::integer, AttrValue(int64_t{0})},
          {"end", AttrKind::integer, AttrValue()},
          {"step", AttrKind::integer, AttrValue(int64_t{1})}};
}

// For attributes that checked_slice has accepted.
inline SliceRange slice_range(const Attributes& attrs, const Dims& shape) {
  SliceRange range;
  range.dim = dim_of(attrs, static_cast<int64_t>(shape.size()));
  const int64_t size = shape[static_cast<size_t>(range.dim)];
  const auto position = [size](int64_t at) { return at < 0 ? (at + size < 0 ? 0 : at + size) : (at > size ? size : at); };
  range.begin = position(attrs.get_int("begin"));
  const int64_t end = attrs.has("end") ? position(attrs.get_int("end")) : size;
  range.step = attrs.get_int("step");
  range.count = end <= range.begin ? 0 : (end - range.begin - 1) / range.step + 1;
  return range;
}

inline SliceRange checked_slice(const CallTypes& call) {
  if (call[0].rank() == 0) call.shape_error(operand_name(call.op, 0) + " has 0 dims, needed at least 1");
  checked_dim(call, call.attrs.get_int("dim"), call[0].rank());
  if (call.attrs.get_int("step") < 1) call.shape_error("step is " + std::to_string(call.attrs.get_int("step")) + ", needed 1 or more");
  return slice_range(call.attrs, call[0].shape);
}

}  // namespace fulmen
