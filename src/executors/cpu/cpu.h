// The executor of this machine's CPU: Fulmen's own SIMD kernels. Fusions and every op that is a loop nest run on the
// tile machine (tile/), matrix products in gemm/, attention in attention/, data movement and lookups in moving/, losses
// over long rows in loss/. What none of them takes is refused and left to the reference executor.
#pragma once

#include <memory>

#include "executors/executor.h"

namespace fulmen::cpu {

std::shared_ptr<const Executor> make_cpu_executor();

}  // namespace fulmen::cpu
