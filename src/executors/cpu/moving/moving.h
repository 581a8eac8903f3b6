// Kernels that move, look up, order or make elements: cat, pad, slice_scatter, flip and copies; gather, index_select, index,
// embedding and its gradient; scatter, scatter_add, index_add, index_put; cumsum and cumprod; sort and topk; arange and
// uniform draws.
#pragma once

#include <memory>

#include "executors/executor.h"

namespace fulmen::cpu {

bool is_moving_op(const Call& call);
Claim claim_moving(const Call& call);
std::unique_ptr<Kernel> make_moving_kernel(const Call& call);

// Parts of it, each for its ops; null for others. A kernel in hand is the claim.
std::unique_ptr<Kernel> make_copy_kernel(const Call& call);    // cat, pad, slice_scatter, flip
std::unique_ptr<Kernel> make_lookup_kernel(const Call& call);  // gather, index_select, embedding, embedding_grad
std::unique_ptr<Kernel> make_write_kernel(const Call& call);   // index, index_put, index_add, scatter, scatter_add
std::unique_ptr<Kernel> make_line_kernel(const Call& call);    // cumsum, cumprod, sort, topk
std::unique_ptr<Kernel> make_source_kernel(const Call& call);  // arange, uniform

}  // namespace fulmen::cpu
