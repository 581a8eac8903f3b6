// Attention forward. A task is a block of queries of all heads that share a key head; it walks the key blocks that are
// open to it with an online softmax. Rows never depend on each other nor on the block they are in, so results are the
// same for any number of threads. Backward: backward.matrix.cpp. Few queries over many keys: decode.matrix.cpp.
#include <atomic>
#include <cmath>

#include "core/parallel.h"
#include "executors/cpu/attention/closed_keys.h"
#include "executors/cpu/attention/modes.h"
#include "executors/cpu/attention/targets.h"
#include "ops/sdpa_call.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

struct ForwardSizes {
  int64_t head_dim, value_dim;  // padded
  int64_t block_keys, score_row;
  int64_t queries, rows;        // of a task: queries a head, and rows of all heads of the group
};

template <class Mode>
ForwardSizes forward_sizes(const AttentionArguments& a) {
  ForwardSizes s;
  s.head_dim = round_up(a.head_dim, Mode::unit);
  s.value_dim = round_up(a.value_dim, Mode::unit);
  s.block_keys = std::min(block_keys_for(std::max(s.head_dim, s.value_dim)), round_up(std::max<int64_t>(a.key_len, 1), Mode::unit));
  s.score_row = s.block_keys + 16;
  // Many rows share each packed key block, unless that leaves too few tasks for the threads.
  const int64_t most = 8 * Mode::strip, units = std::max<int64_t>(a.batch * a.key_heads, 1);
  const int64_t wanted_tasks = a.threads > 1 ? 4 * a.threads : 1;
  int64_t queries = std::min(most / a.group, round_up(a.query_len * units / wanted_tasks + 1, Mode::strip));
  if (queries > Mode::strip) queries = round_down(queries, Mode::strip);
  // Blocks of equal size: a short last one would pack all keys again for a few rows.
  const int64_t blocks = std::max<int64_t>(1, (2 * a.query_len + queries) / std::max<int64_t>(2 * queries, 1));
  queries = (a.query_len + blocks - 1) / blocks;
  if (blocks > 1 && a.group == 1) queries = round_up(queries, Mode::strip);
  s.queries = std::clamp<int64_t>(queries, 1, std::max<int64_t>(a.query_len, 1));
  s.rows = s.queries * a.group;
  return s;
}

template <class Mode>
struct ForwardScratch {
  typename Mode::Left *query, *stage;
  bf16* probability;
  typename Mode::Right *key, *value;
  float *score, *out, *row_max, *row_sum, *random;

  ForwardScratch(Carver& carver, const ForwardSizes& s) {
    const int64_t rows = round_up(s.rows, Mode::strip) + Mode::strip;
    query = carver.take<typename Mode::Left>(rows * s.head_dim);
    stage = carver.take<typename Mode::Left>(lanes * std::max(s.head_dim, s.value_dim) * 2);
    key = carver.take<typename Mode::Right>(Mode::right_rows(s.head_dim) * s.score_row);
    value = carver.take<typename Mode::Right>(Mode::right_rows(round_up(s.block_keys, 32)) * s.value_dim);
    score = carver.take<float>(Mode::strip * s.score_row);
    probability = Mode::pairs ? carver.take<bf16>(Mode::strip * s.score_row) : nullptr;
    out = carver.take<float>(rows * s.value_dim);
    row_max = carver.take<float>(rows);
    row_sum = carver.take<float>(rows);
    random = carver.take<float>(s.block_keys + 256);
  }
};

struct ForwardTask {
  int32_t segment, key_head;
  int64_t first;  // local query
};

