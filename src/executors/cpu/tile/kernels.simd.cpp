// f32 tile instructions, compiled once an instruction set. The pointwise ones come from the shared bodies.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "core/philox.h"
#include "executors/cpu/tile/kernels.h"
#include "executors/cpu/vec_math.h"

namespace fulmen::cpu::FULMEN_TARGET {
namespace {

using tile::Block;
using tile::Fold;
using tile::Work;

// --- pointwise ---

template <class Body, int count, size_t... i>
FULMEN_INLINE Lanes apply_body(const Lanes (&x)[count], std::index_sequence<i...>) {
  return Body::apply(x[i]...);
}

// Operand i is spread along the row if bit i of `form` is set; arguments past `operands` (attributes) always are.
template <class Body, int count, int form>
__attribute__((flatten)) void pointwise(const Work& work) {
  float* dst = static_cast<float*>(work.dst);
  const float* src[count];
  for (int i = 0; i < count; ++i) src[i] = static_cast<const float*>(work.src[i]);
  const int64_t cols = work.cols;
  for (int64_t row = 0; row < work.rows; ++row, dst += cols) {
    Lanes x[count];
    for (int i = 0; i < count; ++i)
      if (form >> i & 1) x[i] = Lanes(splat(*src[i]));
    int64_t c = 0;
    for (; c + lanes <= cols; c += lanes) {
      for (int i = 0; i < count; ++i)
        if (!(form >> i & 1)) x[i].v = load(src[i] + c);
      store(dst + c, apply_body<Body>(x, std::make_index_sequence<count>{}).v);
    }
    if (c < cols) {
      const int rest = static_cast<int>(cols - c);
      for (int i = 0; i < count; ++i)
        if (!(form >> i & 1)) x[i].v = load_partial(src[i] + c, rest, 1.0f);
      store_partial(dst + c, apply_body<Body>(x, std::make_index_sequence<count>{}).v, rest);
    }
    for (int i = 0; i < count; ++i) src[i] += form >> i & 1 ? work.step[i] : cols;
  }
}

// A tile over one value a row: by its reciprocal where that is a plain number, within 1.5 units in the last place.
__attribute__((flatten)) void divide_by_spread(const Work& work) {
  float* dst = static_cast<float*>(work.dst);
  const float* src = static_cast<const float*>(work.src[0]);
  const float* divisor = static_cast<const float*>(work.src[1]);
  for (int64_t row = 0; row < work.rows; ++row, dst += work.cols, src += work.cols, divisor += work.step[1]) {
    const float size = *divisor < 0.0f ? -*divisor : *divisor;
    Work line;
    line.dst = dst;
    line.src[0] = src;
    line.src[1] = divisor;
    line.cols = work.cols;
    if (size > 1e-30f && size < 1e30f) {
      const float reciprocal = 1.0f / *divisor;
      line.src[1] = &reciprocal;
      pointwise<pointwise::Mul, 2, 2>(line);
    } else {
      pointwise<pointwise::Div, 2, 2>(line);
    }
  }
}

template <class Body>
constexpr int argument_count() {
  if constexpr (requires(Lanes x) { Body::apply(x); }) return 1;
  else if constexpr (requires(Lanes x) { Body::apply(x, x); }) return 2;
  else if constexpr (requires(Lanes x) { Body::apply(x, x, x); }) return 3;
  else return 4;
}

template <class Body, int operands>
void fill_forms(tile::Kernel (&forms)[8]) {
  constexpr int count = argument_count<Body>();
  constexpr int spread_rest = ((1 << count) - 1) & ~((1 << operands) - 1);
  forms[0] = pointwise<Body, count, 0 | spread_rest>;
  if constexpr (operands >= 2) {
    forms[1] = pointwise<Body, count, 1 | spread_rest>;
    forms[2] = pointwise<Body, count, 2 | spread_rest>;
  }
  if constexpr (operands >= 3) {
    forms[3] = pointwise<Body, count, 3 | spread_rest>;
    forms[4] = pointwise<Body, count, 4 | spread_rest>;
    forms[5] = pointwise<Body, count, 5 | spread_rest>;
    forms[6] = pointwise<Body, count, 6 | spread_rest>;
  }
}

// --- reductions ---

template <Fold fold>
FULMEN_INLINE vfloat combine(vfloat a, vfloat b) {
  if constexpr (fold == Fold::sum) return a + b;
  else if constexpr (fold == Fold::max) return maximum_nan(a, b);
  else return minimum_nan(a, b);
}
template <Fold fold>
FULMEN_INLINE float combine_scalar(float a, float b) {
  if constexpr (fold == Fold::sum) return a + b;
  else if constexpr (fold == Fold::max) return a != a ? a : b != b ? b : a > b ? a : b;
  else return a != a ? a : b != b ? b : a < b ? a : b;
}
template <Fold fold>
constexpr float neutral() {
  if constexpr (fold == Fold::sum) return 0.0f;
  else if constexpr (fold == Fold::max) return -std::numeric_limits<float>::infinity();
  else return std::numeric_limits<float>::infinity();
}
template <Fold fold>
FULMEN_INLINE float across_lanes(vfloat v) {
  if constexpr (fold == Fold::sum) return reduce_add(v);
  float result = v[0];
  for (int i = 1; i < lanes; ++i) result = combine_scalar<fold>(result, v[i]);
  return result;
}

// Four accumulators: enough to hide the latency, and partial sums stay short.
template <Fold fold, class Load>
FULMEN_INLINE float reduce_row(int64_t cols, Load&& at) {
  vfloat sums[4];
  for (vfloat& sum : sums) sum = splat(neutral<fold>());
  int64_t c = 0;
  for (; c + 4 * lanes <= cols; c += 4 * lanes)
    for (int i = 0; i < 4; ++i) sums[i] = combine<fold>(sums[i], at(c + i * lanes, lanes));
  for (int i = 0; c < cols; c += lanes, ++i) {
    const int64_t rest = cols - c;
    sums[i] = combine<fold>(sums[i], at(c, static_cast<int>(rest < lanes ? rest : lanes)));
  }
  return across_lanes<fold>(combine<fold>(combine<fold>(sums[0], sums[1]), combine<fold>(sums[2], sums[3])));
}

template <Fold fold>
void reduce_rows(const Work& work) {
  float* dst = static_cast<float*>(work.dst);
  const float* src = static_cast<const float*>(work.src[0]);
  for (int64_t row = 0; row < work.rows; ++row, src += work.cols) {
    const float value = reduce_row<fold>(work.cols, [&](int64_t c, int count) {
      return count == lanes ? load(src + c) : load_partial(src + c, count, neutral<fold>());
    });
    dst[row] = work.first ? value : combine_scalar<fold>(dst[row], value);
  }
}

void multiply_reduce_rows(const Work& work) {
  float* dst = static_cast<float*>(work.dst);
  const float *a = static_cast<const float*>(work.src[0]), *b = static_cast<const float*>(work.src[1]);
  for (int64_t row = 0; row < work.rows; ++row, a += work.cols, b += work.cols) {
    const float value = reduce_row<Fold::sum>(work.cols, [&](int64_t c, int count) {
      return count == lanes ? load(a + c) * load(b + c) : load_partial(a + c, count) * load_partial(b + c, count);
    });
    dst[row] = work.first ? value : dst[row] + value;
  }
}

template <Fold fold>
void reduce_columns(const Work& work) {
  float* dst = static_cast<float*>(work.dst);
  const float* src = static_cast<const float*>(work.src[0]);
  const int64_t cols = work.cols, rows = work.rows;
  if (cols == 1) {  // one value a row, or a full reduction
    const float value = reduce_row<fold>(rows, [&](int64_t c, int count) {
      return count == lanes ? load(src + c) : load_partial(src + c, count, neutral<fold>());
    });
    *dst = combine_scalar<fold>(*dst, value);
    return;
  }
  int64_t c = 0;
  for (; c + 2 * lanes <= cols; c += 2 * lanes) {
    vfloat low = load(src + c), high = load(src + c + lanes);
    for (int64_t row = 1; row < rows; ++row) {
      low = combine<fold>(low, load(src + row * cols + c));
      high = combine<fold>(high, load(src + row * cols + c + lanes));
    }
    store(dst + c, combine<fold>(load(dst + c), low));
    store(dst + c + lanes, combine<fold>(load(dst + c + lanes), high));
  }
  for (; c < cols; c += lanes) {
    const int rest = static_cast<int>(cols - c < lanes ? cols - c : lanes);
    vfloat sum = load_partial(src + c, rest);
    for (int64_t row = 1; row < rows; ++row) sum = combine<fold>(sum, load_partial(src + row * cols + c, rest));
    store_partial(dst + c, combine<fold>(load_partial(dst + c, rest), sum), rest);
  }
}

void multiply_reduce_columns(const Work& work) {
  float* dst = static_cast<float*>(work.dst);
  const float *a = static_cast<const float*>(work.src[0]), *b = static_cast<const float*>(work.src[1]);
  const int64_t cols = work.cols, rows = work.rows;
  for (int64_t c = 0; c < cols; c += lanes) {
    const int rest = static_cast<int>(cols - c < lanes ? cols - c : lanes);
    vfloat sum = {};
    if (rest == lanes)
      for (int64_t row = 0; row < rows; ++row) sum = fma(load(a + row * cols + c), load(b + row * cols + c), sum);
    else
      for (int64_t row = 0; row < rows; ++row) sum = fma(load_partial(a + row * cols + c, rest), load_partial(b + row * cols + c, rest), sum);
    store_partial(dst + c, load_partial(dst + c, rest) + sum, rest);
  }
}

// --- moving ---

void repeat(const Work& work) {
  for (int64_t row = 0; row < work.rows; ++row)
    std::memcpy(static_cast<float*>(work.dst) + row * work.cols, work.src[0], static_cast<size_t>(work.cols) * sizeof(float));
}

void spread(const Work& work) {
  float* dst = static_cast<float*>(work.dst);
  const float* src = static_cast<const float*>(work.src[0]);
  for (int64_t row = 0; row < work.rows; ++row) {
    const float value = src[row * work.step[0]];
    for (int64_t c = 0; c < work.cols; ++c) *dst++ = value;
  }
}

template <class Half>
void round_to(const Work& work) {
  float* dst = static_cast<float*>(work.dst);
  const float* src = static_cast<const float*>(work.src[0]);
  const int64_t count = work.rows * work.cols;
  Half buffer[lanes];
  for (int64_t i = 0; i < count; i += lanes) {
    const int rest = static_cast<int>(count - i < lanes ? count - i : lanes);
    store(buffer, load_partial(src + i, rest));
    store_partial(dst + i, load(buffer), rest);
  }
}

// bool in memory: any byte but 0 is true.
struct Truth {
  uint8_t byte;
};

FULMEN_INLINE float widen(float x) { return x; }
FULMEN_INLINE float widen(bf16 x) { return static_cast<float>(x); }
FULMEN_INLINE float widen(f16 x) { return static_cast<float>(x); }
FULMEN_INLINE float widen(double x) { return static_cast<float>(x); }
template <class Int>
FULMEN_INLINE float widen(Int x) { return static_cast<float>(x); }
FULMEN_INLINE float widen(Truth x) { return x.byte ? 1.0f : 0.0f; }

template <class T>
FULMEN_INLINE void load_row(float* dst, const T* src, int64_t cols) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(dst, src, static_cast<size_t>(cols) * sizeof(float));
  } else if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
    int64_t c = 0;
    for (; c + lanes <= cols; c += lanes) store(dst + c, load(src + c));
    if (c < cols) store_partial(dst + c, load_partial(src + c, static_cast<int>(cols - c)), static_cast<int>(cols - c));
  } else if constexpr (std::is_same_v<T, Truth>) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(src);
    for (int64_t c = 0; c < cols; ++c) dst[c] = bytes[c] != 0 ? 1.0f : 0.0f;
  } else {
    for (int64_t c = 0; c < cols; ++c) dst[c] = static_cast<float>(src[c]);
  }
}

