// Makes movement ops free where strides can express them: the result of a reshape, permute, slice or broadcast gets the
// strides of a view of its operand and the node is marked as run by "view" (nothing runs). What strides cannot express
// stays for an executor that copies. Also gives attention results the layout (batch, length, heads, dim), in which the
// reshape that follows them is a view. Trace outputs stay contiguous and get memory of their own.
//
//   t1: f32[2,3] = ...                              t1: f32[2,3] = ...
//   t2: f32[3,2] = permute(t1, dims=[1,0])    ->    t2: f32[3,2]{stride=1,3} = permute(t1, dims=[1,0]) @view
#pragma once

#include <optional>

#include "ops/op_def.h"

namespace fulmen {

inline constexpr const char* view_executor = "view";

Trace alias_views(const Trace& trace);

struct View {
  int64_t offset = 0;  // elements from the operand's first
  Dims strides;
};

// How the node's result lies in its operand's memory, if strides can say it.
std::optional<View> view_of(const Trace& trace, const Node& node);

}  // namespace fulmen
