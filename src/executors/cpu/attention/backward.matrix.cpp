// Attention backward. A task is a block of keys of one key head; it visits the query blocks that see it, in order, and
// keeps the gradients of its keys and values in scratch. The gradient of a query block is a sum over tasks: each adds
// its part when the tasks before it have (a ticket per query block), so sums have one order for any number of threads,
// five products suffice, and scratch grows with the length only. Where the gradients of all query heads of a key head
// would take more than a budget, the heads come by in passes, and the gradients of the keys and values wait in between.
// Tasks are handed out in order, and wait for earlier ones only, so the first unfinished one never waits. Gradients of
// a broadcast mask work the same way (mask_gradient.h).
//   S = Q K^T, P = exp(S - lse), dP = dO V^T, dS = P (dP - delta), delta_i = sum_c dO_ic O_ic = sum_j P_ij dP_ij
//   dV^T = dO^T P, dK^T = Q^T dS, dQ = dS K
#include <atomic>
#include <cmath>
#include <memory>

#include "core/parallel.h"
#include "executors/cpu/attention/backward_rows.h"
#include "executors/cpu/attention/mask_gradient.h"
#include "executors/cpu/attention/modes.h"
#include "executors/cpu/attention/score_gradients.h"
#include "executors/cpu/attention/targets.h"
#include "ops/sdpa_call.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

struct BackwardSizes {
  int64_t head_dim, value_dim;  // padded
  int64_t block_keys, score_row, block_queries, query_blocks;
  int64_t key_blocks;
  int64_t heads, passes;       // query heads of a key head that go together; so often
  int64_t slots, slot_floats;  // query gradients of so many units (segment, key head, pass) are under way at once
  int64_t key_slot_floats;     // key and value gradients of one block between passes
};

template <class Mode>
BackwardSizes backward_sizes(const AttentionArguments& a) {
  BackwardSizes s;
  s.head_dim = round_up(a.head_dim, Mode::unit);
  s.value_dim = round_up(a.value_dim, Mode::unit);
  const int64_t widest = std::max(s.head_dim, s.value_dim);
  s.block_keys = std::clamp<int64_t>(round_down(16384 / std::max<int64_t>(widest, 1), 64), 64, 128);
  s.block_keys = std::min(s.block_keys, round_up(std::max<int64_t>(a.key_len, 1), Mode::unit));
  s.score_row = s.block_keys + 16;
  s.block_queries = std::min<int64_t>(64, round_up(std::max<int64_t>(a.query_len, 1), 32));
  if constexpr (!Mode::pairs) {  // blocks of equal size
    const int64_t blocks = std::max<int64_t>(1, (2 * a.query_len + 96) / 192);
    s.block_queries = std::max<int64_t>(1, blocks > 1 ? round_up((a.query_len + blocks - 1) / blocks, panel_rows) : a.query_len);
  }
  s.query_blocks = (a.query_len + s.block_queries - 1) / s.block_queries;
  s.key_blocks = (a.key_len + s.block_keys - 1) / s.block_keys;
  const int64_t head_floats = a.query_grad.present ? std::max<int64_t>(s.query_blocks * s.block_queries * s.head_dim, 1) : 1;
  s.heads = std::clamp<int64_t>(a.query_gradient_floats / head_floats, 1, std::max<int64_t>(a.group, 1));
  s.passes = (a.group + s.heads - 1) / s.heads;
  s.slot_floats = a.query_grad.present ? s.heads * head_floats : 0;
  const int64_t units = std::max<int64_t>(1, s.passes * a.key_heads * (a.sequences > 0 ? a.sequences + 2 : a.batch));
  s.slots = std::clamp<int64_t>(a.query_gradient_floats / std::max<int64_t>(s.slot_floats, 1), 1, units);
  s.key_slot_floats = s.passes > 1 ? (round_up(s.head_dim, 32) + round_up(s.value_dim, 32)) * s.score_row : 0;
  return s;
}

template <class Mode>
struct BackwardScratch {
  typename Mode::Left *query, *query_turned, *out_grad, *out_grad_turned, *stage, *score_grad_rows;
  typename Mode::Right *key_columns, *value_columns, *key_rows, *probability, *score_grad;
  uint32_t* pairs;
  float *score, *value_score, *tanh_score, *key_grad, *value_grad, *rows, *random;

