// What happens to a tile of scores between the products: scale, soft-cap, ALiBi, mask, closed keys, exponential,
// dropout. Rows are queries, columns keys. Compiled per target; used by forward.matrix.cpp, backward.matrix.cpp.
#pragma once

#include "core/philox.h"
#include "executors/cpu/attention/arguments.h"
#include "executors/cpu/vec.h"

namespace fulmen::cpu::FULMEN_TARGET {

inline constexpr float log2_e = 1.44269504f;
inline constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// 2^x for x <= 0 or not far above it; 2^-inf = 0 exactly, 2^0 = 1 exactly, NaN stays NaN. Minimax polynomials of 2^r
// on [0, 1): degree 5 is good to 1e-7, degree 4 (for results that are rounded to bf16) to 3e-6.
template <int degree>
FULMEN_INLINE vfloat exp2_fast(vfloat x) {
#if defined(__AVX512DQ__)
  const vfloat r = (vfloat)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const vfloat clamped = max(splat(-150.0f), x);  // NaN passes
  const vfloat n = floor(clamped);
  const vfloat r = clamped - n;
#endif
  vfloat p;
  if constexpr (degree == 5) {
    p = fma(splat(0x1.e974fep-10f), r, splat(0x1.27785400p-7f));
    p = fma(p, r, splat(0x1.c91ce6p-5f));
    p = fma(p, r, splat(0x1.ebdb56p-3f));
    p = fma(p, r, splat(0x1.62e4bap-1f));
  } else {
    p = fma(splat(0x1.b7f736p-7f), r, splat(0x1.abf866p-5f));
    p = fma(p, r, splat(0x1.ee2452p-3f));
    p = fma(p, r, splat(0x1.62d6c6p-1f));
  }
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512DQ__)
  return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return select((vint)(x < -126.0f), vfloat{}, p * power_of_two(max(n, splat(-126.0f))));
#endif
}

// How raw products become logits. When `raw`, the tile keeps q k^T unscaled and the scale goes into the exponent.
struct ScoreRules {
  bool raw = false;
  float factor = 1.0f;           // logits = products * factor, when not raw
  float exponent_factor = log2_e;  // p = 2^((s - m) * exponent_factor)
  float unit = 1.0f;             // logit = s * unit
  float softcap = 0.0f;
  bool float_mask = false, bool_mask = false;
};

inline ScoreRules score_rules(const AttentionArguments& a, bool scaled_already) {
  ScoreRules rules;
  rules.softcap = a.softcap;
  rules.bool_mask = a.mask.present && a.mask.dtype == DType::boolean;
  rules.float_mask = a.mask.present && !rules.bool_mask;
  rules.factor = scaled_already ? 1.0f : a.scale;
  rules.raw = rules.factor > 0 && rules.softcap == 0 && !rules.float_mask && !a.has_slopes;
  if (rules.raw) {
    rules.unit = rules.factor;
    rules.exponent_factor = rules.factor * log2_e;
  }
  return rules;
}

// A row of the mask from some key on.
struct MaskRow {
  const char* data = nullptr;
  DType dtype = DType::f32;
  int64_t stride = 0;
};

inline MaskRow mask_row(const AttentionArguments& a, const void* base, int64_t batch, int64_t head, int64_t query, int64_t key) {
  const int64_t at = a.mask.offset(batch, head, query) + key * a.mask.stride[3];
  return {static_cast<const char*>(base) + at * static_cast<int64_t>(dtype_bytes(a.mask.dtype)), a.mask.dtype, a.mask.stride[3]};
}

// `count` (1..lanes) mask elements from column c on; lanes past them are 0.
template <class T>
FULMEN_INLINE vfloat load_mask(const T* data, int64_t stride, int64_t c, int count) {
  if (stride == 1) return count == lanes ? load(data + c) : load_partial(data + c, count);
  if (stride == 0) return splat(static_cast<float>(*data));
  float buffer[lanes] = {};
  for (int i = 0; i < count; ++i) buffer[i] = static_cast<float>(data[(c + i) * stride]);
  return load(buffer);
}
FULMEN_INLINE vint load_mask_bool(const uint8_t* data, int64_t stride, int64_t c, int count) {
  if (stride == 1 && count == lanes) return load_bool(data + c);
  if (stride == 0) return splat_int(*data ? -1 : 0);
  uint8_t buffer[lanes] = {};
  for (int i = 0; i < count; ++i) buffer[i] = data[(c + i) * stride];
  return load_bool(buffer);
}

