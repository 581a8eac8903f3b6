// Attention backward for few queries over many keys: bound by reading keys and values and writing their gradients once.
// They are read where they lie; a row of a gradient is complete as soon as its key was seen, and goes straight to the
// tensor. Keys are split in chunks by a rule of shape alone; each leaves its part of the gradient of the queries, and
// the parts are added in order, so results are the same for any number of threads. Formulas: backward.matrix.cpp.
#include <atomic>
#include <memory>

#include "executors/cpu/attention/backward_rows.h"
#include "executors/cpu/attention/decode_products.h"
#include "executors/cpu/attention/score_gradients.h"
#include "executors/cpu/attention/targets.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

inline constexpr int64_t together = decode_together, block_keys = decode_block_keys, score_row = block_keys + 16;

struct DecodeBackwardSizes {
  int64_t rows, padded_rows, head_dim, value_dim;  // rows of a key head; padded dims
  int64_t chunks, chunk_keys, chunk_floats;        // of a chunk's part of the query gradients
};

DecodeBackwardSizes decode_backward_sizes(const AttentionArguments& a) {
  DecodeBackwardSizes s;
  s.rows = a.group * a.query_len;
  s.padded_rows = round_up(s.rows, together);
  s.head_dim = round_up(a.head_dim, 4 * lanes);
  s.value_dim = round_up(a.value_dim, lanes);
  s.chunk_keys = decode_chunk_keys(a);
  s.chunks = (a.key_len + s.chunk_keys - 1) / s.chunk_keys;
  s.chunk_floats = a.query_grad.present ? round_up(s.padded_rows * s.head_dim, 16) : 0;
  return s;
}

struct DecodeBackwardScratch {
  float *query, *out_grad, *score, *value_score, *tanh_score, *random;
  DecodeBackwardScratch(Carver& carver, const DecodeBackwardSizes& s, const AttentionArguments& a) {
    query = carver.take<float>(s.padded_rows * s.head_dim);
    out_grad = carver.take<float>(s.padded_rows * s.value_dim);
    score = carver.take<float>(s.padded_rows * score_row);
    value_score = carver.take<float>(s.padded_rows * score_row);
    tanh_score = a.softcap > 0 ? carver.take<float>(s.padded_rows * score_row) : nullptr;
    random = carver.take<float>(block_keys + 256);
  }
};

int64_t scratch_bytes(const DecodeBackwardSizes& sizes, const AttentionArguments& a) {
  Carver carver(nullptr);
  DecodeBackwardScratch(carver, sizes, a);
  return round_up(carver.used(), 64);
}

// Rows of a gradient of keys or values, in whatever dtype and stride the tensor has.
void write_gradient(const AttentionView& view, void* output, int64_t batch, int64_t key_head, int64_t first, int64_t count, int64_t dims,
                    const float* weights, int64_t rows, const float* source, int64_t source_row) {
  const auto write = [&](auto* target) {
    using T = std::remove_pointer_t<decltype(target)>;
    target += view.offset(batch, key_head, first);
    const auto sums = rows == 1 ? write_key_sums<1, T> : rows == 2 ? write_key_sums<2, T> : rows <= 4 ? write_key_sums<4, T> : write_key_sums<8, T>;
    sums(weights, score_row, count, dims, source, source_row, target, view.stride[2]);
  };
  if (view.dtype == DType::f32) write(static_cast<float*>(output));
  else if (view.dtype == DType::bf16) write(static_cast<bf16*>(output));
  else write(static_cast<f16*>(output));
}