  BackwardScratch(Carver& carver, const BackwardSizes& s, const AttentionArguments& a) {
    using Left = typename Mode::Left;
    using Right = typename Mode::Right;
    const int64_t queries = round_up(s.block_queries, 32), widest = std::max(s.head_dim, s.value_dim);
    query = carver.take<Left>(queries * s.head_dim);
    out_grad = carver.take<Left>(queries * s.value_dim);
    query_turned = Mode::pairs ? carver.take<Left>(queries * s.head_dim) : nullptr;
    out_grad_turned = Mode::pairs ? carver.take<Left>(queries * s.value_dim) : nullptr;
    pairs = Mode::pairs ? carver.take<uint32_t>(queries / 2 * widest) : nullptr;
    stage = carver.take<Left>(lanes * widest * 2);
    key_columns = carver.take<Right>(Mode::right_rows(s.head_dim) * s.score_row);
    value_columns = carver.take<Right>(Mode::right_rows(s.value_dim) * s.score_row);
    key_rows = carver.take<Right>(Mode::right_rows(round_up(s.block_keys, 32)) * s.head_dim);
    score = carver.take<float>(queries * s.score_row);
    value_score = carver.take<float>(queries * s.score_row);
    tanh_score = a.softcap > 0 ? carver.take<float>(queries * s.score_row) : nullptr;
    probability = Mode::pairs ? carver.take<Right>(queries / 2 * s.score_row) : nullptr;
    score_grad = Mode::pairs ? carver.take<Right>(queries / 2 * s.score_row) : nullptr;
    score_grad_rows = Mode::pairs ? carver.take<Left>(queries * s.score_row) : nullptr;
    key_grad = carver.take<float>(round_up(s.head_dim, 32) * s.score_row);
    value_grad = carver.take<float>(round_up(s.value_dim, 32) * s.score_row);
    rows = carver.take<float>(s.score_row * widest);
    random = carver.take<float>(2 * (s.block_keys + 256));
  }
};

struct BackwardTask {
  int32_t segment, key_head;
  int64_t block;  // of keys
  int64_t pass;   // which heads
  int64_t unit;   // number of (segment, key head, pass)
};

// Query rows of a block that see the same columns: all of them, or at a diagonal or a window's edge one strip.
struct Band {
  int64_t first, end;  // rows
  int64_t from, to;    // columns, multiples of the unit
};
inline constexpr int64_t band_columns = 32, most_bands = 8;

// What all tasks of a run share.
struct BackwardState {
  std::vector<AttentionSegment> segments;
  std::vector<BackwardTask> tasks;
  std::vector<int64_t> unit_tasks, unit_begin;  // key blocks of a unit, and of the units before it
  std::unique_ptr<std::atomic<int64_t>[]> unit_done, tickets;  // tickets: next key block, per unit, head, query block
  std::unique_ptr<std::atomic<int64_t>[]> block_passes;        // passes that are done, per segment, key head, key block
  std::vector<double> slope_parts;                             // per unit, key block and head
  BackwardRows rows;
  float *query_grad = nullptr, *key_sums = nullptr;
  MaskGradient mask;
};

// Key blocks that a query block visits: [begin, end).
KeyRange visited_blocks(const AttentionArguments& a, const BackwardSizes& sizes, const AttentionSegment& segment, int64_t first, int64_t count) {
  const int64_t begin = open_keys(a, segment, first).begin, end = open_keys(a, segment, first + count - 1).end;
  if (begin >= end) return {0, 0};
  return {begin / sizes.block_keys, (end + sizes.block_keys - 1) / sizes.block_keys};
}

void write_query_grad(const AttentionArguments& a, const AttentionRun& run, const AttentionSegment& segment, int64_t head,
                      int64_t first, int64_t count, const DropoutRules& dropout, const BackwardRows& statistics, float* rows, int64_t row_floats) {
  for (int64_t r = 0; r < count; ++r) {
    float* row = rows + r * row_floats;
    for (int64_t c = 0; c < row_floats; c += lanes) store(row + c, load(row + c) * a.scale);
    if (!all_finite(row, a.head_dim)) clean_query_grad_row(a, run, segment, head, first + r, dropout, statistics, row);
    narrow_row(row, a.head_dim, run.outputs[0], a.query_grad.dtype,
               a.query_grad.offset(segment.batch, head, segment.query_begin + first + r), a.query_grad.stride[3]);
  }
}

