// A convolution, or one of its adjoints, as oneDNN primitives over independent pieces of the work.
#pragma once

#include <variant>

#include "executors/executor.h"

namespace fulmen::onednn {

bool is_convolution(const Call& call);  // one of the three ops

// The cheap rules, then oneDNN's own answer. The plan's data holds the primitives.
Claim claim_convolution(const Call& call);
std::unique_ptr<Kernel> make_convolution_kernel(const Plan& plan);

}  // namespace fulmen::onednn