// Probabilities and score gradients of a block's rows, in score and value_score; 0 where closed.
void block_gradients(const AttentionArguments& a, const AttentionRun& run, const ScoreRules& rules, const DropoutRules& dropout,
                     const BackwardRows& statistics, const DecodeBackwardSizes& sizes, const AttentionSegment& segment, int64_t key_head, int64_t block,
                     int64_t live, const DecodeBackwardScratch& scratch) {
  const auto* slopes = static_cast<const float*>(run.inputs[sdpa_alibi_slopes]);
  const bool plain = !dropout.active && !scratch.tanh_score;
  const int64_t to = round_up(live, lanes);
  for (int64_t r = 0; r < sizes.padded_rows; ++r) {
    float* s = scratch.score + r * score_row;
    float* value_score = scratch.value_score + r * score_row;
    if (r >= sizes.rows) {
      std::memset(s, 0, static_cast<size_t>(to) * 4);
      std::memset(value_score, 0, static_cast<size_t>(to) * 4);
      continue;
    }
    float* tanh_score = scratch.tanh_score ? scratch.tanh_score + r * score_row : nullptr;
    ScoreRow row{s, value_score, tanh_score, nullptr, std::numeric_limits<float>::infinity(), 0.0f, 0.0f};
    const int64_t head = key_head * a.group + r / a.query_len, query = r % a.query_len;
    const KeyRange open = open_keys(a, segment, query);
    RowPlace place;
    place.begin = std::clamp<int64_t>(open.begin - block, 0, live);
    place.end = std::clamp(open.end - block, place.begin, live);
    place.live = live;
    if (place.begin < place.end) {
      place.distance = query + segment.shift - block;
      if (slopes) place.slope = slopes[head * a.slopes_stride];
      if (a.mask.present) place.mask = mask_row(a, run.inputs[sdpa_mask], segment.batch, head, query, block);
      finish_scores(rules, place, s, tanh_score);
      const int64_t at = (segment.batch * a.heads + head) * a.query_len + query;
      row.shift = statistics.shift[at] / rules.unit, row.log = statistics.log[at], row.delta = statistics.delta[at];
      if (dropout.active) row.dropout = dropout_factors(dropout, attention_dropout_row(segment.batch * a.heads + head, query), block, to, scratch.random);
    }
    const int64_t vector_begin = place.begin < place.end ? round_down(place.begin, lanes) : to;
    for (int64_t c = 0; c < vector_begin; c += lanes) store(s + c, splat(minus_infinity));
    for (int64_t c = std::max(vector_begin, round_up(place.end, lanes)); c < to; c += lanes) store(s + c, splat(minus_infinity));
    if (a.out.dtype != DType::f32 && place.begin < place.end && open.begin >= block && open.end <= block + live)
      row.delta = whole_row_delta<5>(row, 0, to, rules.exponent_factor);
    if (plain) float_score_gradients<true>(row, 0, to, rules.exponent_factor);
    else float_score_gradients<false>(row, 0, to, rules.exponent_factor);
    if (tanh_score)
      for (int64_t c = 0; c < to; c += lanes) store(value_score + c, chain_softcap(load(value_score + c), load(tanh_score + c)));
  }
}

