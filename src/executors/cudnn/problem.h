// An attention call in the form a cuDNN graph bakes in: four-dimensional tensors with normalised strides, the mask as an
// additive bias, the layouts of results and gradients, and the options. Everything that a plan depends on is a field
// here and a part of key(). What a call needs beyond cuDNN (conversions, copies) is listed in `steps`.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/sdpa_call.h"

namespace fulmen::cudnn {

using Sizes = std::array<int64_t, 4>;

struct TensorForm {
  DType dtype = DType::bf16;
  Sizes dims{};
  Sizes strides{};  // in elements

  int64_t element_count() const { return dims[0] * dims[1] * dims[2] * dims[3]; }
  int64_t span() const;  // elements from the first to the last address touched
  size_t span_bytes() const { return static_cast<size_t>(span()) * dtype_bytes(dtype); }
  bool operator==(const TensorForm&) const = default;
};

// Strides in elements of what a call makes or is handed later. Absent: laid out like the matching input (dense, in the
// order of its dimensions), which gives a (batch, length, heads, dim) result for such inputs.
struct SdpaLayouts {
  std::optional<Dims> out;
  std::optional<Dims> out_grad;  // absent: like out
  std::optional<Dims> query_grad, key_grad, value_grad;
  std::optional<Dims> mask_grad;  // absent: contiguous
};

struct Problem {
  TensorForm query, key, value, out;
  TensorForm lse;  // f32 (batch, heads, query_len, 1), contiguous
  // Training only.
  TensorForm out_grad;     // as cuDNN reads it
  TensorForm out_grad_in;  // as it arrives; differs from out_grad where a copy makes it fit
  TensorForm query_grad, key_grad, value_grad;

  std::optional<TensorForm> bias;     // as cuDNN reads it
  std::optional<TensorForm> mask_in;  // as it arrives; differs from bias where a conversion makes it fit
  bool bias_gradient = false;
  TensorForm bias_grad;  // as cuDNN writes it: the bias's dims
  TensorForm mask_grad;  // as the caller wants it

  bool causal = false;
  bool lower_right = false;
  int64_t window_left = -1, window_right = -1;
  double dropout_p = 0.0;
  bool key_lengths = false;  // the caller's lengths close the keys from there on
  bool full_lengths = false;  // constant lengths close the tails of the backward's last tiles (a cure for known faults)
  bool training = false;
  bool deterministic = false;

  std::vector<std::string> steps;  // conversions around the library's kernels, in order

  int64_t batch() const { return query.dims[0]; }
  int64_t heads() const { return query.dims[1]; }
  int64_t key_heads() const { return key.dims[1]; }
  int64_t query_len() const { return query.dims[2]; }
  int64_t key_len() const { return key.dims[2]; }
  bool passes_lengths(bool backward) const { return key_lengths || (backward && full_lengths); }
  bool converts_mask() const { return mask_in && bias && !(*mask_in == *bias); }
  // The bias gradient has more elements than the mask's: it is summed.
  bool sums_bias_grad() const { return bias_gradient && bias_grad.dims != mask_grad.dims; }
  bool copies_out_grad() const { return !(out_grad_in == out_grad); }
};

// Reads a call that passed the rules (rules.h).
Problem problem_of(const SdpaCall& call, const SdpaLayouts& layouts);

// A mask of query dim 1 becomes a bias whose row repeats for every query (stride 0), and the bias's gradient, which has a
// row for every query, is summed over them.
void repeat_mask_row(Problem& problem);

// The same with the row written once for every query.
void expand_mask_rows(Problem& problem);

// The same call at lengths rounded up to `bucket`, in tensors of Fulmen's own that the call's are copied into, with the
// real lengths passed at run time: one plan for all lengths up to there. Nothing for calls that this doesn't fit (a mask,
// a window, the lower right corner, lengths of the caller's).
std::optional<Problem> shared_problem(const Problem& problem, int64_t bucket);

// The power of two that both lengths fit in, at least 512.
int64_t length_bucket(const Problem& problem);

// What calls that differ in their lengths and layouts alone have in common, as words.
std::vector<int64_t> family_words(const Problem& problem);

// What a tensor holds in memory: dimensions of stride 0 have one element.
TensorForm stored_form(TensorForm form);

// All that a plan of this problem bakes in, as words; equal words mean an interchangeable plan.
std::vector<int64_t> plan_words(const Problem& problem, bool backward);

// All that a claim of this call depends on, as words, before normalisation is paid for.
void append_call_words(std::vector<int64_t>& words, const SdpaCall& call, const SdpaLayouts& layouts);

uint64_t hash_words(const std::vector<int64_t>& words);

// The stride of a dimension of size 1 says nothing; it becomes what a dense layout would have.
Sizes normal_strides(const Sizes& dims, const Sizes& strides);

// Dense strides for `dims` that keep the order of dimensions of `like`.
Sizes dense_strides_like(const Sizes& dims, const TensorForm& like);

}  // namespace fulmen::cudnn
