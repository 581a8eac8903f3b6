// Attention backward. A task is a block of keys of one key head; it visits the query blocks that see it, in order, and
// keeps the gradients of its keys and values in scratch. The gradient of a query block is a sum over tasks: each adds
// its part when the tasks before it have (a ticket per query block), so sums have one order for any number of threads,
// five products suffice, and scratch grows with the length only. Tasks are handed out in order, so the first unfinished
// one never waits. Gradients of a broadcast mask work the same way (mask_gradient.h).
//   S = Q K^T, P = exp(S - lse), dP = dO V^T, dS = P (dP - delta), delta_i = sum_c dO_ic O_ic
//   dV^T = dO^T P, dK^T = Q^T dS, dQ = dS K
#include <atomic>
#include <cmath>
#include <memory>

#include "core/parallel.h"
#include "executors/cpu/attention/closed_keys.h"
#include "executors/cpu/attention/mask_gradient.h"
#include "executors/cpu/attention/modes.h"
#include "executors/cpu/attention/targets.h"
#include "ops/sdpa_call.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

struct BackwardSizes {
  int64_t head_dim, value_dim;  // padded
  int64_t block_keys, score_row, block_queries, query_blocks;
  int64_t key_blocks;
  int64_t slots, slot_floats;  // query gradients of so many (segment, key head) units are under way at once
};

inline constexpr int64_t query_gradient_budget = int64_t{24} << 20;

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
  s.slot_floats = a.query_grad.present ? a.group * s.query_blocks * s.block_queries * s.head_dim : 0;
  const int64_t units = std::max<int64_t>(1, a.key_heads * (a.sequences > 0 ? a.sequences + 2 : a.batch));
  s.slots = std::clamp<int64_t>(query_gradient_budget / std::max<int64_t>(s.slot_floats * 4, 1), 1, units);
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
  int64_t unit;   // number of (segment, key head)
};

// What all tasks of a run share.
struct BackwardState {
  std::vector<AttentionSegment> segments;
  std::vector<BackwardTask> tasks;
  std::vector<int64_t> unit_tasks;
  std::unique_ptr<std::atomic<int64_t>[]> unit_done, tickets;  // tickets: next key block, per unit, head, query block
  std::vector<double> slope_parts;                             // per task and head of the group
  float *delta = nullptr, *row_shift = nullptr, *row_log = nullptr;  // per batch, head and query: p = 2^((s - shift) factor - log)
  float* query_grad = nullptr;
  MaskGradient mask;
};

// Key blocks that a query block visits: [begin, end).
KeyRange visited_blocks(const AttentionArguments& a, const BackwardSizes& sizes, const AttentionSegment& segment, int64_t first, int64_t count) {
  const int64_t begin = open_keys(a, segment, first).begin, end = open_keys(a, segment, first + count - 1).end;
  if (begin >= end) return {0, 0};
  return {begin / sizes.block_keys, (end + sizes.block_keys - 1) / sizes.block_keys};
}

// f32 holds a log-sum-exp of a fully masked row (mask values near -1e9 or the lowest number) so coarsely that the sum
// is lost in it, and with it the probabilities. Past this magnitude the two parts are computed again, apart.
inline constexpr float coarse_lse = 4096.0f;

void split_lse(const AttentionArguments& a, const AttentionRun& run, const AttentionSegment& segment, int64_t head, int64_t local,
               float& shift, float& log) {
  const LoneRow row(a, run, segment, head, local);
  const std::vector<float> logits = row.logits();
  const int64_t count = row.count();
  float highest = minus_infinity;
  for (int64_t j = 0; j < count; ++j) highest = std::max(highest, logits[static_cast<size_t>(j)]);
  if (!std::isfinite(highest)) return;
  double sum = a.has_sink ? std::exp(static_cast<double>(static_cast<const float*>(run.inputs[sdpa_sink])[head * a.sink_stride]) - highest) : 0.0;
  for (int64_t j = 0; j < count; ++j) sum += std::exp(static_cast<double>(logits[static_cast<size_t>(j)]) - highest);
  shift = highest;
  log = static_cast<float>(std::log2(sum));
}

