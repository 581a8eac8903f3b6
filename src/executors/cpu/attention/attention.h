// Fulmen's own attention kernels for the CPU, forward and backward: which calls they take, and how to make them. What
// a call means is in ops/sdpa_call.h. f64 calls are left to the reference executor.
// Inputs of run() are in the order of SdpaOperand; outputs are {out, lse} and {query, key, value, mask, sink, slopes}
// gradients, null where not wanted. lse is f32, contiguous (batch, heads, query_len).
// Results are bitwise the same for any number of threads, for one instruction set.
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "executors/executor.h"
#include "ops/sdpa_call.h"

namespace fulmen::cpu {

// Why the kernels don't take this call, or nothing.
std::optional<Refusal> attention_refusal(const SdpaCall& call);

// `lse` is null if the log-sum-exp isn't wanted. The call must not be refused.
std::unique_ptr<Kernel> make_attention_forward(const SdpaCall& call, const TensorType& out, const TensorType* lse);

// Types of the wanted gradients, in the order of the outputs; null where not wanted. A mask's gradient has the mask's
// shape.
using SdpaGradientTypes = std::array<const TensorType*, sdpa_gradient_count>;
// `query_gradient_floats` is the scratch for sums of query gradients; 0: the default. Results don't depend on it.
std::unique_ptr<Kernel> make_attention_backward(const SdpaCall& call, const TensorType& out, const TensorType& out_grad,
                                                const SdpaGradientTypes& gradients, int64_t query_gradient_floats = 0);

}  // namespace fulmen::cpu