template <class T>
void decode_backward_chunk(const AttentionArguments& a, const AttentionRun& run, const DecodeBackwardSizes& sizes, const ScoreRules& rules,
                           const DropoutRules& dropout, const BackwardRows& statistics, const AttentionSegment& segment, int64_t key_head, int64_t chunk,
                           const DecodeBackwardScratch& scratch, float* query_grad) {
  const int64_t rows = sizes.rows, batch = segment.batch;
  for (int64_t g = 0; g < a.group; ++g) {
    const int64_t head = key_head * a.group + g, extra = g + 1 == a.group ? sizes.padded_rows - rows : 0, first = g * a.query_len;
    // The scale is in the queries: scores and the gradients of the keys both have it once.
    pack_float_rows(Source(run.inputs[sdpa_query], a.query, batch, head, 0), a.query_len, a.head_dim, a.query_len + extra, sizes.head_dim, a.scale,
                    scratch.query + first * sizes.head_dim, sizes.head_dim);
    pack_float_rows(Source(run.inputs[sdpa_out_grad], a.out_grad, batch, head, 0), a.query_len, a.value_dim, a.query_len + extra, sizes.value_dim, 1.0f,
                    scratch.out_grad + first * sizes.value_dim, sizes.value_dim);
  }
  if (a.query_grad.present) std::memset(query_grad, 0, static_cast<size_t>(sizes.chunk_floats) * 4);
  const int64_t chunk_end = std::min((chunk + 1) * sizes.chunk_keys, a.key_len);
  const int64_t open_begin = open_keys(a, segment, 0).begin, open_end = std::min(open_keys(a, segment, a.query_len - 1).end, chunk_end);
  const T* keys = static_cast<const T*>(run.inputs[sdpa_key]) + a.key.offset(batch, key_head, 0);
  const T* values = static_cast<const T*>(run.inputs[sdpa_value]) + a.value.offset(batch, key_head, 0);
  for (int64_t block = chunk * sizes.chunk_keys; block < chunk_end; block += block_keys) {
    const int64_t written = std::min(block_keys, chunk_end - block);
    int64_t live = std::clamp<int64_t>(open_end - block, 0, written);
    if (open_begin >= block + live) live = 0;
    if (rules.bool_mask && live > 0) {
      bool any = false;
      for (int64_t r = 0; r < rows && !any; ++r)
        any = any_open(mask_row(a, run.inputs[sdpa_mask], batch, key_head * a.group + r / a.query_len, r % a.query_len, block), 0, 1, 0, live);
      if (!any) live = 0;
    }
    // Keys past the open ones get zeros.
    for (int64_t r = 0; r < sizes.padded_rows; ++r) {
      std::memset(scratch.score + r * score_row + round_down(live, lanes), 0, static_cast<size_t>(score_row - round_down(live, lanes)) * 4);
      std::memset(scratch.value_score + r * score_row + round_down(live, lanes), 0, static_cast<size_t>(score_row - round_down(live, lanes)) * 4);
    }
    if (live > 0) {
      for (int64_t r = 0; r < rows; r += together) {
        const int64_t left = rows - r;
        const auto dot = left == 1 ? dot_keys<1, T> : left == 2 ? dot_keys<2, T> : dot_keys<together, T>;
        dot(keys + block * a.key.stride[2], a.key.stride[2], live, a.head_dim, scratch.query + r * sizes.head_dim, sizes.head_dim,
            scratch.score + r * score_row, score_row);
        dot(values + block * a.value.stride[2], a.value.stride[2], live, a.value_dim, scratch.out_grad + r * sizes.value_dim, sizes.value_dim,
            scratch.value_score + r * score_row, score_row);
      }
      block_gradients(a, run, rules, dropout, statistics, sizes, segment, key_head, block, live, scratch);
    }
    if (a.query_grad.present && live > 0)
      for (int64_t r = 0; r < rows; r += together) {
        const int64_t left = rows - r;
        const auto add = left == 1 ? add_values<1, T> : left == 2 ? add_values<2, T> : add_values<together, T>;
        add(keys + block * a.key.stride[2], a.key.stride[2], live, a.head_dim, scratch.value_score + r * score_row, score_row,
            query_grad + r * sizes.head_dim, sizes.head_dim);
      }
    if (a.key_grad.present)
      write_gradient(a.key_grad, run.outputs[1], batch, key_head, block, written, a.head_dim, scratch.value_score, rows, scratch.query, sizes.head_dim);
    if (a.value_grad.present)
      write_gradient(a.value_grad, run.outputs[2], batch, key_head, block, written, a.value_dim, scratch.score, rows, scratch.out_grad, sizes.value_dim);
  }
}

