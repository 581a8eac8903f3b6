// Positions that come from a tensor: -size to size - 1, negative ones count from the end. What lies outside ends the
// call with an error; nothing is read or written out of bounds.
#pragma once

#include <string>

#include "ops/op_def.h"

namespace fulmen {

// ShapeError "gather: index holds 7, the dim it indexes has size 5".
inline int64_t checked_position(const char* op, int64_t position, int64_t size) {
  if (position < -size || position >= size)
    throw ShapeError(std::string(op) + ": index holds " + std::to_string(position) + ", the dim it indexes has size " + std::to_string(size));
  return position < 0 ? position + size : position;
}

}  // namespace fulmen
