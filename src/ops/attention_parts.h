// The arithmetic of attention as plain ops, for calls that no executor claims: scores, probabilities, and the backward
// from saved statistics. Everything in f32 for 16-bit floats; the formula is in sdpa_call.h. Used by attention.cpp.
#pragma once

#include <array>

#include "ops/builder.h"
#include "ops/sdpa_call.h"

namespace fulmen {

struct AttentionResults {
  ValueId out;  // query's dtype
  ValueId lse;  // f32, or f64 for f64 queries: (batch, heads, query_len)
};

// `inputs` are the operands of a canonical call (is_canonical_sdpa), no_value where absent. The result differentiates op by
// op: rows with no open key have zero gradients, not NaN.
AttentionResults attention_forward(Builder& b, const SdpaCall& call, std::span<const ValueId> inputs);

// Gradients of query, key, value, mask, sink and alibi_slopes, each of its operand's shape and dtype, no_value where not in
// `needs`. lse_grad may be no_value.
//   p = exp(s - lse), delta = sum(out_grad out), dp = dropout(out_grad value^T), ds = p (dp - delta + lse_grad)
//   Source: Dao, "FlashAttention-2", 2023, section 3.1; the terms of softcap, sink and slopes by the chain rule.
std::array<ValueId, sdpa_gradient_count> attention_backward(Builder& b, const SdpaCall& call, std::span<const ValueId> inputs,
                                                            ValueId out, ValueId lse, ValueId out_grad, ValueId lse_grad,
                                                            const std::array<bool, sdpa_gradient_count>& needs);

}  // namespace fulmen