// Transposes lanes x lanes elements in registers: stage by stage, halves of pairs of vectors change places.
template <int half>
FULMEN_INLINE void transpose_stage(vfloat (&v)[lanes]) {
  vint low, high;
  for (int i = 0; i < lanes; ++i) {
    const bool upper = i & half;
    low[i] = upper ? lanes + i - half : i;
    high[i] = upper ? lanes + i : i + half;
  }
  for (int i = 0; i < lanes; ++i)
    if (!(i & half)) {
      const vfloat a = v[i], b = v[i + half];
      v[i] = __builtin_shuffle(a, b, low);
      v[i + half] = __builtin_shuffle(a, b, high);
    }
}
FULMEN_INLINE void transpose_square(vfloat (&v)[lanes]) {
  if constexpr (lanes >= 16) transpose_stage<8>(v);
  if constexpr (lanes >= 8) transpose_stage<4>(v);
  transpose_stage<2>(v);
  transpose_stage<1>(v);
}

// Rows are neighbours in memory and columns lie `stride` apart: squares of lanes x lanes; the rest one by one.
template <class T>
FULMEN_INLINE void load_transposed(float* dst, const T* base, int64_t rows, int64_t cols, int64_t stride) {
  int64_t row = 0;
  for (; row + lanes <= rows; row += lanes) {
    int64_t c = 0;
    for (; c + lanes <= cols; c += lanes) {
      vfloat v[lanes];
      for (int i = 0; i < lanes; ++i) v[i] = load(base + row + (c + i) * stride);
      transpose_square(v);
      for (int i = 0; i < lanes; ++i) store(dst + (row + i) * cols + c, v[i]);
    }
    for (; c < cols; ++c)
      for (int64_t i = 0; i < lanes; ++i) dst[(row + i) * cols + c] = widen(base[row + i + c * stride]);
  }
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t i = row; i < rows; ++i) dst[i * cols + c] = widen(base[i + c * stride]);
}

