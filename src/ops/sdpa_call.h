// One attention call as executors see it, read off an `sdpa` node (ops/attention.cpp) and normalised to four dims.
//
// Formula, with s = query key^T * scale, per batch and head:
//   s = softcap * tanh(s / softcap)            if softcap > 0
//   s += alibi_slope[head] * -(|i + shift - j|)  if slopes are given, shift = key_len - query_len if lower_right, else 0
//   s += mask (additive), or -inf where a bool mask is false, or where causal, window or lengths close (i, j)
//   p = exp(s - lse), lse = log(sum_j exp(s) [+ exp(sink[head])]);  out = dropout(p) value
// A row with no open key gives out = 0, lse = -inf and zero gradients.
// open(i, j) with diagonal d = j - i - shift: causal closes d > 0, window_left >= 0 closes d < -window_left,
// window_right >= 0 closes d > window_right.
#pragma once

#include <optional>

#include "ir/trace.h"

namespace fulmen {

// Operand order of the ops sdpa and sdpa_forward. sdpa_backward has these, then out, lse, out_grad.
enum SdpaOperand {
  sdpa_query, sdpa_key, sdpa_value, sdpa_mask, sdpa_sink, sdpa_alibi_slopes,
  sdpa_query_offsets, sdpa_key_offsets, sdpa_key_lengths, sdpa_seed, sdpa_operand_count,
  sdpa_out = sdpa_operand_count, sdpa_lse, sdpa_out_grad, sdpa_backward_operand_count
};

// Gradients of sdpa_backward, in order: query, key, value, mask, sink, alibi slopes.
inline constexpr int sdpa_gradient_count = 6;

struct SdpaCall {
  TensorType query;  // (batch, heads, query_len, head_dim)
  TensorType key;    // (batch, key_heads, key_len, head_dim); strides may be 0
  TensorType value;  // (batch, key_heads, key_len, value_dim)
  // bool (true = open) or float (added); each dim 1 or the full size of (batch, heads, query_len, key_len)
  std::optional<TensorType> mask;
  std::optional<TensorType> sink;          // f32 [heads]: a logit that takes part in the softmax and has no value
  std::optional<TensorType> alibi_slopes;  // f32 [heads]
  // Packed sequences: i32 [count + 1], cumulative; batch is 1 and lengths are totals.
  std::optional<TensorType> query_offsets, key_offsets;
  std::optional<TensorType> key_lengths;  // i32 [batch]: keys from there on are closed
  std::optional<TensorType> seed;         // i64 [2]: Philox key and counter offset; given if dropout_p > 0

  bool is_causal = false;
  bool lower_right = false;  // the causal corner and the window's diagonal end at the last key
  int64_t window_left = -1, window_right = -1;  // -1: open
  double dropout_p = 0.0;
  double scale = 1.0;  // always set: 1/sqrt(head_dim) unless given
  double softcap = 0.0;

  bool training = false;       // a backward will follow; the needs are in each type's requires_grad
  bool deterministic = false;  // bitwise equal results from run to run are asked for

  int64_t batch() const { return query.shape[0]; }
  int64_t heads() const { return query.shape[1]; }
  int64_t key_heads() const { return key.shape[1]; }
  int64_t query_len() const { return query.shape[2]; }
  int64_t key_len() const { return key.shape[2]; }
  int64_t head_dim() const { return query.shape[3]; }
  int64_t value_dim() const { return value.shape[3]; }
};

// Throws ShapeError/TypeError for what no executor could mean (head counts, dims, dtypes, mask shape, mask together
// with is_causal); executors are asked only about calls that pass.
void check_sdpa_call(const SdpaCall& call);

// From the operands of sdpa (any rank from 2 on, batch dims broadcast), sdpa_forward or sdpa_backward. `types[i]` is null
// where the operand is absent. Throws ShapeError where there is no such call with four dims.
SdpaCall sdpa_call_of(const std::vector<const TensorType*>& types, const Attributes& attrs, bool training);

// Are the operands in the form that executors' pairs take: four dims, one batch size, no head broadcast but that of key
// and value, a mask of four dims, i32 lengths and offsets? The decomposition of another sdpa node makes one that is.
bool is_canonical_sdpa(const std::vector<const TensorType*>& types);
bool is_canonical_sdpa(const Trace& trace, const Node& node);

}  // namespace fulmen