// Gradients of a key block, held transposed [dim][key], to the tensor.
void write_key_rows(const AttentionView& view, void* output, const AttentionSegment& segment, int64_t key_head, int64_t first,
                    int64_t count, int64_t dims, int64_t padded_dims, const float* turned, int64_t turned_row, float factor, float* rows) {
  const int64_t padded = round_up(padded_dims, lanes);
  transpose_words(reinterpret_cast<const uint32_t*>(turned), turned_row, padded_dims, round_up(count, lanes), padded,
                  reinterpret_cast<uint32_t*>(rows), padded);
  for (int64_t r = 0; r < count; ++r) {
    float* row = rows + r * padded;
    if (factor != 1.0f)
      for (int64_t c = 0; c < padded; c += lanes) store(row + c, load(row + c) * factor);
    narrow_row(row, dims, output, view.dtype, view.offset(segment.batch, key_head, segment.key_begin + first + r), view.stride[3]);
  }
}

// The bands of a query block, whose rows see columns [from, to) at most; empty strips are left out.
template <class Mode>
int64_t find_bands(const AttentionArguments& a, const AttentionSegment& segment, int64_t first, int64_t count, int64_t key_first, int64_t from,
                   int64_t to, Band* bands) {
  int64_t found = 0;
  for (int64_t r = 0; r < count; r += Mode::strip) {
    const int64_t end = std::min(r + Mode::strip, count);
    Band band{r, end, open_keys(a, segment, first + r).begin - key_first, open_keys(a, segment, first + end - 1).end - key_first};
    band.from = std::max(from, round_down(std::max<int64_t>(band.from, 0), band_columns));
    band.to = std::min(to, round_up(std::max<int64_t>(band.to, 0), band_columns));
    if (band.from >= band.to) continue;
    if (found > 0 && bands[found - 1].end == r && bands[found - 1].from == band.from && bands[found - 1].to == band.to) bands[found - 1].end = end;
    else bands[found++] = band;
  }
  return found;
}

// body(columns from, to, rows first, end) for the columns of all bands, in groups that the same rows see.
template <class F>
void for_each_column_group(const Band* bands, int64_t band_count, const F& body) {
  int64_t group_from = 0, group_to = 0, group_first = 0, group_end = 0;
  for (int64_t c = bands[0].from, next; c < bands[band_count - 1].to; c = next) {
    next = round_down(c, band_columns) + band_columns;
    int64_t first = 0, end = 0, to = 0;
    for (int64_t n = 0; n < band_count; ++n) {
      if (bands[n].from > c || bands[n].to <= c) continue;
      if (first == end) first = bands[n].first;
      end = bands[n].end;
      to = std::min(next, bands[n].to);
    }
    if (first == end) continue;
    if (group_to == c && group_first == first && group_end == end) {
      group_to = to;
      continue;
    }
    if (group_from < group_to) body(group_from, group_to, group_first, group_end);
    group_from = c, group_to = to, group_first = first, group_end = end;
  }
  if (group_from < group_to) body(group_from, group_to, group_first, group_end);
}