// Adds a row of the mask to the vectors of [begin, end), whole ones first.
template <class T>
FULMEN_INLINE void add_mask(float* s, const MaskRow& row, int64_t begin, int64_t end, int64_t live, float factor) {
  const T* data = reinterpret_cast<const T*>(row.data);
  const vfloat scale = splat(factor);
  int64_t c = begin;
  if (row.stride == 1) {
    for (; c + lanes <= std::min(end, live); c += lanes) store(s + c, fma(load(s + c), scale, load(data + c)));
  } else if (row.stride == 0) {
    const vfloat value = splat(static_cast<float>(*data));
    for (; c < end; c += lanes) store(s + c, fma(load(s + c), scale, value));
  }
  for (; c < std::min(end, live); c += lanes) {
    const int count = live - c < lanes ? static_cast<int>(live - c) : lanes;
    store(s + c, fma(load(s + c), scale, load_mask(data, row.stride, c, count)));
  }
}

// Starts to fetch a tile of the mask, some products before it is read: its rows lie too far apart for the hardware to
// follow.
inline void fetch_mask(const MaskRow& first, int64_t row_stride, int64_t rows, int64_t begin, int64_t end) {
  if (first.stride != 1) return;
  const int64_t width = static_cast<int64_t>(dtype_bytes(first.dtype));
  for (int64_t r = 0; r < (row_stride == 0 ? 1 : rows); ++r)
    for (int64_t at = begin * width; at < end * width; at += 64) __builtin_prefetch(first.data + r * row_stride * width + at, 0, 2);  // second level: the first is full of scores
}

// Is any of the columns [begin, end) open in the rows [0, rows) of a bool mask? Looks at each byte once at most.
inline bool any_open(const MaskRow& first, int64_t row_stride, int64_t rows, int64_t begin, int64_t end) {
  if (row_stride == 0) rows = 1;
  if (first.stride == 0) end = begin + 1;
  for (int64_t r = 0; r < rows; ++r) {
    const char* row = first.data + r * row_stride;
    if (first.stride == 1) {
      int64_t c = begin;
      for (; c + 64 <= end; c += 64) {
        uint64_t words[8];
        std::memcpy(words, row + c, 64);
        if (words[0] | words[1] | words[2] | words[3] | words[4] | words[5] | words[6] | words[7]) return true;
      }
      for (; c < end; ++c)
        if (row[c]) return true;
    } else {
      for (int64_t c = begin; c < end; ++c)
        if (row[c * first.stride]) return true;
    }
  }
  return false;
}

struct RowPlace {
  int64_t begin, end;    // open columns of this row; the rest of [aligned begin, aligned end) becomes -inf
  int64_t live;          // columns that exist in tensors
  int64_t distance;      // diagonal's column: column - distance is j - i - shift
  float slope = 0.0f;
  MaskRow mask;
};