template <class Mode>
void forward_task(const AttentionArguments& a, const AttentionRun& run, const ForwardSizes& sizes,
                  const ScoreRules& rules, const DropoutRules& dropout, const AttentionSegment& segment,
                  const ForwardTask& task, const ForwardScratch<Mode>& scratch) {
  const int64_t count = std::min(sizes.queries, segment.query_count - task.first);
  const int64_t rows = count * a.group, dims = sizes.value_dim;
  const auto head_of = [&](int64_t r) { return a.group == 1 ? task.key_head : task.key_head * a.group + r / count; };
  const auto query_of = [&](int64_t r) { return task.first + (a.group == 1 ? r : r % count); };

  const float factor = Mode::pairs ? 1.0f : a.scale;
  for (int64_t g = 0; g < a.group; ++g)
    Mode::pack_left(Source(run.inputs[sdpa_query], a.query, segment.batch, task.key_head * a.group + g, segment.query_begin + task.first),
                    count, a.head_dim, g + 1 == a.group ? round_up(rows, Mode::strip) - g * count : count, sizes.head_dim,
                    factor, scratch.query + g * count * sizes.head_dim, sizes.head_dim);
  std::memset(scratch.out, 0, static_cast<size_t>(rows * dims) * 4);
  for (int64_t r = 0; r < rows; ++r) scratch.row_max[r] = minus_infinity, scratch.row_sum[r] = 0.0f;

  const int64_t open_begin = open_keys(a, segment, task.first).begin, open_end = open_keys(a, segment, task.first + count - 1).end;
  const auto* slopes = static_cast<const float*>(run.inputs[sdpa_alibi_slopes]);
  for (int64_t block = round_down(open_begin, sizes.block_keys); block < open_end; block += sizes.block_keys) {
    const int64_t live = std::min(open_end - block, sizes.block_keys), padded = round_up(live, Mode::unit);
    bool packed = false;
    for (int64_t strip = 0; strip < rows; strip += Mode::strip) {
      const int64_t strip_rows = std::min(Mode::strip, rows - strip);
      int64_t from = live, to = 0;
      for (int64_t r = strip; r < strip + strip_rows; ++r) {
        const KeyRange open = open_keys(a, segment, query_of(r));
        from = std::min(from, open.begin - block);
        to = std::max(to, open.end - block);
      }
      from = round_down(std::max<int64_t>(from, 0), Mode::unit);
      to = std::min(to, live);
      if (from >= to) continue;
      if (rules.bool_mask) {
        bool any = false;
        for (int64_t r = strip; r < strip + strip_rows && !any; ++r)
          any = (r > strip && a.mask.stride[2] == 0 && head_of(r) == head_of(r - 1))
                    ? false
                    : any_open(mask_row(a, run.inputs[sdpa_mask], segment.batch, head_of(r), segment.query_begin + query_of(r), segment.key_begin + block), 0, 1, from, to);
        if (!any) continue;
      }
      if (!packed) {
        Mode::pack_right_transposed(Source(run.inputs[sdpa_key], a.key, segment.batch, task.key_head, segment.key_begin + block), live,
                                    a.head_dim, padded, sizes.head_dim, scratch.stage, scratch.key, sizes.score_row);
        Mode::pack_right(Source(run.inputs[sdpa_value], a.value, segment.batch, task.key_head, segment.key_begin + block), live,
                         a.value_dim, padded, sizes.value_dim, scratch.stage, scratch.value);
        packed = true;
      }
      if (a.mask.present && strip % count + strip_rows <= count)  // rows of one head
        fetch_mask(mask_row(a, run.inputs[sdpa_mask], segment.batch, head_of(strip), segment.query_begin + query_of(strip), segment.key_begin + block),
                   a.mask.stride[2], strip_rows, from, to);
      const int64_t to_padded = round_up(to, Mode::unit);
      Mode::product(strip_rows, to_padded - from, Mode::pairs ? sizes.head_dim : a.head_dim, scratch.query + strip * sizes.head_dim,
                    sizes.head_dim, scratch.key + from, sizes.score_row, scratch.score + from, sizes.score_row, false);
      bool any = false;
      for (int64_t r = 0; r < strip_rows; ++r) {
        const int64_t head = head_of(strip + r), query = query_of(strip + r);
        const KeyRange open = open_keys(a, segment, query);
        RowPlace place;
        place.begin = std::clamp(open.begin - block, from, to);
        place.end = std::clamp(open.end - block, place.begin, to);
        place.live = live;
        if (place.begin == place.end) place.begin = place.end = from;
        float* s = scratch.score + r * sizes.score_row;
        const float* factors = nullptr;
        if (place.begin < place.end) {
          place.distance = query + segment.shift - block;
          if (slopes) place.slope = slopes[head * a.slopes_stride];
          if (a.mask.present) place.mask = mask_row(a, run.inputs[sdpa_mask], segment.batch, head, segment.query_begin + query, segment.key_begin + block);
          finish_scores(rules, place, s, nullptr);
          if (dropout.active)
            factors = dropout_factors(dropout, attention_dropout_row(segment.batch * a.heads + head, segment.query_begin + query),
                                      segment.key_begin + block, padded, scratch.random);
        }
        const float change = softmax_row<Mode::pairs, Mode::exp_degree>(s, scratch.probability + r * sizes.score_row, place.begin, place.end, from, to_padded,
                                               rules.exponent_factor, factors, scratch.row_max[strip + r], scratch.row_sum[strip + r]);
        if (change != 1.0f) {
          float* out = scratch.out + (strip + r) * dims;
          for (int64_t c = 0; c < dims; c += lanes) store(out + c, load(out + c) * change);
        }
        any |= scratch.row_max[strip + r] != minus_infinity;
      }
      if (!any) continue;
      if constexpr (Mode::pairs)
        Mode::product(strip_rows, dims, to_padded - from, scratch.probability + from, sizes.score_row,
                      scratch.value + from / 2 * dims, dims, scratch.out + strip * dims, dims, true);
      else
        Mode::product(strip_rows, dims, to - from, scratch.score + from, sizes.score_row, scratch.value + from * dims, dims,
                      scratch.out + strip * dims, dims, true);
    }
  }

  const auto* sink = static_cast<const float*>(run.inputs[sdpa_sink]);
  auto* lse = static_cast<float*>(run.outputs[1]);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = head_of(r), query = segment.query_begin + query_of(r);
    const bool open = scratch.row_max[r] != minus_infinity;
    float total = scratch.row_sum[r], row_max = scratch.row_max[r] * rules.unit, shrink = 1.0f;
    if (open && sink) {
      const float logit = sink[head * a.sink_stride];
      const float highest = std::max(row_max, logit);
      shrink = std::exp(row_max - highest);
      total = total * shrink + std::exp(logit - highest);
      row_max = highest;
    }
    float* out = scratch.out + r * dims;
    const float inverse = open ? shrink / total : 0.0f;
    for (int64_t c = 0; c < dims; c += lanes) store(out + c, open ? load(out + c) * inverse : vfloat{});
    if (!all_finite(out, a.value_dim)) clean_out_row(a, run, segment, head, query_of(r), dropout, out);
    if (run.outputs[0]) narrow_row(out, a.value_dim, run.outputs[0], a.out.dtype, a.out.offset(segment.batch, head, query), a.out.stride[3]);
    if (lse) lse[(segment.batch * a.heads + head) * a.query_len + query] = open ? row_max + std::log(total) : minus_infinity;
  }
}