void write_query_grad(const AttentionArguments& a, const AttentionRun& run, const AttentionSegment& segment, int64_t head,
                      int64_t first, int64_t count, const DropoutRules& dropout, const BackwardState& state, float* rows, int64_t row_floats) {
  for (int64_t r = 0; r < count; ++r) {
    float* row = rows + r * row_floats;
    for (int64_t c = 0; c < row_floats; c += lanes) store(row + c, load(row + c) * a.scale);
    if (!all_finite(row, a.head_dim)) {
      const int64_t at = (segment.batch * a.heads + head) * a.query_len + segment.query_begin + first + r;
      clean_query_grad_row(a, run, segment, head, first + r, dropout, state.row_shift[at], state.row_log[at], state.delta[at], row);
    }
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

// d(cap tanh(s / cap)) / ds = 1 - tanh^2. Closed scores have gradient 0 and a tanh that was never computed.
FULMEN_INLINE vfloat chain_softcap(vfloat grad, vfloat tanh_s) {
  return select((vint)(grad == 0.0f), vfloat{}, grad * (1.0f - tanh_s * tanh_s));
}

// sum of grad * |j - i - shift| over a row; `distance` is the diagonal's column.
double distance_sum(const float* grad, int64_t from, int64_t to, int64_t distance) {
  vfloat sum{};
  const vint index = lane_index();
  for (int64_t c = from; c < to; c += lanes) {
    const vint away = index + static_cast<int32_t>(c - distance);
    sum = fma(load(grad + c), abs(__builtin_convertvector(away, vfloat)), sum);
  }
  return reduce_add(sum);
}

// Where the scores and gradients of one query row lie; a pair of rows goes together in PairMode.
struct ScoreRow {
  float *score, *value_score;  // S; dO V^T, on return the gradient of the logits where `plain` is false or no pairs
  const float *tanh_score, *dropout;
  float shift, log, delta;     // p = 2^((s - shift) factor - log)
};

// p and the gradient of the score, of one vector. `plain` rows have neither dropout nor soft-cap, nor does anyone
// else want the gradient of the logits.
template <int degree, bool plain>
FULMEN_INLINE void score_gradient(const ScoreRow& row, int64_t c, vfloat factor, vfloat& p, vfloat& ds) {
  p = exp2_fast<degree>(fma(load(row.score + c) - splat(row.shift), factor, splat(-row.log)));
  vfloat grad = load(row.value_score + c);
  // Where p is 0, whatever the value of a closed key made of dO V^T.
  if constexpr (plain) {
    ds = select((vint)(p != 0.0f), p * (grad - splat(row.delta)), vfloat{});
  } else {
    const vfloat keep = row.dropout ? load(row.dropout + c) : splat(1.0f);
    ds = select((vint)(p != 0.0f), p * (grad * keep - splat(row.delta)), vfloat{});
    p = p * keep;
    store(row.value_score + c, ds);
    if (row.tanh_score) ds = chain_softcap(ds, load(row.tanh_score + c));
  }
}

// FloatMode: probabilities replace the scores, gradients of the logits replace dO V^T.
template <bool plain>
FULMEN_INLINE void float_score_gradients(const ScoreRow& row, int64_t from, int64_t to, float exponent_factor) {
  const vfloat factor = splat(exponent_factor);
  for (int64_t c = from; c < to; c += lanes) {
    vfloat p, ds;
    score_gradient<5, plain>(row, c, factor, p, ds);
    store(row.score + c, p);
    if constexpr (plain) store(row.value_score + c, ds);
  }
}

#if defined(__AVX512BF16__)
// PairMode: two rows at once, written as pairs along the rows (for the products that sum over queries) and, the score
// gradients, as rows (for the one that sums over keys).
template <bool plain>
FULMEN_INLINE void pair_score_gradients(const ScoreRow (&rows)[2], int64_t from, int64_t to, float exponent_factor,
                                        uint32_t* probability, uint32_t* score_grad, bf16* grad_rows, int64_t grad_row) {
  const vfloat factor = splat(exponent_factor);
  const ScoreRow even = rows[0], odd = rows[1];
  const __m512i interleave = (__m512i)((vuint)lane_index() * 0x10001u + 0x100000u);  // 0, 16, 1, 17, ...
  for (int64_t c = from; c < to; c += lanes) {
    vfloat p0, p1, ds0, ds1;
    score_gradient<4, plain>(even, c, factor, p0, ds0);
    score_gradient<4, plain>(odd, c, factor, p1, ds1);
    const __m512i p = (__m512i)_mm512_cvtne2ps_pbh((__m512)p1, (__m512)p0), ds = (__m512i)_mm512_cvtne2ps_pbh((__m512)ds1, (__m512)ds0);
    _mm512_storeu_si512(probability + c, _mm512_permutexvar_epi16(interleave, p));
    _mm512_storeu_si512(score_grad + c, _mm512_permutexvar_epi16(interleave, ds));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad_rows + c), _mm512_castsi512_si256(ds));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad_rows + grad_row + c), _mm512_extracti64x4_epi64(ds, 1));
  }
}
#endif

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
  constexpr int together = Mode::pairs ? 2 : 1;
  bool packed = false;
  if (a.key_grad.present) std::memset(scratch.key_grad, 0, static_cast<size_t>(sizes.head_dim * row) * 4);
  if (a.value_grad.present) std::memset(scratch.value_grad, 0, static_cast<size_t>(sizes.value_dim * row) * 4);

  const int64_t blocks = (segment.query_count + sizes.block_queries - 1) / sizes.block_queries;
  for (int64_t g = 0; g < a.group; ++g) {
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
      const int64_t to_padded = round_up(to, Mode::unit), columns = to_padded - from;
      const int64_t depth = Mode::pairs ? round_up(count, 32) : count;
      if (open) {
        if (!packed) {
          const Source key(run.inputs[sdpa_key], a.key, segment.batch, task.key_head, segment.key_begin + key_first);
          const Source value(run.inputs[sdpa_value], a.value, segment.batch, task.key_head, segment.key_begin + key_first);
          Mode::pack_right_transposed(key, live, a.head_dim, padded, sizes.head_dim, scratch.stage, scratch.key_columns, row);
          Mode::pack_right_transposed(value, live, a.value_dim, padded, sizes.value_dim, scratch.stage, scratch.value_columns, row);
          Mode::pack_right(key, live, a.head_dim, padded, sizes.head_dim, scratch.stage, scratch.key_rows, sizes.head_dim);
          packed = true;
        }
        if (a.mask.present)
          fetch_mask(mask_row(a, run.inputs[sdpa_mask], segment.batch, head, segment.query_begin + first, segment.key_begin + key_first),
                     a.mask.stride[2], count, from, to);
        Mode::pack_left(Source(run.inputs[sdpa_query], a.query, segment.batch, head, segment.query_begin + first), count, a.head_dim, depth,
                        sizes.head_dim, Mode::pairs ? 1.0f : a.scale, scratch.query, sizes.head_dim);
        Mode::pack_left(Source(run.inputs[sdpa_out_grad], a.out_grad, segment.batch, head, segment.query_begin + first), count, a.value_dim,
                        depth, sizes.value_dim, 1.0f, scratch.out_grad, sizes.value_dim);
        Mode::turn(scratch.query, sizes.head_dim, depth, sizes.head_dim, scratch.pairs, scratch.query_turned);
        Mode::turn(scratch.out_grad, sizes.value_dim, depth, sizes.value_dim, scratch.pairs, scratch.out_grad_turned);
        Mode::product(count, columns, sizes.head_dim, scratch.query, sizes.head_dim, scratch.key_columns + from, row, scratch.score + from, row, false);
        Mode::product(count, columns, sizes.value_dim, scratch.out_grad, sizes.value_dim, scratch.value_columns + from, row, scratch.value_score + from, row, false);

        for (int64_t r = 0; r < depth; r += together) {
          ScoreRow score_rows[together];
          for (int t = 0; t < together; ++t) {
            float* s = scratch.score + (r + t) * row;
            float* tanh_score = scratch.tanh_score ? scratch.tanh_score + (r + t) * row : nullptr;
            score_rows[t] = {s, scratch.value_score + (r + t) * row, tanh_score, nullptr, std::numeric_limits<float>::infinity(), 0.0f, 0.0f};
            const int64_t query = first + r + t;
            RowPlace place;
            place.begin = place.end = from;
            if (r + t < count) {
              const KeyRange keys = open_keys(a, segment, query);
              place.begin = std::clamp(keys.begin - key_first, from, to);
              place.end = std::clamp(keys.end - key_first, place.begin, to);
              place.live = live;
            }
            if (place.begin < place.end) {
              place.distance = query + segment.shift - key_first;
              if (slopes) place.slope = slopes[head * a.slopes_stride];
              if (a.mask.present)
                place.mask = mask_row(a, run.inputs[sdpa_mask], segment.batch, head, segment.query_begin + query, segment.key_begin + key_first);
              finish_scores(rules, place, s, tanh_score);
              const int64_t at = batch_head * a.query_len + segment.query_begin + query;
              score_rows[t].shift = state.row_shift[at] / rules.unit, score_rows[t].log = state.row_log[at], score_rows[t].delta = state.delta[at];
              if (dropout.active)
                score_rows[t].dropout = dropout_factors(dropout, attention_dropout_row(batch_head, segment.query_begin + query), segment.key_begin + key_first,
                                             padded, scratch.random + t * (sizes.block_keys + 256));
            }
            const int64_t vector_begin = place.begin < place.end ? round_down(place.begin, lanes) : to_padded;
            for (int64_t c = from; c < vector_begin; c += lanes) store(s + c, splat(minus_infinity));
            for (int64_t c = std::max(vector_begin, round_up(place.end, lanes)); c < to_padded; c += lanes) store(s + c, splat(minus_infinity));
            if (r + t >= count)
              for (int64_t c = from; c < to_padded; c += lanes) store(scratch.value_score + (r + t) * row + c, vfloat{});
          }
          if constexpr (Mode::pairs) {
#if defined(__AVX512BF16__)
            uint32_t* probability = scratch.probability + r / 2 * row;
            uint32_t* score_grad = scratch.score_grad + r / 2 * row;
            bf16* grad_rows = scratch.score_grad_rows + r * row;
            if (plain) pair_score_gradients<true>(score_rows, from, to_padded, rules.exponent_factor, probability, score_grad, grad_rows, row);
            else pair_score_gradients<false>(score_rows, from, to_padded, rules.exponent_factor, probability, score_grad, grad_rows, row);
#endif
          } else {
            if (plain) float_score_gradients<true>(score_rows[0], from, to_padded, rules.exponent_factor);
            else float_score_gradients<false>(score_rows[0], from, to_padded, rules.exponent_factor);
          }
        }
        if (a.wants_slopes_grad)
          for (int64_t r = 0; r < count; ++r)
            slope_sum -= distance_sum(scratch.value_score + r * row, from, to_padded, first + r + segment.shift - key_first);
      }
      if (state.mask.wanted())
        state.mask.add(segment, task.segment, head, first, count, key_first, written, open ? from : 0, open ? to : 0, task.block, i, scratch.value_score, row);
      if constexpr (!Mode::pairs)
        if (open && scratch.tanh_score)
          for (int64_t r = 0; r < count; ++r)
            for (int64_t c = from; c < to_padded; c += lanes)
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
      if (open && a.value_grad.present)
        Mode::transposed_product(sizes.value_dim, columns, count, scratch.out_grad, sizes.value_dim, scratch.out_grad_turned, probability + from, row,
                                 scratch.value_grad + from, row, true);
      if (open && a.key_grad.present)
        Mode::transposed_product(sizes.head_dim, columns, count, scratch.query, sizes.head_dim, scratch.query_turned, score_grad + from, row,
                                 scratch.key_grad + from, row, true);
      if (a.query_grad.present) {
        const int64_t index = (task.unit * a.group + g) * sizes.query_blocks + i;
        float* sum = state.query_grad + (task.unit % sizes.slots) * sizes.slot_floats + (g * sizes.query_blocks + i) * sizes.block_queries * sizes.head_dim;
        std::atomic<int64_t>& ticket = state.tickets[static_cast<size_t>(index)];
        const bool is_first = task.block == visited.begin;
        if (!is_first) wait_until(ticket, task.block);
        if (open)
          Mode::product(count, sizes.head_dim, Mode::pairs ? columns : to - from, score_grad_rows + from, row,
                        scratch.key_rows + Mode::right_rows(from) * sizes.head_dim, sizes.head_dim, sum, sizes.head_dim, !is_first);
        else if (is_first)
          std::memset(sum, 0, static_cast<size_t>(count * sizes.head_dim) * 4);
        if (task.block + 1 == visited.end) write_query_grad(a, run, segment, head, first, count, dropout, state, sum, sizes.head_dim);
        ticket.store(task.block + 1, std::memory_order_release);
      }
    }
    if (state.mask.wanted()) state.mask.finish_head(segment, task.segment, head, task.block);
    state.slope_parts[static_cast<size_t>(task_index * a.group + g)] = slope_sum;
  }
  if (a.key_grad.present)
    write_key_rows(a.key_grad, run.outputs[1], segment, task.key_head, key_first, written, a.head_dim, sizes.head_dim, scratch.key_grad, row,
                   Mode::pairs ? a.scale : 1.0f, scratch.rows);
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
  float *delta, *row_shift, *row_log, *query_grad, *mask;
  BackwardShared(Carver& carver, const AttentionArguments& a, const BackwardSizes& s) {
    delta = carver.take<float>(a.batch * a.heads * a.query_len);
    row_shift = carver.take<float>(a.batch * a.heads * a.query_len);
    row_log = carver.take<float>(a.batch * a.heads * a.query_len);
    query_grad = carver.take<float>(s.slots * s.slot_floats);
    mask = carver.take<float>(MaskGradient::scratch_floats(a, s.key_blocks));
  }
};

