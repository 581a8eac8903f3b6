// The tile machine as the cpu executor uses it: claims for fusions and for single ops that are one loop nest.
#pragma once

#include <memory>

#include "executors/executor.h"

namespace fulmen::cpu {

// Claims a fusion's body, or a single op as a body of one node.
Claim claim_tile_program(const Call& call);

// For a call that claim_tile_program claimed with `plan`.
std::unique_ptr<Kernel> make_tile_kernel(const Plan& plan);

// May the op of this call be a part of a fusion? Cheap: by name, dtypes and sizes.
bool is_tile_op(const Call& call);

}  // namespace fulmen::cpu