template <class Mode>
int64_t forward_scratch_bytes(const AttentionArguments& a) {
  Carver carver(nullptr);
  ForwardScratch<Mode>(carver, forward_sizes<Mode>(a));
  return round_up(carver.used(), 4096) + 192;  // threads' pieces do not start at the same cache set
}

template <class Mode>
void forward(const AttentionArguments& a, const AttentionRun& run) {
  const ForwardSizes sizes = forward_sizes<Mode>(a);
  const ScoreRules rules = score_rules(a, !Mode::pairs);
  const DropoutRules dropout = dropout_rules(a, run.inputs[sdpa_seed]);
  const std::vector<AttentionSegment> segments = attention_segments(a, run);
  std::vector<ForwardTask> tasks;
  // The longest blocks of a causal head come first. Batch entries that share a head's mask follow each other.
  const auto add_tasks = [&](int64_t s, int64_t h) {
    const int64_t queries = segments[static_cast<size_t>(s)].query_count;
    for (int64_t first = queries > 0 ? round_down(queries - 1, sizes.queries) : -1; first >= 0; first -= sizes.queries)
      tasks.push_back({static_cast<int32_t>(s), static_cast<int32_t>(h), first});
  };
  const auto segment_count = static_cast<int64_t>(segments.size());
  const bool heads_first = a.mask.present && a.mask.stride[0] == 0;
  for (int64_t n = 0; n < segment_count * a.key_heads; ++n)
    if (heads_first) add_tasks(n % segment_count, n / segment_count);
    else add_tasks(n / a.key_heads, n % a.key_heads);
  const int64_t bytes = forward_scratch_bytes<Mode>(a), task_count = static_cast<int64_t>(tasks.size());
  std::atomic<int64_t> next{0};
  parallel_region(static_cast<int>(std::clamp<int64_t>(task_count, 1, a.threads)), [&](int thread, int) {
    TileUnit tiles;
    Carver carver(static_cast<char*>(run.workspace) + thread * bytes);
    const ForwardScratch<Mode> scratch(carver, sizes);
    for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < task_count;)
      forward_task<Mode>(a, run, sizes, rules, dropout, segments[static_cast<size_t>(tasks[static_cast<size_t>(t)].segment)], tasks[static_cast<size_t>(t)], scratch);
  });
}

}  // namespace

size_t attention_forward_workspace(const AttentionArguments& a) {
  if (suits_decode(a)) return decode_workspace(a);
  return static_cast<size_t>(forward_scratch_bytes<TargetMode>(a) * a.threads);
}

void attention_forward(const AttentionArguments& a, const AttentionRun& run) {
  if (suits_decode(a)) return decode(a, run);
  forward<TargetMode>(a, run);
}

AttentionKernels attention_kernels() {
  return {attention_forward_workspace, attention_forward, attention_backward_workspace, attention_backward};
}

}  // namespace fulmen::cpu::FULMEN_TARGET