template <class Mode>
void backward(const AttentionArguments& a, const AttentionRun& run) {
  const BackwardSizes sizes = backward_sizes<Mode>(a);
  const ScoreRules rules = score_rules(a, !Mode::pairs);
  const DropoutRules dropout = dropout_rules(a, run.inputs[sdpa_seed]);
  Carver carver(run.workspace);
  const BackwardShared shared(carver, a, sizes);
  char* const threads_base = static_cast<char*>(run.workspace) + round_up(carver.used(), 64);

  BackwardState state;
  state.segments = attention_segments(a, run);
  state.delta = shared.delta;
  state.row_shift = shared.row_shift;
  state.row_log = shared.row_log;
  state.query_grad = shared.query_grad;
  for (size_t s = 0; s < state.segments.size(); ++s)
    for (int64_t h = 0; h < a.key_heads; ++h) {
      const int64_t blocks = (state.segments[s].key_total + sizes.block_keys - 1) / sizes.block_keys;
      if (blocks == 0) continue;
      for (int64_t b = 0; b < blocks; ++b)
        state.tasks.push_back({static_cast<int32_t>(s), static_cast<int32_t>(h), b, static_cast<int64_t>(state.unit_tasks.size())});
      state.unit_tasks.push_back(blocks);
    }
  const int64_t units = static_cast<int64_t>(state.unit_tasks.size()), task_count = static_cast<int64_t>(state.tasks.size());
  state.unit_done = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(units));
  state.tickets = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(units * a.group * sizes.query_blocks));
  state.slope_parts.assign(static_cast<size_t>(task_count * a.group), 0.0);
  state.mask.prepare(a, run.outputs[3], shared.mask, sizes.key_blocks, sizes.block_keys, sizes.query_blocks, sizes.block_queries);

  // delta, and zeros for query blocks that no task visits.
  std::vector<float> zeros(static_cast<size_t>(sizes.head_dim), 0.0f);
  for (const AttentionSegment& segment : state.segments)
    parallel_for(a.heads * segment.query_count, 64, [&](int64_t begin, int64_t end) {
      std::vector<float> out(static_cast<size_t>(sizes.value_dim)), grad(static_cast<size_t>(sizes.value_dim));
      for (int64_t at = begin; at < end; ++at) {
        const int64_t head = at / segment.query_count, local = at % segment.query_count, query = segment.query_begin + local;
        const Source out_row(run.inputs[sdpa_out], a.out, segment.batch, head, query), grad_row(run.inputs[sdpa_out_grad], a.out_grad, segment.batch, head, query);
        widen_row(out_row.data, out_row.dtype, out_row.col_stride, a.value_dim, sizes.value_dim, 1.0f, out.data());
        widen_row(grad_row.data, grad_row.dtype, grad_row.col_stride, a.value_dim, sizes.value_dim, 1.0f, grad.data());
        vfloat sum{};
        for (int64_t c = 0; c < sizes.value_dim; c += lanes) sum = fma(load(out.data() + c), load(grad.data() + c), sum);
        const int64_t row = (segment.batch * a.heads + head) * a.query_len + query;
        const float lse = static_cast<const float*>(run.inputs[sdpa_lse])[row];
        state.delta[row] = lse == minus_infinity ? 0.0f : reduce_add(sum);
        state.row_shift[row] = lse == minus_infinity ? std::numeric_limits<float>::infinity() : lse;
        state.row_log[row] = 0.0f;
        if (std::abs(lse) > coarse_lse && std::isfinite(lse)) split_lse(a, run, segment, head, local, state.row_shift[row], state.row_log[row]);
        if (a.query_grad.present) {
          const int64_t first = round_down(local, sizes.block_queries);
          const KeyRange visited = visited_blocks(a, sizes, segment, first, std::min(sizes.block_queries, segment.query_count - first));
          if (visited.begin >= visited.end)
            narrow_row(zeros.data(), a.head_dim, run.outputs[0], a.query_grad.dtype, a.query_grad.offset(segment.batch, head, query), a.query_grad.stride[3]);
        }
      }
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
    for (int64_t t = 0; t < task_count; ++t)
      for (int64_t g = 0; g < a.group; ++g)
        sums[static_cast<size_t>(state.tasks[static_cast<size_t>(t)].key_head * a.group + g)] += state.slope_parts[static_cast<size_t>(t * a.group + g)];
    for (int64_t h = 0; h < a.heads; ++h) static_cast<float*>(run.outputs[5])[h * a.slopes_grad_stride] = static_cast<float>(sums[static_cast<size_t>(h)]);
  }
  if (a.wants_sink_grad)
    for (int64_t h = 0; h < a.heads; ++h) {
      const float sink = static_cast<const float*>(run.inputs[sdpa_sink])[h * a.sink_stride];
      double sum = 0.0;
      for (int64_t b = 0; b < a.batch; ++b)
        for (int64_t i = 0; i < a.query_len; ++i) {
          const int64_t at = (b * a.heads + h) * a.query_len + i;
          const float lse = static_cast<const float*>(run.inputs[sdpa_lse])[at];
          if (lse != minus_infinity) sum -= static_cast<double>(std::exp(sink - lse)) * state.delta[at];
        }
      static_cast<float*>(run.outputs[4])[h * a.sink_grad_stride] = static_cast<float>(sum);
    }
}

}  // namespace

size_t attention_backward_workspace(const AttentionArguments& a) {
  Carver carver(nullptr);
  BackwardShared(carver, a, backward_sizes<TargetMode>(a));
  return static_cast<size_t>(round_up(carver.used(), 64) + backward_scratch_bytes<TargetMode>(a) * a.threads);
}

void attention_backward(const AttentionArguments& a, const AttentionRun& run) { backward<TargetMode>(a, run); }

}  // namespace fulmen::cpu::FULMEN_TARGET