template <class Mode>
void backward_task(const AttentionArguments& a, const AttentionRun& run, const BackwardSizes& sizes, const ScoreRules& rules,
                   const DropoutRules& dropout, BackwardState& state, int64_t task_index, const BackwardScratch<Mode>& scratch) {
  const BackwardTask& task = state.tasks[static_cast<size_t>(task_index)];
  const AttentionSegment& segment = state.segments[static_cast<size_t>(task.segment)];
  const int64_t key_first = task.block * sizes.block_keys;
  const int64_t live = std::clamp<int64_t>(segment.key_count - key_first, 0, sizes.block_keys);
  const int64_t written = std::min(segment.key_total - key_first, sizes.block_keys);
  const int64_t padded = round_up(live, Mode::unit), row = sizes.score_row;
  const auto* slopes = static_cast<const float*>(run.inputs[sdpa_alibi_slopes]);
  const bool plain = !a.wants_slopes_grad && !state.mask.wanted() && !dropout.active && !scratch.tanh_score;
  const bool whole_blocks = a.wants_slopes_grad || state.mask.wanted();  // score gradients are read for all columns
  const bool ordered = a.query_grad.present || state.mask.sums_rows();
  constexpr int together = Mode::pairs ? 2 : 1;
  const int64_t key_floats = sizes.head_dim * row, value_floats = sizes.value_dim * row;
  float* const key_sums = state.key_sums + task.block * sizes.key_slot_floats;
  std::atomic<int64_t>* passes_done = nullptr;
  if (sizes.passes > 1) {
    const int64_t unit = task.unit / sizes.passes;  // one at a time: they share the sums
    passes_done = &state.block_passes[static_cast<size_t>(unit * sizes.key_blocks + task.block)];
    if (task.pass > 0) wait_until(*passes_done, task.pass);
    else if (unit > 0) wait_until(state.unit_done[static_cast<size_t>(task.unit - 1)], state.unit_tasks[static_cast<size_t>(task.unit - 1)]);
  }
  if (task.pass > 0) {
    std::memcpy(scratch.key_grad, key_sums, static_cast<size_t>(key_floats) * 4);
    std::memcpy(scratch.value_grad, key_sums + key_floats, static_cast<size_t>(value_floats) * 4);
  } else {
    std::memset(scratch.key_grad, 0, static_cast<size_t>(key_floats) * 4);
    std::memset(scratch.value_grad, 0, static_cast<size_t>(value_floats) * 4);
  }
  const typename Mode::Right* key_rows = nullptr;
  Band bands[most_bands];

  const int64_t blocks = (segment.query_count + sizes.block_queries - 1) / sizes.block_queries;
  const int64_t head_begin = task.pass * sizes.heads, head_end = std::min(head_begin + sizes.heads, a.group);
  for (int64_t g = head_begin; g < head_end; ++g) {
    const int64_t head = task.key_head * a.group + g, batch_head = segment.batch * a.heads + head;
    double slope_sum = 0.0;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t first = i * sizes.block_queries, count = std::min(sizes.block_queries, segment.query_count - first);
      const KeyRange visited = visited_blocks(a, sizes, segment, first, count);
      if (task.block < visited.begin || task.block >= visited.end) {
        if (state.mask.wanted()) state.mask.add(segment, task.segment, head, first, count, key_first, written, 0, 0, task.block, i, nullptr, 0);
        continue;
      }
      int64_t from = std::max<int64_t>(open_keys(a, segment, first).begin - key_first, 0);
      const int64_t to = std::min(open_keys(a, segment, first + count - 1).end - key_first, live);
      from = round_down(std::min(from, live), Mode::unit);
      bool open = from < to;
      if (open && rules.bool_mask)
        open = any_open(mask_row(a, run.inputs[sdpa_mask], segment.batch, head, segment.query_begin + first, segment.key_begin + key_first),
                        a.mask.stride[2], count, from, to);
      const int64_t to_padded = round_up(to, Mode::unit);
      const int64_t depth = Mode::pairs ? round_up(count, 32) : count;
      int64_t band_count = 0;
      if (open && whole_blocks) bands[band_count++] = {0, count, from, to_padded};
      else if (open) band_count = find_bands<Mode>(a, segment, first, count, key_first, from, to_padded, bands);
      open = band_count > 0;
      const typename Mode::Left *query_rows = nullptr, *out_grad_rows = nullptr;
      int64_t query_row = 0, out_grad_row = 0;
      if (open) {
        if (!key_rows) {
          const Source key(run.inputs[sdpa_key], a.key, segment.batch, task.key_head, segment.key_begin + key_first);
          const Source value(run.inputs[sdpa_value], a.value, segment.batch, task.key_head, segment.key_begin + key_first);
          Mode::pack_right_transposed(key, live, a.head_dim, padded, sizes.head_dim, scratch.stage, scratch.key_columns, row);
          Mode::pack_right_transposed(value, live, a.value_dim, padded, sizes.value_dim, scratch.stage, scratch.value_columns, row);
          key_rows = Mode::right(key, live, a.head_dim, padded, sizes.head_dim, scratch.stage, scratch.key_rows);
        }
        if (a.mask.present)
          fetch_mask(mask_row(a, run.inputs[sdpa_mask], segment.batch, head, segment.query_begin + first, segment.key_begin + key_first),
                     a.mask.stride[2], count, from, to);
        query_rows = Mode::left(Source(run.inputs[sdpa_query], a.query, segment.batch, head, segment.query_begin + first), count, a.head_dim,
                                depth, sizes.head_dim, scratch.query, query_row);
        out_grad_rows = Mode::left(Source(run.inputs[sdpa_out_grad], a.out_grad, segment.batch, head, segment.query_begin + first), count,
                                   a.value_dim, depth, sizes.value_dim, scratch.out_grad, out_grad_row);
        Mode::turn(query_rows, sizes.head_dim, depth, sizes.head_dim, scratch.pairs, scratch.query_turned);
        Mode::turn(out_grad_rows, sizes.value_dim, depth, sizes.value_dim, scratch.pairs, scratch.out_grad_turned);
      }
      for (int64_t n = 0; n < band_count; ++n) {
        const Band& band = bands[n];
        Mode::product(band.end - band.first, band.to - band.from, Mode::left_cols(a.head_dim, sizes.head_dim), query_rows + band.first * query_row,
                      query_row, scratch.key_columns + band.from, row, scratch.score + band.first * row + band.from, row, false);
        Mode::product(band.end - band.first, band.to - band.from, Mode::left_cols(a.value_dim, sizes.value_dim), out_grad_rows + band.first * out_grad_row,
                      out_grad_row, scratch.value_columns + band.from, row, scratch.value_score + band.first * row + band.from, row, false);
        for (int64_t r = band.first; r < (Mode::pairs ? round_up(band.end, 32) : band.end); r += together) {
          ScoreRow score_rows[together];
          for (int t = 0; t < together; ++t) {
            float* s = scratch.score + (r + t) * row;
            float* tanh_score = scratch.tanh_score ? scratch.tanh_score + (r + t) * row : nullptr;
            score_rows[t] = {s, scratch.value_score + (r + t) * row, tanh_score, nullptr, std::numeric_limits<float>::infinity(), 0.0f, 0.0f};
            const int64_t query = first + r + t;
            RowPlace place;
            place.begin = place.end = band.from;
            bool whole_row = false;  // nothing of it lies in other blocks
            if (r + t < count) {
              const KeyRange keys = open_keys(a, segment, query);
              place.begin = std::clamp(keys.begin - key_first, band.from, std::min(band.to, live));
              place.end = std::clamp(keys.end - key_first, place.begin, std::min(band.to, live));
              place.live = live;
              whole_row = a.out.dtype != DType::f32 && place.begin < place.end && keys.begin >= key_first && keys.end <= key_first + live;
            }
            if (place.begin < place.end) {
              place.distance = query + segment.shift - key_first;
              if (slopes) place.slope = slopes[head * a.slopes_stride];
              if (a.mask.present)
                place.mask = mask_row(a, run.inputs[sdpa_mask], segment.batch, head, segment.query_begin + query, segment.key_begin + key_first);
              finish_scores(rules, place, s, tanh_score);
              const int64_t at = batch_head * a.query_len + segment.query_begin + query;
              score_rows[t].shift = state.rows.shift[at] / rules.unit, score_rows[t].log = state.rows.log[at], score_rows[t].delta = state.rows.delta[at];
              if (dropout.active)
                score_rows[t].dropout = dropout_factors(dropout, attention_dropout_row(batch_head, segment.query_begin + query), segment.key_begin + key_first,
                                             padded, scratch.random + t * (sizes.block_keys + 256));
            }
            const int64_t vector_begin = place.begin < place.end ? round_down(place.begin, lanes) : band.to;
            for (int64_t c = band.from; c < vector_begin; c += lanes) store(s + c, splat(minus_infinity));
            for (int64_t c = std::max(vector_begin, round_up(place.end, lanes)); c < band.to; c += lanes) store(s + c, splat(minus_infinity));
            if (whole_row) score_rows[t].delta = whole_row_delta<Mode::pairs ? 4 : 5>(score_rows[t], band.from, band.to, rules.exponent_factor);
            if (r + t >= count)
              for (int64_t c = band.from; c < band.to; c += lanes) store(scratch.value_score + (r + t) * row + c, vfloat{});
          }
          if constexpr (Mode::pairs) {
#if defined(__AVX512BF16__)
            uint32_t* probability = scratch.probability + r / 2 * row;
            uint32_t* score_grad = scratch.score_grad + r / 2 * row;
            bf16* grad_rows = scratch.score_grad_rows + r * row;
            if (plain) pair_score_gradients<true>(score_rows, band.from, band.to, rules.exponent_factor, probability, score_grad, grad_rows, row);
            else pair_score_gradients<false>(score_rows, band.from, band.to, rules.exponent_factor, probability, score_grad, grad_rows, row);
#endif
          } else {
            if (plain) float_score_gradients<true>(score_rows[0], band.from, band.to, rules.exponent_factor);
            else float_score_gradients<false>(score_rows[0], band.from, band.to, rules.exponent_factor);
          }
        }
        if (a.wants_slopes_grad)
          for (int64_t r = band.first; r < band.end; ++r)
            slope_sum -= distance_sum(scratch.value_score + r * row, band.from, band.to, first + r + segment.shift - key_first);
      }
      if (state.mask.wanted())
        state.mask.add(segment, task.segment, head, first, count, key_first, written, open ? from : 0, open ? to : 0, task.block, i, scratch.value_score, row);
      float row_sums[most_bands * Mode::strip];
      if (state.mask.sums_rows() && open) MaskGradient::sum_rows(count, from, to, scratch.value_score, row, row_sums);
      if constexpr (!Mode::pairs)
        if (scratch.tanh_score)
          for (int64_t n = 0; n < band_count; ++n)
            for (int64_t r = bands[n].first; r < bands[n].end; ++r)
              for (int64_t c = bands[n].from; c < bands[n].to; c += lanes)
                store(scratch.value_score + r * row + c, chain_softcap(load(scratch.value_score + r * row + c), load(scratch.tanh_score + r * row + c)));

      const auto* probability = [&] {
        if constexpr (Mode::pairs) return scratch.probability; else return scratch.score;
      }();
      const auto* score_grad = [&] {
        if constexpr (Mode::pairs) return scratch.score_grad; else return scratch.value_score;
      }();
      const auto* score_grad_rows = [&] {
        if constexpr (Mode::pairs) return scratch.score_grad_rows; else return scratch.value_score;
      }();
      if (open)
        for_each_column_group(bands, band_count, [&](int64_t c, int64_t c_end, int64_t r, int64_t r_end) {
          if (a.value_grad.present)
            Mode::transposed_product(Mode::left_cols(a.value_dim, sizes.value_dim), c_end - c, r_end - r, out_grad_rows, out_grad_row,
                                     scratch.out_grad_turned, depth, r, probability + c, row, scratch.value_grad + c, row);
          if (a.key_grad.present)
            Mode::transposed_product(Mode::left_cols(a.head_dim, sizes.head_dim), c_end - c, r_end - r, query_rows, query_row,
                                     scratch.query_turned, depth, r, score_grad + c, row, scratch.key_grad + c, row);
        });
      if (!ordered) continue;
      std::atomic<int64_t>& ticket = state.tickets[static_cast<size_t>((task.unit * sizes.heads + g - head_begin) * sizes.query_blocks + i)];
      const bool is_first = task.block == visited.begin;
      if (!is_first) wait_until(ticket, task.block);
      if (state.mask.sums_rows() && open) state.mask.add_rows(segment.batch, head, segment.query_begin + first, count, row_sums);
      if (a.query_grad.present) {
        float* sum = state.query_grad + (task.unit % sizes.slots) * sizes.slot_floats + ((g - head_begin) * sizes.query_blocks + i) * sizes.block_queries * sizes.head_dim;
        if (is_first && (band_count != 1 || bands[0].first != 0 || bands[0].end != count)) std::memset(sum, 0, static_cast<size_t>(count * sizes.head_dim) * 4);
        for (int64_t n = 0; n < band_count; ++n) {
          const Band& band = bands[n];
          const bool begins = is_first && band_count == 1 && band.first == 0 && band.end == count;
          Mode::product(band.end - band.first, sizes.head_dim, (Mode::pairs ? band.to : std::min(band.to, live)) - band.from,
                        score_grad_rows + band.first * row + band.from, row, key_rows + Mode::right_rows(band.from) * sizes.head_dim, sizes.head_dim,
                        sum + band.first * sizes.head_dim, sizes.head_dim, !begins);
        }
        if (task.block + 1 == visited.end) write_query_grad(a, run, segment, head, first, count, dropout, state.rows, sum, sizes.head_dim);
      }
      ticket.store(task.block + 1, std::memory_order_release);
    }
    if (state.mask.wanted()) state.mask.finish_head(segment, task.segment, head, task.block);
    state.slope_parts[static_cast<size_t>((state.unit_begin[static_cast<size_t>(task.unit)] + task.block) * sizes.heads + g - head_begin)] = slope_sum;
  }
  if (task.pass + 1 < sizes.passes) {
    std::memcpy(key_sums, scratch.key_grad, static_cast<size_t>(key_floats) * 4);
    std::memcpy(key_sums + key_floats, scratch.value_grad, static_cast<size_t>(value_floats) * 4);
    passes_done->store(task.pass + 1, std::memory_order_release);
    return;
  }
  if (a.key_grad.present)
    write_key_rows(a.key_grad, run.outputs[1], segment, task.key_head, key_first, written, a.head_dim, sizes.head_dim, scratch.key_grad, row,
                   a.scale, scratch.rows);
  if (a.value_grad.present)
    write_key_rows(a.value_grad, run.outputs[2], segment, task.key_head, key_first, written, a.value_dim, sizes.value_dim, scratch.value_grad, row,
                   1.0f, scratch.rows);
}

