// Attention forward for few queries over many keys (one new token, say): bound by reading keys and values once, so they
// are read where they lie, with no packing, by all rows that share them. Keys are split in chunks by a rule of shape
// alone; each chunk leaves unnormalised sums, which are joined in order, so results are the same for any number of
// threads. More queries: forward.matrix.cpp.
// Backward: decode_backward.matrix.cpp.
#include <atomic>
#include <cmath>
#include <memory>

#include "core/parallel.h"
#include "executors/cpu/attention/closed_keys.h"
#include "executors/cpu/attention/decode_products.h"
#include "executors/cpu/attention/modes.h"
#include "executors/cpu/attention/targets.h"
#include "ops/sdpa_call.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

inline constexpr int64_t together = decode_together, block_keys = decode_block_keys;

struct DecodeSizes {
  int64_t rows, head_dim, value_dim;  // rows of a key head; padded dims
  int64_t chunks, chunk_keys, score_row;
};

DecodeSizes decode_sizes(const AttentionArguments& a) {
  DecodeSizes s;
  s.rows = a.group * a.query_len;
  s.head_dim = round_up(a.head_dim, lanes);
  s.value_dim = round_up(a.value_dim, 4 * lanes);
  s.chunk_keys = decode_chunk_keys(a);
  s.chunks = (a.key_len + s.chunk_keys - 1) / s.chunk_keys;
  s.score_row = block_keys + 16;
  return s;
}

struct DecodeScratch {
  float *query, *score, *random;
  DecodeScratch(Carver& carver, const DecodeSizes& s) {
    query = carver.take<float>((s.rows + together) * s.head_dim);
    score = carver.take<float>((s.rows + together) * s.score_row);
    random = carver.take<float>(block_keys + 256);
  }
};

// Sums of one chunk: rows of out, then the rows' maxima and sums.
int64_t chunk_floats(const DecodeSizes& s) { return round_up(s.rows, together) * s.value_dim + 2 * round_up(s.rows, 16); }

