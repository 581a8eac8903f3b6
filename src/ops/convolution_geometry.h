// Lists of numbers that convolutions and pools take, one a spatial dim.
#pragma once

#include "ops/op_def.h"

namespace fulmen {

// The attribute for `count` spatial dims: one number stands for all of them, none for `fallback`.
Dims spatial_list(const Attributes& attrs, std::string_view name, size_t count, int64_t fallback);

// "stride is [0], needed 1 or more"; a wrong length is an error too.
void check_spatial_list(const CallTypes& call, std::string_view name, size_t count, int64_t least);

}  // namespace fulmen
