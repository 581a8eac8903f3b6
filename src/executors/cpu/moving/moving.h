// Kernels that move, look up or make elements without arithmetic on them: cat, pad, slice_scatter, contiguous and copies;
// gather, index_select, embedding and its gradient; arange and uniform draws.
#pragma once

#include <memory>

#include "executors/executor.h"

namespace fulmen::cpu {

bool is_moving_op(const Call& call);
Claim claim_moving(const Call& call);
std::unique_ptr<Kernel> make_moving_kernel(const Call& call);

// Parts of it, each for its ops; null for others. A kernel in hand is the claim.
std::unique_ptr<Kernel> make_copy_kernel(const Call& call);    // cat, pad, slice_scatter
std::unique_ptr<Kernel> make_lookup_kernel(const Call& call);  // gather, index_select, embedding, embedding_grad
std::unique_ptr<Kernel> make_source_kernel(const Call& call);  // arange, uniform

}  // namespace fulmen::cpu
