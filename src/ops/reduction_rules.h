// What reductions (reduction.cpp) and the statistics built on them (statistics.cpp) share.
#pragma once

#include <functional>

#include "ops/axes.h"

namespace fulmen {

// The shape rule of an op with the attributes dims and keepdim over its first operand `x`. Unless `takes_empty`, a
// reduced dim of size 0 is a ShapeError.
ShapeRule reduction_shape(std::function<DType(const CallTypes&)> dtype, bool takes_empty);

// A reduced value, with or without its size-1 dims, as one that broadcasts against x of `shape`.
ValueId keep_reduced(Builder& b, ValueId reduced, const Dims& shape, const Dims& dims);

}  // namespace fulmen