template <class T>
void decode_chunk(const AttentionArguments& a, const AttentionRun& run, const DecodeSizes& sizes, const ScoreRules& rules,
                  const DropoutRules& dropout, const AttentionSegment& segment, int64_t key_head, int64_t chunk, const DecodeScratch& scratch, float* sums) {
  const int64_t rows = sizes.rows, padded_rows = round_up(rows, together);
  float* out = sums;
  float* row_max = sums + padded_rows * sizes.value_dim;
  float* row_sum = row_max + round_up(rows, 16);
  std::memset(out, 0, static_cast<size_t>(padded_rows * sizes.value_dim) * 4);
  for (int64_t r = 0; r < rows; ++r) row_max[r] = minus_infinity, row_sum[r] = 0.0f;
  for (int64_t g = 0; g < a.group; ++g)
    pack_float_rows(Source(run.inputs[sdpa_query], a.query, segment.batch, key_head * a.group + g, 0), a.query_len, a.head_dim,
                    g + 1 == a.group ? a.query_len + padded_rows - rows : a.query_len, sizes.head_dim, a.scale,
                    scratch.query + g * a.query_len * sizes.head_dim, sizes.head_dim);
  const int64_t begin = std::max(open_keys(a, segment, 0).begin, chunk * sizes.chunk_keys);
  const int64_t end = std::min(open_keys(a, segment, a.query_len - 1).end, (chunk + 1) * sizes.chunk_keys);
  const T* keys = static_cast<const T*>(run.inputs[sdpa_key]) + a.key.offset(segment.batch, key_head, 0);
  const T* values = static_cast<const T*>(run.inputs[sdpa_value]) + a.value.offset(segment.batch, key_head, 0);
  const auto* slopes = static_cast<const float*>(run.inputs[sdpa_alibi_slopes]);
  for (int64_t block = round_down(begin, block_keys); block < end; block += block_keys) {
    const int64_t live = std::min(block_keys, end - block), to = round_up(live, lanes);
    if (rules.bool_mask) {
      bool any = false;
      for (int64_t r = 0; r < rows && !any; ++r)
        any = any_open(mask_row(a, run.inputs[sdpa_mask], segment.batch, key_head * a.group + r / a.query_len, r % a.query_len, block), 0, 1, 0, live);
      if (!any) continue;
    }
    for (int64_t r = 0; r < rows; r += together) {
      const auto dot = rows - r == 1 ? dot_keys<1, T> : rows - r == 2 ? dot_keys<2, T> : dot_keys<together, T>;
      dot(keys + block * a.key.stride[2], a.key.stride[2], live, a.head_dim, scratch.query + r * sizes.head_dim, sizes.head_dim,
          scratch.score + r * sizes.score_row, sizes.score_row);
    }
    for (int64_t r = 0; r < padded_rows; ++r) {
      float* s = scratch.score + r * sizes.score_row;
      if (r >= rows) {
        std::memset(s, 0, static_cast<size_t>(to) * 4);
        continue;
      }
      const int64_t head = key_head * a.group + r / a.query_len, query = r % a.query_len;
      const KeyRange open = open_keys(a, segment, query);
      RowPlace place;
      place.begin = std::clamp<int64_t>(open.begin - block, 0, live);
      place.end = std::clamp(open.end - block, place.begin, live);
      place.live = live;
      const float* factors = nullptr;
      if (place.begin == place.end) {
        place.begin = place.end = 0;
      } else {
        place.distance = query + segment.shift - block;
        if (slopes) place.slope = slopes[head * a.slopes_stride];
        if (a.mask.present) place.mask = mask_row(a, run.inputs[sdpa_mask], segment.batch, head, query, block);
        finish_scores(rules, place, s, nullptr);
        if (dropout.active) factors = dropout_factors(dropout, attention_dropout_row(segment.batch * a.heads + head, query), block, to, scratch.random);
      }
      const float change = softmax_row<false, 5>(s, nullptr, place.begin, place.end, 0, to, rules.exponent_factor, factors, row_max[r], row_sum[r]);
      if (change != 1.0f)
        for (int64_t c = 0; c < sizes.value_dim; c += lanes) store(out + r * sizes.value_dim + c, load(out + r * sizes.value_dim + c) * change);
    }
    for (int64_t r = 0; r < rows; r += together) {
      const auto add = rows - r == 1 ? add_values<1, T> : rows - r == 2 ? add_values<2, T> : add_values<together, T>;
      add(values + block * a.value.stride[2], a.value.stride[2], live, a.value_dim, scratch.score + r * sizes.score_row, sizes.score_row,
          out + r * sizes.value_dim, sizes.value_dim);
    }
  }
}

// Joins the chunks of one key head, in order.
void join_chunks(const AttentionArguments& a, const AttentionRun& run, const DecodeSizes& sizes, const DropoutRules& dropout,
                 const AttentionSegment& segment, int64_t key_head, float* sums) {
  const int64_t batch = segment.batch;
  const int64_t floats = chunk_floats(sizes), padded_rows = round_up(sizes.rows, together);
  const auto* sink = static_cast<const float*>(run.inputs[sdpa_sink]);
  auto* lse = static_cast<float*>(run.outputs[1]);
  std::vector<float> row(static_cast<size_t>(sizes.value_dim));
  for (int64_t r = 0; r < sizes.rows; ++r) {
    const int64_t head = key_head * a.group + r / a.query_len, query = r % a.query_len;
    const auto maximum = [&](int64_t chunk) { return sums[chunk * floats + padded_rows * sizes.value_dim + r]; };
    const auto sum = [&](int64_t chunk) { return sums[chunk * floats + padded_rows * sizes.value_dim + round_up(sizes.rows, 16) + r]; };
    float highest = minus_infinity, total = 0.0f;
    for (int64_t chunk = 0; chunk < sizes.chunks; ++chunk) highest = std::max(highest, maximum(chunk));
    const bool open = highest != minus_infinity;
    if (open && sink) highest = std::max(highest, sink[head * a.sink_stride]);
    std::fill(row.begin(), row.end(), 0.0f);
    for (int64_t chunk = 0; chunk < sizes.chunks && open; ++chunk) {
      const float weight = std::exp(maximum(chunk) - highest);
      if (maximum(chunk) == minus_infinity) continue;
      total += sum(chunk) * weight;
      const float* part = sums + chunk * floats + r * sizes.value_dim;
      for (int64_t c = 0; c < sizes.value_dim; c += lanes) store(row.data() + c, fma(load(part + c), splat(weight), load(row.data() + c)));
    }
    if (open && sink) total += std::exp(sink[head * a.sink_stride] - highest);
    if (open)
      for (float& x : row) x /= total;
    if (!all_finite(row.data(), a.value_dim)) clean_out_row(a, run, segment, head, query, dropout, row.data());
    if (run.outputs[0]) narrow_row(row.data(), a.value_dim, run.outputs[0], a.out.dtype, a.out.offset(batch, head, query), a.out.stride[3]);
    if (lse) lse[(batch * a.heads + head) * a.query_len + query] = open ? highest + std::log(total) : minus_infinity;
  }
}