template <class T>
void load_block(void* to, const Block& block) {
  float* dst = static_cast<float*>(to);
  const T* base = static_cast<const T*>(block.base);
  const int64_t cols = block.cols, stride = block.col_stride;
  if (!block.col_offsets && stride == 1) {
    for (int64_t row = 0; row < block.rows; ++row, dst += cols) load_row(dst, base + block.row_offsets[row], cols);
    return;
  }
  if (!block.col_offsets && block.rows >= 8 && stride > 1) {
    // Neighbours in memory are likely the rows of one column (a transposed operand).
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
      bool are_neighbours = true;
      for (int64_t row = 1; row < block.rows; ++row) are_neighbours &= block.row_offsets[row] == block.row_offsets[0] + row;
      if (are_neighbours) return load_transposed(dst, base + block.row_offsets[0], block.rows, cols, stride);
    }
    for (int64_t c = 0; c < cols; ++c)
      for (int64_t row = 0; row < block.rows; ++row) dst[row * cols + c] = widen(base[block.row_offsets[row] + c * stride]);
    return;
  }
  for (int64_t row = 0; row < block.rows; ++row, dst += cols) {
    const T* src = base + block.row_offsets[row];
    if (block.col_offsets)
      for (int64_t c = 0; c < cols; ++c) dst[c] = widen(src[block.col_offsets[c]]);
    else
      for (int64_t c = 0; c < cols; ++c) dst[c] = widen(src[c * stride]);
  }
}