template <class Mode>
int64_t backward_scratch_bytes(const AttentionArguments& a) {
  Carver carver(nullptr);
  BackwardScratch<Mode>(carver, backward_sizes<Mode>(a), a);
  return round_up(carver.used(), 4096) + 192;
}

struct BackwardShared {
  BackwardRows rows;
  float *query_grad, *key_sums, *mask;
  BackwardShared(Carver& carver, const AttentionArguments& a, const BackwardSizes& s) : rows(carver, a) {
    query_grad = carver.take<float>(s.slots * s.slot_floats);
    key_sums = carver.take<float>(s.key_blocks * s.key_slot_floats);
    mask = carver.take<float>(MaskGradient::scratch_floats(a));
  }
};

template <class Mode>
void backward(const AttentionArguments& a, const AttentionRun& run) {
  const BackwardSizes sizes = backward_sizes<Mode>(a);
  const ScoreRules rules = score_rules(a, false);
  const DropoutRules dropout = dropout_rules(a, run.inputs[sdpa_seed]);
  Carver carver(run.workspace);
  const BackwardShared shared(carver, a, sizes);
  char* const threads_base = static_cast<char*>(run.workspace) + round_up(carver.used(), 64);

  BackwardState state;
  state.segments = attention_segments(a, run);
  state.rows = shared.rows;
  state.query_grad = shared.query_grad;
  state.key_sums = shared.key_sums;
  // Threads take turns at units, as many as there are threads: blocks of one unit that run at once wait for each other.
  std::vector<BackwardTask> units;
  for (size_t n = 0; n < state.segments.size(); ++n) {
    const int64_t blocks = (state.segments[n].key_total + sizes.block_keys - 1) / sizes.block_keys;
    for (int64_t h = 0; h < a.key_heads && blocks > 0; ++h)
      for (int64_t pass = 0; pass < sizes.passes; ++pass) {
        units.push_back({static_cast<int32_t>(n), static_cast<int32_t>(h), 0, pass, static_cast<int64_t>(units.size())});
        state.unit_begin.push_back(units.size() > 1 ? state.unit_begin.back() + state.unit_tasks.back() : 0);
        state.unit_tasks.push_back(blocks);
      }
  }
  const auto unit_count = static_cast<int64_t>(units.size());
  const int64_t turns = sizes.passes > 1 ? 1 : std::clamp<int64_t>(sizes.slots, 1, std::max(a.threads, 1));
  for (int64_t group = 0; group < unit_count; group += turns)
    for (int64_t block = 0, left = 1; left > 0; ++block) {
      left = 0;
      for (int64_t unit = group; unit < std::min(group + turns, unit_count); ++unit) {
        if (block >= state.unit_tasks[static_cast<size_t>(unit)]) continue;
        state.tasks.push_back(units[static_cast<size_t>(unit)]);
        state.tasks.back().block = block;
        ++left;
      }
    }
  const auto task_count = static_cast<int64_t>(state.tasks.size());
  state.unit_done = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(unit_count));
  state.tickets = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(unit_count * sizes.heads * sizes.query_blocks));
  if (sizes.passes > 1) state.block_passes = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(unit_count / sizes.passes * sizes.key_blocks));
  state.slope_parts.assign(static_cast<size_t>(task_count * sizes.heads), 0.0);
  state.mask.prepare(a, run.outputs[3], shared.mask, sizes.key_blocks, sizes.block_keys, sizes.query_blocks, sizes.block_queries);

  // Also zeros for query blocks that no task visits.
  const std::vector<float> zeros(static_cast<size_t>(sizes.head_dim), 0.0f);
  state.rows.fill(a, run, state.segments, [&](const AttentionSegment& segment, int64_t head, int64_t local) {
    if (!a.query_grad.present) return;
    const int64_t first = round_down(local, sizes.block_queries);
    const KeyRange visited = visited_blocks(a, sizes, segment, first, std::min(sizes.block_queries, segment.query_count - first));
    if (visited.begin >= visited.end)
      narrow_row(zeros.data(), a.head_dim, run.outputs[0], a.query_grad.dtype, a.query_grad.offset(segment.batch, head, segment.query_begin + local), a.query_grad.stride[3]);
  });

  const int64_t bytes = backward_scratch_bytes<Mode>(a);
  std::atomic<int64_t> next{0};
  if (task_count > 0)
    parallel_region(static_cast<int>(std::clamp<int64_t>(task_count, 1, a.threads)), [&](int thread, int) {
      TileUnit tiles;
      Carver own(threads_base + thread * bytes);
      const BackwardScratch<Mode> scratch(own, sizes, a);
      for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < task_count;) {
        const int64_t unit = state.tasks[static_cast<size_t>(t)].unit;
        if (unit >= sizes.slots && a.query_grad.present)
          wait_until(state.unit_done[static_cast<size_t>(unit - sizes.slots)], state.unit_tasks[static_cast<size_t>(unit - sizes.slots)]);
        backward_task<Mode>(a, run, sizes, rules, dropout, state, t, scratch);
        state.unit_done[static_cast<size_t>(unit)].fetch_add(1, std::memory_order_release);
      }
    });

  state.mask.finish();
  if (a.wants_slopes_grad) {
    std::vector<double> sums(static_cast<size_t>(a.heads), 0.0);
    for (const BackwardTask& unit : units)
      for (int64_t block = 0; block < state.unit_tasks[static_cast<size_t>(unit.unit)]; ++block)
        for (int64_t n = 0; n < std::min(sizes.heads, a.group - unit.pass * sizes.heads); ++n)
          sums[static_cast<size_t>(unit.key_head * a.group + unit.pass * sizes.heads + n)] +=
              state.slope_parts[static_cast<size_t>((state.unit_begin[static_cast<size_t>(unit.unit)] + block) * sizes.heads + n)];
    for (int64_t h = 0; h < a.heads; ++h) static_cast<float*>(run.outputs[5])[h * a.slopes_grad_stride] = static_cast<float>(sums[static_cast<size_t>(h)]);
  }
  if (a.wants_sink_grad) state.rows.write_sink_gradient(a, run);
}

}  // namespace

size_t attention_backward_workspace(const AttentionArguments& a) {
  if (suits_decode_backward(a)) return decode_backward_workspace(a);
  Carver carver(nullptr);
  BackwardShared(carver, a, backward_sizes<TargetMode>(a));
  return static_cast<size_t>(round_up(carver.used(), 64) + backward_scratch_bytes<TargetMode>(a) * a.threads);
}

void attention_backward(const AttentionArguments& a, const AttentionRun& run) {
  if (suits_decode_backward(a)) return decode_backward(a, run);
  backward<TargetMode>(a, run);
}

}  // namespace fulmen::cpu::FULMEN_TARGET