int64_t scratch_bytes(const DecodeSizes& sizes) {
  Carver carver(nullptr);
  DecodeScratch(carver, sizes);
  return round_up(carver.used(), 64);
}

}  // namespace

bool suits_decode(const AttentionArguments& a) {
  return a.group * a.query_len <= decode_most_rows && a.query_len > 0 && a.key_len > 0 && a.sequences == 0 && a.key.dtype == a.value.dtype &&
         (a.key.stride[3] == 1 || a.head_dim == 1) && (a.value.stride[3] == 1 || a.value_dim == 1);
}

size_t decode_workspace(const AttentionArguments& a) {
  const DecodeSizes sizes = decode_sizes(a);
  return static_cast<size_t>(a.batch * a.key_heads * sizes.chunks * round_up(chunk_floats(sizes), 16) * 4 + scratch_bytes(sizes) * a.threads);
}

void decode(const AttentionArguments& a, const AttentionRun& run) {
  const DecodeSizes sizes = decode_sizes(a);
  const ScoreRules rules = score_rules(a, true);
  const DropoutRules dropout = dropout_rules(a, run.inputs[sdpa_seed]);
  const std::vector<AttentionSegment> segments = attention_segments(a, run);  // one a batch entry
  const int64_t units = a.batch * a.key_heads, tasks = units * sizes.chunks, bytes = scratch_bytes(sizes), floats = chunk_floats(sizes);
  float* const sums = reinterpret_cast<float*>(static_cast<char*>(run.workspace) + bytes * a.threads);
  std::unique_ptr<std::atomic<int64_t>[]> done = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(units));
  std::atomic<int64_t> next{0};
  parallel_region(static_cast<int>(std::clamp<int64_t>(tasks, 1, a.threads)), [&](int thread, int) {
    Carver carver(static_cast<char*>(run.workspace) + thread * bytes);
    const DecodeScratch scratch(carver, sizes);
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const int64_t unit = t / sizes.chunks, chunk = t % sizes.chunks, batch = unit / a.key_heads, key_head = unit % a.key_heads;
      float* const unit_sums = sums + unit * sizes.chunks * floats;
      const AttentionSegment& segment = segments[static_cast<size_t>(batch)];
      const auto run_chunk = a.key.dtype == DType::f32 ? decode_chunk<float> : a.key.dtype == DType::bf16 ? decode_chunk<bf16> : decode_chunk<f16>;
      run_chunk(a, run, sizes, rules, dropout, segment, key_head, chunk, scratch, unit_sums + chunk * floats);
      // Whoever finishes a head's last chunk joins them.
      if (done[static_cast<size_t>(unit)].fetch_add(1, std::memory_order_acq_rel) + 1 == sizes.chunks) join_chunks(a, run, sizes, dropout, segment, key_head, unit_sums);
    }
  });
}

}  // namespace fulmen::cpu::FULMEN_TARGET