template <class T>
FULMEN_INLINE void store_row(const float* src, T* dst, int64_t cols) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(dst, src, static_cast<size_t>(cols) * sizeof(float));
  } else if constexpr (std::is_same_v<T, Truth>) {
    uint8_t* bytes = reinterpret_cast<uint8_t*>(dst);
    for (int64_t c = 0; c < cols; ++c) bytes[c] = src[c] != 0.0f;
  } else {
    int64_t c = 0;
    for (; c + lanes <= cols; c += lanes) store(dst + c, load(src + c));
    if (c < cols) store_partial(dst + c, load_partial(src + c, static_cast<int>(cols - c)), static_cast<int>(cols - c));
  }
}

template <class T>
FULMEN_INLINE T narrow(float x) {
  if constexpr (std::is_same_v<T, Truth>) return Truth{static_cast<uint8_t>(x != 0.0f)}; else return T(x);
}

template <class T>
void store_block(const void* from, const Block& block) {
  const float* src = static_cast<const float*>(from);
  T* base = static_cast<T*>(const_cast<void*>(block.base));
  const int64_t cols = block.cols, stride = block.col_stride;
  for (int64_t row = 0; row < block.rows; ++row, src += cols) {
    T* dst = base + block.row_offsets[row];
    if (block.col_offsets)
      for (int64_t c = 0; c < cols; ++c) dst[block.col_offsets[c]] = narrow<T>(src[c]);
    else if (stride == 1)
      store_row(src, dst, cols);
    else
      for (int64_t c = 0; c < cols; ++c) dst[c * stride] = narrow<T>(src[c]);
  }
}

// --- drawing ---

FULMEN_INLINE void multiply_wide(vuint a, uint32_t factor, vuint& high, vuint& low) {
#if defined(__AVX512F__)
  const __m512i m = _mm512_set1_epi64(factor), v = (__m512i)a;
  const __m512i even = _mm512_mul_epu32(v, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), m);
  low = (vuint)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high = (vuint)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
  const __m256i m = _mm256_set1_epi64x(factor), v = (__m256i)a;
  const __m256i even = _mm256_mul_epu32(v, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), m);
  low = (vuint)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = (vuint)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
  for (int i = 0; i < lanes; ++i) {
    const uint64_t product = uint64_t{a[i]} * factor;
    low[i] = static_cast<uint32_t>(product);
    high[i] = static_cast<uint32_t>(product >> 32);
  }
#endif
}

