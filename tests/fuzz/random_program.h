// Random programs over the op catalogue, from a seed: smooth and piecewise pointwise ops, broadcasting, reductions,
// movement, matrix products, softmax; inputs with odd strides and sizes 0 and 1.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/op_def.h"

namespace fulmen::fuzz {

struct RandomProgram {
  Trace trace;
  std::vector<HostTensor> inputs;  // exact in their dtypes
};

struct RandomOptions {
  int nodes = 12;
  bool half_floats = false;  // some values are bf16 or f16
};

RandomProgram random_program(uint64_t seed, const RandomOptions& options = {});

}  // namespace fulmen::fuzz
