// Copies between strided tensors of one element size, at memory speed where both sides have runs of neighbours.
#pragma once

#include <cstdint>

#include "core/tensor_type.h"

namespace fulmen::cpu {

// One side of a copy: offset and strides in elements.
struct Strided {
  void* memory = nullptr;
  int64_t offset = 0;
  Dims strides;
};

// Same shape on both sides; they don't overlap. In parallel if it pays.
void copy_strided(size_t element_bytes, const Dims& shape, const Strided& from, const Strided& to);

// Every element of the shape becomes the one at `value`.
void fill_strided(size_t element_bytes, const Dims& shape, const void* value, const Strided& to);

}  // namespace fulmen::cpu