// The 64 elements of a group of 16 counters, as core/philox.h maps them.
FULMEN_INLINE void draw_group(const Block& block, uint64_t group, float* out) {
  for (int part = 0; part < 16; part += lanes) {
    const uint64_t first = block.counter_offset + 16 * group + static_cast<uint64_t>(part);
    const vuint start = vuint{} + static_cast<uint32_t>(first);
    vuint c0 = start + (vuint)lane_index(), c1 = vuint{} + static_cast<uint32_t>(first >> 32);
    c1 -= (vuint)(c0 < start);  // carry
    vuint c2{}, c3{};
    uint32_t k0 = static_cast<uint32_t>(block.key), k1 = static_cast<uint32_t>(block.key >> 32);
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
    const vuint threshold = vuint{} + static_cast<uint32_t>(block.threshold);
    for (int w = 0; w < 4; ++w) store(out + 16 * w + part, select((vint)(words[w] >= threshold), splat(1.0f), vfloat{}));
  }
}

void draw_mask(void* to, const Block& block) {
  float* dst = static_cast<float*>(to);
  if (block.threshold >> 32) {  // probability 1
    std::memset(dst, 0, static_cast<size_t>(block.rows * block.cols) * sizeof(float));
    return;
  }
  for (int64_t row = 0; row < block.rows; ++row, dst += block.cols) {
    const int64_t first = block.first + block.row_offsets[row];
    if (block.col_offsets || block.col_stride != 1) {
      for (int64_t c = 0; c < block.cols; ++c) {
        const int64_t n = first + (block.col_offsets ? block.col_offsets[c] : c * block.col_stride);
        dst[c] = philox_word(block.key, block.counter_offset, 0, static_cast<uint64_t>(n)) >= block.threshold ? 1.0f : 0.0f;
      }
      continue;
    }
    alignas(64) float group[64];
    for (int64_t c = 0; c < block.cols;) {
      const int64_t n = first + c, within = n % 64;
      const int64_t count = std::min<int64_t>(64 - within, block.cols - c);
      if (count == 64) {
        draw_group(block, static_cast<uint64_t>(n / 64), dst + c);
      } else {
        draw_group(block, static_cast<uint64_t>(n / 64), group);
        std::memcpy(dst + c, group + within, static_cast<size_t>(count) * sizeof(float));
      }
      c += count;
    }
  }
}

tile::KernelTable make_table() {
  tile::KernelTable table;
  int op = 0;
#define FULMEN_FILL(name, Body, operands, kind, attributes) fill_forms<pointwise::Body, operands>(table.pointwise[op++]);
  FULMEN_POINTWISE_OPS(FULMEN_FILL)
#undef FULMEN_FILL
  table.pointwise[static_cast<int>(tile::Op::div)][2] = divide_by_spread;
  table.reduce_rows[0] = reduce_rows<Fold::sum>;
  table.reduce_rows[1] = reduce_rows<Fold::max>;
  table.reduce_rows[2] = reduce_rows<Fold::min>;
  table.reduce_columns[0] = reduce_columns<Fold::sum>;
  table.reduce_columns[1] = reduce_columns<Fold::max>;
  table.reduce_columns[2] = reduce_columns<Fold::min>;
  table.multiply_reduce_rows = multiply_reduce_rows;
  table.multiply_reduce_columns = multiply_reduce_columns;
  table.repeat = repeat;
  table.spread = spread;
  table.draw_mask = draw_mask;
  table.round_bf16 = round_to<bf16>;
  table.round_f16 = round_to<f16>;
  auto set_load = [&](DType dtype, tile::LoadKernel kernel) { table.load[static_cast<int>(dtype)] = kernel; };
  set_load(DType::boolean, load_block<Truth>);
  set_load(DType::u8, load_block<uint8_t>);
  set_load(DType::i8, load_block<int8_t>);
  set_load(DType::i16, load_block<int16_t>);
  set_load(DType::i32, load_block<int32_t>);
  set_load(DType::i64, load_block<int64_t>);
  set_load(DType::f16, load_block<f16>);
  set_load(DType::bf16, load_block<bf16>);
  set_load(DType::f32, load_block<float>);
  set_load(DType::f64, load_block<double>);
  table.store[static_cast<int>(DType::boolean)] = store_block<Truth>;
  table.store[static_cast<int>(DType::f16)] = store_block<f16>;
  table.store[static_cast<int>(DType::bf16)] = store_block<bf16>;
  table.store[static_cast<int>(DType::f32)] = store_block<float>;
  return table;
}

}  // namespace

const tile::KernelTable& tile_table() {
  static const tile::KernelTable table = make_table();
  return table;
}

}  // namespace fulmen::cpu::FULMEN_TARGET
