// What the attention kernels of every instruction set are given: one call, flattened to plain numbers when its kernel
// is made (AttentionArguments), and one run's pointers (AttentionRun). No vectors here: this header is shared by the
// files that are compiled once and those compiled per target. Made in attention.cpp; semantics in ops/sdpa_call.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dtype.h"

namespace fulmen::cpu {

// Element strides of a 4-dim tensor; dims of size 1 and broadcast mask dims have stride 0.
struct AttentionView {
  int64_t stride[4] = {0, 0, 0, 0};
  DType dtype = DType::f32;
  bool present = false;
  int64_t offset(int64_t batch, int64_t head, int64_t row) const {
    return batch * stride[0] + head * stride[1] + row * stride[2];
  }
};

// Gradients of queries under way take no more (24 MiB), unless those of a single head do.
inline constexpr int64_t default_query_gradient_floats = int64_t{6} << 20;

struct AttentionArguments {
  int64_t batch = 0, heads = 0, key_heads = 0, group = 0;
  int64_t query_len = 0, key_len = 0, head_dim = 0, value_dim = 0;
  AttentionView query, key, value, mask, out, out_grad;
  AttentionView query_grad, key_grad, value_grad, mask_grad;
  int64_t mask_shape[4] = {1, 1, 1, 1};
  int64_t sink_stride = 0, slopes_stride = 0, sink_grad_stride = 0, slopes_grad_stride = 0;
  int64_t query_offsets_stride = 0, key_offsets_stride = 0, key_lengths_stride = 0, seed_stride = 0;
  int64_t sequences = 0;  // packed sequences; 0: not packed
  bool has_sink = false, has_slopes = false, has_key_lengths = false, has_lse = false;
  bool wants_sink_grad = false, wants_slopes_grad = false;
  bool lower_right = false;
  int64_t left = 0, right = 0;  // open diagonals: -left <= j - i - shift <= right
  double dropout_p = 0.0;
  float scale = 1.0f, softcap = 0.0f;
  bool in_bf16 = false;  // query, key, value (and out_grad) are all bf16: the pair and tile kernels may run
  int threads = 1;       // per-thread workspace was counted for so many
  int64_t query_gradient_floats = default_query_gradient_floats;
};

struct AttentionRun {
  const void* const* inputs = nullptr;
  void* const* outputs = nullptr;
  void* workspace = nullptr;
};

// Queries and keys that see each other: a batch entry, or one packed sequence of it. Positions in kernels are local to
// the segment. Every query row and every key belongs to exactly one segment, so that each result is written.
struct AttentionSegment {
  int64_t batch = 0;
  int64_t query_begin = 0, query_count = 0;
  int64_t key_begin = 0, key_count = 0;  // keys that may be open
  int64_t key_total = 0;                 // also those that a key length closes (their gradients are zero)
  int64_t shift = 0;                     // diagonal of local row i: i + shift
};

std::vector<AttentionSegment> attention_segments(const AttentionArguments& arguments, const AttentionRun& run);

// Open keys of a local row: [begin, end), empty if end <= begin. Both never decrease with the row.
struct KeyRange {
  int64_t begin, end;
};
inline KeyRange open_keys(const AttentionArguments& arguments, const AttentionSegment& segment, int64_t row) {
  const int64_t diagonal = row + segment.shift;
  return {std::max<int64_t>(0, diagonal - arguments.left), std::min(segment.key_count, diagonal + arguments.right + 1)};
}

// One instruction set's kernels.
struct AttentionKernels {
  size_t (*forward_workspace)(const AttentionArguments&);
  void (*forward)(const AttentionArguments&, const AttentionRun&);
  size_t (*backward_workspace)(const AttentionArguments&);
  void (*backward)(const AttentionArguments&, const AttentionRun&);
};

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
constexpr int64_t round_down(int64_t n, int64_t unit) { return n / unit * unit; }

}  // namespace fulmen::cpu