// Logits (or raw products, see ScoreRules) of one row, closed columns -inf, over the vectors that hold open columns.
// With soft-cap, tanh(s / cap) is kept in `tanh_row` for the backward pass if that isn't null.
FULMEN_INLINE void finish_scores(const ScoreRules& rules, const RowPlace& place, float* s, float* tanh_row) {
  const int64_t begin = round_down(place.begin, lanes), end = round_up(place.end, lanes);
  if (!rules.raw) {
    float factor = rules.factor;
    if (rules.softcap > 0) {
      const float inverse = factor / rules.softcap;
      for (int64_t c = begin; c < end; c += lanes) {
        const vfloat t = tanh(load(s + c) * inverse);
        if (tanh_row) store(tanh_row + c, t);
        store(s + c, t * rules.softcap);
      }
      factor = 1.0f;
    }
    if (place.slope != 0.0f) {
      const vint index = lane_index();
      for (int64_t c = begin; c < end; c += lanes) {
        const vint away = index + static_cast<int32_t>(c - place.distance);
        const vfloat bias = abs(__builtin_convertvector(away, vfloat)) * -place.slope;
        store(s + c, fma(load(s + c), splat(factor), bias));
      }
      factor = 1.0f;
    }
    if (rules.float_mask) {
      if (place.mask.dtype == DType::f32) add_mask<float>(s, place.mask, begin, end, place.live, factor);
      else if (place.mask.dtype == DType::bf16) add_mask<bf16>(s, place.mask, begin, end, place.live, factor);
      else add_mask<f16>(s, place.mask, begin, end, place.live, factor);
      factor = 1.0f;
    }
    if (factor != 1.0f)
      for (int64_t c = begin; c < end; c += lanes) store(s + c, load(s + c) * factor);
  }
  if (rules.bool_mask) {
    const uint8_t* data = reinterpret_cast<const uint8_t*>(place.mask.data);
    int64_t c = begin;
    if (place.mask.stride == 1)
      for (; c + lanes <= std::min(end, place.live); c += lanes) store(s + c, select(load_bool(data + c), load(s + c), splat(minus_infinity)));
    for (; c < std::min(end, place.live); c += lanes) {
      const int count = place.live - c < lanes ? static_cast<int>(place.live - c) : lanes;
      store(s + c, select(load_mask_bool(data, place.mask.stride, c, count), load(s + c), splat(minus_infinity)));
    }
  }
  if (begin < place.begin)
    store(s + begin, select((vint)(lane_index() >= static_cast<int32_t>(place.begin - begin)), load(s + begin), splat(minus_infinity)));
  if (end > place.end)
    store(s + end - lanes, select((vint)(lane_index() < static_cast<int32_t>(place.end - end + lanes)), load(s + end - lanes), splat(minus_infinity)));
}

// One row through the online softmax. Scores of the vectors around [begin, end) are final; probabilities are written
// for all of [from, to), 0 where closed: to `p` in bf16 for the pairs, else in place. Returns the factor that the row's earlier sums must be multiplied with.
template <bool pairs, int degree>
FULMEN_INLINE float softmax_row(float* s, [[maybe_unused]] bf16* p, int64_t begin, int64_t end, int64_t from, int64_t to,
                                float exponent_factor, const float* dropout, float& row_max, float& row_sum) {
  const int64_t first = std::max(round_down(begin, lanes), from), last = std::min(round_up(end, lanes), to);
  const auto put = [&](int64_t c, vfloat value) {
    if constexpr (pairs) store(p + c, value);
    else store(s + c, value);
  };
  vfloat high[4] = {splat(row_max), splat(row_max), splat(row_max), splat(row_max)};
  int64_t c = first;
  for (; c + 4 * lanes <= last; c += 4 * lanes)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) high[i] = max(load(s + c + i * lanes), high[i]);
  for (; c < last; c += lanes) high[0] = max(load(s + c), high[0]);
  const float new_max = reduce_max(max(max(high[0], high[1]), max(high[2], high[3])));
  const float base = new_max == minus_infinity ? 0.0f : new_max;

  for (c = from; c < first; c += lanes) put(c, vfloat{});
  for (c = std::max(last, first); c < to; c += lanes) put(c, vfloat{});
  vfloat sum[2] = {};
  const vfloat shift = splat(base), factor = splat(exponent_factor);
  c = first;
  if (!dropout) {
    for (; c + 2 * lanes <= last; c += 2 * lanes) {
      const vfloat p0 = exp2_fast<degree>((load(s + c) - shift) * factor);
      const vfloat p1 = exp2_fast<degree>((load(s + c + lanes) - shift) * factor);
      sum[0] += p0;
      sum[1] += p1;
      put(c, p0);
      put(c + lanes, p1);
    }
    for (; c < last; c += lanes) {
      const vfloat p0 = exp2_fast<degree>((load(s + c) - shift) * factor);
      sum[0] += p0;
      put(c, p0);
    }
  } else {
    for (; c < last; c += lanes) {
      const vfloat p0 = exp2_fast<degree>((load(s + c) - shift) * factor);
      sum[0] += p0;
      put(c, p0 * load(dropout + c));
    }
  }
  const float change = row_max == new_max ? 1.0f : exp2_fast<5>(splat((row_max - base) * exponent_factor))[0];
  row_sum = row_sum * change + reduce_add(sum[0] + sum[1]);
  row_max = new_max;
  return change;
}