// Adds the chunks' parts, in order.
void join_query_gradients(const AttentionArguments& a, const AttentionRun& run, const DecodeBackwardSizes& sizes, const DropoutRules& dropout,
                          const BackwardRows& statistics, const AttentionSegment& segment, int64_t key_head, const float* parts) {
  std::vector<float> sum(static_cast<size_t>(sizes.head_dim));
  for (int64_t r = 0; r < sizes.rows; ++r) {
    for (int64_t c = 0; c < sizes.head_dim; c += lanes) {
      vfloat total{};
      for (int64_t chunk = 0; chunk < sizes.chunks; ++chunk) total += load(parts + chunk * sizes.chunk_floats + r * sizes.head_dim + c);
      store(sum.data() + c, total * a.scale);
    }
    const int64_t head = key_head * a.group + r / a.query_len, query = r % a.query_len;
    if (!all_finite(sum.data(), a.head_dim)) clean_query_grad_row(a, run, segment, head, query, dropout, statistics, sum.data());
    narrow_row(sum.data(), a.head_dim, run.outputs[0], a.query_grad.dtype, a.query_grad.offset(segment.batch, head, query), a.query_grad.stride[3]);
  }
}

}  // namespace

bool suits_decode_backward(const AttentionArguments& a) {
  const auto rows_are_whole = [](const AttentionView& view, int64_t dims) { return !view.present || view.stride[3] == 1 || dims == 1; };
  return suits_decode(a) && !a.mask_grad.present && !a.wants_slopes_grad && rows_are_whole(a.key_grad, a.head_dim) &&
         rows_are_whole(a.value_grad, a.value_dim);
}

size_t decode_backward_workspace(const AttentionArguments& a) {
  const DecodeBackwardSizes sizes = decode_backward_sizes(a);
  Carver carver(nullptr);
  BackwardRows(carver, a);
  return static_cast<size_t>(round_up(carver.used(), 64) + scratch_bytes(sizes, a) * a.threads + a.batch * a.key_heads * sizes.chunks * sizes.chunk_floats * 4);
}

void decode_backward(const AttentionArguments& a, const AttentionRun& run) {
  const DecodeBackwardSizes sizes = decode_backward_sizes(a);
  const ScoreRules rules = score_rules(a, true);
  const DropoutRules dropout = dropout_rules(a, run.inputs[sdpa_seed]);
  const std::vector<AttentionSegment> segments = attention_segments(a, run);  // one a batch entry
  Carver carver(run.workspace);
  const BackwardRows statistics(carver, a);
  statistics.fill(a, run, segments, [](const AttentionSegment&, int64_t, int64_t) {});
  char* const threads_base = static_cast<char*>(run.workspace) + round_up(carver.used(), 64);
  const int64_t units = a.batch * a.key_heads, tasks = units * sizes.chunks, bytes = scratch_bytes(sizes, a);
  float* const parts = reinterpret_cast<float*>(threads_base + bytes * a.threads);
  const auto done = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(units));
  std::atomic<int64_t> next{0};
  parallel_region(static_cast<int>(std::clamp<int64_t>(tasks, 1, a.threads)), [&](int thread, int) {
    Carver own(threads_base + thread * bytes);
    const DecodeBackwardScratch scratch(own, sizes, a);
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const int64_t unit = t / sizes.chunks, chunk = t % sizes.chunks, batch = unit / a.key_heads, key_head = unit % a.key_heads;
      const AttentionSegment& segment = segments[static_cast<size_t>(batch)];
      float* const unit_parts = parts + unit * sizes.chunks * sizes.chunk_floats;
      const auto run_chunk = a.key.dtype == DType::f32 ? decode_backward_chunk<float> : a.key.dtype == DType::bf16 ? decode_backward_chunk<bf16> : decode_backward_chunk<f16>;
      run_chunk(a, run, sizes, rules, dropout, statistics, segment, key_head, chunk, scratch, unit_parts + chunk * sizes.chunk_floats);
      // Whoever finishes a head's last chunk adds them.
      if (done[static_cast<size_t>(unit)].fetch_add(1, std::memory_order_acq_rel) + 1 == sizes.chunks && a.query_grad.present)
        join_query_gradients(a, run, sizes, dropout, statistics, segment, key_head, unit_parts);
    }
  });
  if (a.wants_sink_grad) statistics.write_sink_gradient(a, run);
}

}  // namespace fulmen::cpu::FULMEN_TARGET
