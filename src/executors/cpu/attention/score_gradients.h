// The backward pass of a row of scores: probabilities again from the log-sum-exp, and the gradient of the scores.
// Compiled per target; used by backward.matrix.cpp, which has the formulas.
#pragma once

#include "executors/cpu/attention/scores.h"

namespace fulmen::cpu::FULMEN_TARGET {

// d(cap tanh(s / cap)) / ds = 1 - tanh^2. Closed scores have gradient 0 and a tanh that was never computed.
FULMEN_INLINE vfloat chain_softcap(vfloat grad, vfloat tanh_s) {
  return select((vint)(grad == 0.0f), vfloat{}, grad * (1.0f - tanh_s * tanh_s));
}

// sum of grad * |j - i - shift| over a row; `distance` is the diagonal's column.
inline double distance_sum(const float* grad, int64_t from, int64_t to, int64_t distance) {
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

// delta of a row whose open keys are all in [from, to): the sum of p dP. The sum of dO O, which is the same, has O's
// rounding in it, which in half precision is all that is left of the gradient where one key takes a row's whole weight.
template <int degree>
FULMEN_INLINE float whole_row_delta(const ScoreRow& row, int64_t from, int64_t to, float exponent_factor) {
  vfloat sum{};
  for (int64_t c = from; c < to; c += lanes) {
    const vfloat p = exp2_fast<degree>(fma(load(row.score + c) - splat(row.shift), splat(exponent_factor), splat(-row.log)));
    const vfloat keep = row.dropout ? load(row.dropout + c) : splat(1.0f);
    sum += select((vint)(p != 0.0f), p * (load(row.value_score + c) * keep), vfloat{});
  }
  return reduce_add(sum);
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

}  // namespace fulmen::cpu::FULMEN_TARGET