// High and low halves of 32 x 32 bit products.
FULMEN_INLINE void multiply_wide(vuint a, uint32_t b, vuint& high, vuint& low) {
#if defined(__AVX512F__)
  const __m512i factor = _mm512_set1_epi64(b);
  const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
  high = (vuint)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  low = (vuint)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
#elif defined(__AVX2__)
  const __m256i factor = _mm256_set1_epi64x(b);
  const __m256i even = _mm256_mul_epu32((__m256i)a, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)a, 32), factor);
  high = (vuint)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  low = (vuint)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
#else
  for (int i = 0; i < lanes; ++i) {
    const uint64_t product = uint64_t{a[i]} * b;
    high[i] = static_cast<uint32_t>(product >> 32);
    low[i] = static_cast<uint32_t>(product);
  }
#endif
}

struct DropoutRules {
  bool active = false;
  uint64_t key = 0, offset = 0;
  uint32_t threshold = 0;
  bool drop_all = false;
  float keep_factor = 1.0f;  // 1 / (1 - p)
};

// Factors (0 or 1 / (1 - p)) of elements [first, first + count) of a row. `room` holds count + 128 + lanes numbers;
// the answer points into it. The mapping is core/philox.h's.
inline const float* dropout_factors(const DropoutRules& rules, uint64_t row, int64_t first, int64_t count, float* room) {
  const int64_t begin = round_down(first, 64);
  if (rules.drop_all) {
    std::memset(room, 0, static_cast<size_t>(first + count - begin) * 4);
    return room + (first - begin);
  }
  const vuint zero{};
  vuint lane64;
  for (int i = 0; i < lanes; ++i) lane64[i] = static_cast<uint32_t>(i);
  for (int64_t n = begin; n < first + count; n += 64)
    for (int half = 0; half < 16; half += lanes) {
      const uint64_t base = rules.offset + 16 * static_cast<uint64_t>(n / 64) + static_cast<uint64_t>(half);
      vuint c0 = lane64 + static_cast<uint32_t>(base);
      vuint c1 = zero + static_cast<uint32_t>(base >> 32);
      c1 -= (vuint)(c0 < static_cast<uint32_t>(base));  // carry
      vuint c2 = zero + static_cast<uint32_t>(row), c3 = zero + static_cast<uint32_t>(row >> 32);
      uint32_t k0 = static_cast<uint32_t>(rules.key), k1 = static_cast<uint32_t>(rules.key >> 32);
      for (int round = 0; round < philox_rounds; ++round) {
        vuint high0, low0, high1, low1;
        multiply_wide(c0, philox_multiplier[0], high0, low0);
        multiply_wide(c2, philox_multiplier[1], high1, low1);
        c0 = high1 ^ c1 ^ k0;
        c2 = high0 ^ c3 ^ k1;
        c1 = low1;
        c3 = low0;
        k0 += philox_weyl[0];
        k1 += philox_weyl[1];
      }
      const vuint words[4] = {c0, c1, c2, c3};
      for (int w = 0; w < 4; ++w)
        store(room + (n - begin) + 16 * w + half,
              select((vint)(words[w] >= rules.threshold), splat(rules.keep_factor), vfloat{}));
    }
  return room + (first - begin);
}

inline DropoutRules dropout_rules(const AttentionArguments& a, const void* seed) {
  DropoutRules rules;
  if (a.dropout_p <= 0) return rules;
  rules.active = true;
  const auto* words = static_cast<const int64_t*>(seed);
  rules.key = words ? static_cast<uint64_t>(words[0]) : 0;
  rules.offset = words ? static_cast<uint64_t>(words[a.seed_stride]) : 0;
  const uint64_t threshold = dropout_threshold(a.dropout_p);
  rules.drop_all = threshold > 0xffffffffu;
  rules.threshold = static_cast<uint32_t>(threshold);
  rules.keep_factor = rules.drop_all ? 0.0f : static_cast<float>(1.0 / (1.0 - a.dropout_p));
  return rules;
}

}  // namespace fulmen::cpu::FULMEN_TARGET
