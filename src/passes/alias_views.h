// Makes movement ops free where strides can express them: the result of a reshape, permute, slice or broadcast gets the
// strides of a view of its operand and the node is marked as run by "view" (nothing runs). What strides cannot express
// stays for an executor that copies. Also gives attention results the layout (batch, length, heads, dim), in which the
// reshape that follows them is a view. Trace outputs get memory of their own; the first `contiguous_outputs` of them are
// contiguous, the others (saved values) lie as their producer writes them. With `like_operands` attention results are
// laid out as the operands they belong to: what a caller of attention alone expects.
//
//   t1: f32[2,3] = ...                              t1: f32[2,3] = ...
//   t2: f32[3,2] = permute(t1, dims=[1,0])    ->    t2: f32[3,2]{stride=1,3} = permute(t1, dims=[1,0]) @view
#pragma once

#include <optional>

#include "ops/op_def.h"

namespace fulmen {

inline constexpr const char* view_executor = "view";

inline constexpr size_t all_outputs = static_cast<size_t>(-1);
Trace alias_views(const Trace& trace, size_t contiguous_outputs = all_outputs, bool like_operands = false);

struct View {
  int64_t offset = 0;  // elements from the operand's first
  Dims strides;
};

// How the node's result lies in its operand's memory, if strides can say it.
std::optional<View> view_of(const Trace& trace, const Node& node);

}  // namespace fulmen
