// SIMD in one source for every instruction set, over the compiler's vector extensions. Files that use it are compiled
// once a target (see targets.cmake); FULMEN_TARGET is the namespace of that compilation (generic, avx2, avx512,
// avx512_bf16, amx), so the copies never mix. Nothing here may be used from a file compiled without FULMEN_TARGET.
// Accuracy of the functions, against the correctly rounded result: exp 2 ulp, log 2 ulp, tanh 4 ulp, erf 4 ulp.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/half.h"

#ifndef FULMEN_TARGET
#error "vec.h: compile this file through fulmen_cpu_kernels (targets.cmake), which sets FULMEN_TARGET"
#endif

namespace fulmen::cpu::FULMEN_TARGET {

#if defined(__AVX512F__)
inline constexpr int vector_bytes = 64;
#elif defined(__AVX2__)
inline constexpr int vector_bytes = 32;
#else
inline constexpr int vector_bytes = 16;
#endif

inline constexpr int lanes = vector_bytes / 4;  // of float and int32

typedef float vfloat __attribute__((vector_size(vector_bytes)));
typedef int32_t vint __attribute__((vector_size(vector_bytes)));
typedef uint32_t vuint __attribute__((vector_size(vector_bytes)));
typedef uint16_t vhalf __attribute__((vector_size(vector_bytes / 2)));
typedef uint8_t vbyte __attribute__((vector_size(vector_bytes / 4)));

#define FULMEN_INLINE inline __attribute__((always_inline))

FULMEN_INLINE vfloat splat(float x) { return x - vfloat{}; }
FULMEN_INLINE vint splat_int(int32_t x) { return x - vint{}; }

FULMEN_INLINE vfloat load(const float* p) {
  vfloat v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
FULMEN_INLINE void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof(v)); }

// Lane i is live if i < count (0..lanes).
FULMEN_INLINE vint lane_index() {
  vint index;
  for (int i = 0; i < lanes; ++i) index[i] = i;
  return index;
}

FULMEN_INLINE vfloat load_partial(const float* p, int count, float fill = 0.0f) {
#if defined(__AVX512F__)
  const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1u);
  return (vfloat)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), mask, p);
#else
  float buffer[lanes];
  for (int i = 0; i < lanes; ++i) buffer[i] = fill;
  std::memcpy(buffer, p, static_cast<size_t>(count) * sizeof(float));
  return load(buffer);
#endif
}
FULMEN_INLINE void store_partial(float* p, vfloat v, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1u), (__m512)v);
#else
  std::memcpy(p, &v, static_cast<size_t>(count) * sizeof(float));
#endif
}

// bf16 and f16: widened on load, rounded to nearest even on store.
FULMEN_INLINE vfloat widen_bf16(vhalf h) {
#if defined(__AVX512F__)  // GCC 12 splits the plain conversion in two
  return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(__AVX2__)
  return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return std::bit_cast<vfloat>(__builtin_convertvector(h, vuint) << 16);
#endif
}
FULMEN_INLINE vhalf narrow_bf16(vfloat v) {
#if defined(__AVX512BF16__)
  return std::bit_cast<vhalf>(_mm512_cvtneps_pbh((__m512)v));
#else
  const vuint u = std::bit_cast<vuint>(v);
  const vuint rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const vuint quiet = (u >> 16) | 0x40u;
  const vint nan = (vint)((u & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector((rounded & ~(vuint)nan) | (quiet & (vuint)nan), vhalf);
#endif
}
FULMEN_INLINE vfloat load(const bf16* p) {
  vhalf h;
  std::memcpy(&h, p, sizeof(h));
  return widen_bf16(h);
}
FULMEN_INLINE void store(bf16* p, vfloat v) {
  const vhalf h = narrow_bf16(v);
  std::memcpy(p, &h, sizeof(h));
}

FULMEN_INLINE vfloat load(const f16* p) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vfloat v;
  for (int i = 0; i < lanes; ++i) v[i] = static_cast<float>(p[i]);
  return v;
#endif
}
FULMEN_INLINE void store(f16* p, vfloat v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < lanes; ++i) p[i] = f16(v[i]);
#endif
}

template <class Half>
FULMEN_INLINE vfloat load_partial(const Half* p, int count, float fill = 0.0f) {
  Half buffer[lanes];
  for (int i = 0; i < lanes; ++i) buffer[i] = Half(fill);
  std::memcpy(buffer, p, static_cast<size_t>(count) * sizeof(Half));
  return load(buffer);
}
template <class Half>
FULMEN_INLINE void store_partial(Half* p, vfloat v, int count) {
  Half buffer[lanes];
  store(buffer, v);
  std::memcpy(p, buffer, static_cast<size_t>(count) * sizeof(Half));
}

// Nonzero bytes give all-ones lanes.
FULMEN_INLINE vint load_bool(const uint8_t* p) {
  vbyte b;
  std::memcpy(&b, p, sizeof(b));
#if defined(__AVX512F__) && defined(__AVX512BW__)
  return (vint)_mm512_movm_epi32(_mm_test_epi8_mask((__m128i)b, (__m128i)b));
#else
  return __builtin_convertvector(b, vint) != 0;
#endif
}

FULMEN_INLINE vfloat select(vint mask, vfloat yes, vfloat no) { return mask ? yes : no; }

FULMEN_INLINE vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The plain hardware maximum: for ordered inputs. maximum_nan below carries NaN through, as torch.maximum does.
FULMEN_INLINE vfloat max(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
FULMEN_INLINE vfloat min(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}
FULMEN_INLINE vfloat maximum_nan(vfloat a, vfloat b) { return select((vint)(a != a), a, select((vint)(b != b), b, max(a, b))); }
FULMEN_INLINE vfloat minimum_nan(vfloat a, vfloat b) { return select((vint)(a != a), a, select((vint)(b != b), b, min(a, b))); }

FULMEN_INLINE vfloat abs(vfloat v) { return std::bit_cast<vfloat>(std::bit_cast<vuint>(v) & 0x7fffffffu); }

FULMEN_INLINE vfloat sqrt(vfloat v) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
  return (vfloat)_mm256_sqrt_ps((__m256)v);
#else
  for (int i = 0; i < lanes; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}

// Nearest integer, ties to even.
FULMEN_INLINE vfloat round_even(vfloat v) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vfloat)_mm256_round_ps((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  for (int i = 0; i < lanes; ++i) v[i] = std::nearbyint(v[i]);
  return v;
#endif
}
FULMEN_INLINE vfloat floor(vfloat v) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vfloat)_mm256_floor_ps((__m256)v);
#else
  for (int i = 0; i < lanes; ++i) v[i] = std::floor(v[i]);
  return v;
#endif
}

FULMEN_INLINE float reduce_add(vfloat v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0;
  for (int i = 0; i < lanes; ++i) sum += v[i];
  return sum;
#endif
}
FULMEN_INLINE float reduce_max(vfloat v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < lanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// 2^n for integral-valued n in [-126, 127]
FULMEN_INLINE vfloat power_of_two(vfloat n) {
  return std::bit_cast<vfloat>((__builtin_convertvector(n, vint) + 127) << 23);
}

// Minimax polynomial of degree 6 over [-ln2/2, ln2/2] after Cody-Waite reduction. exp(-inf) = 0, overflow gives inf,
// NaN stays NaN.
FULMEN_INLINE vfloat exp(vfloat x) {
  const vfloat high = splat(88.7228391f), low = splat(-103.972084f);
  const vfloat clamped = min(max(x, low), high);
  const vfloat n = round_even(clamped * 1.44269504f);
  vfloat r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vfloat p = splat(1.3981999507e-3f);
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
#if defined(__AVX512F__)
  vfloat y = (vfloat)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const vfloat half = floor(n * 0.5f);  // two factors reach the subnormals
  vfloat y = p * power_of_two(half) * power_of_two(n - half);
#endif
  y = select((vint)(x > high), splat(std::numeric_limits<float>::infinity()), y);
  y = select((vint)(x < low), vfloat{}, y);
  return select((vint)(x != x), x, y);
}

// exp for arguments known to be <= 0 and not NaN (softmax after the maximum was taken); results below 2^-126 are 0.
FULMEN_INLINE vfloat exp_nonpositive(vfloat x) {
  const vfloat n = round_even(max(x, splat(-104.0f)) * 1.44269504f);
  const vfloat clamped = max(x, splat(-104.0f));
  vfloat r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vfloat p = splat(1.3981999507e-3f);
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
#if defined(__AVX512F__)
  return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return select((vint)(x < -87.0f), vfloat{}, p * power_of_two(max(n, splat(-126.0f))));
#endif
}

// log of positive values; log(0) = -inf, negative gives NaN. The polynomial is the well-known single-precision one of
// degree 8 on [sqrt(1/2), sqrt(2)].
FULMEN_INLINE vfloat log(vfloat x) {
  const vint tiny = (vint)(x < 1.17549435e-38f);
  const vfloat scaled = select(tiny, x * 8388608.0f, x);  // subnormals
  const vint bits = std::bit_cast<vint>(scaled);
  vint exponent = ((bits >> 23) & 0xff) - 126;
  vfloat m = std::bit_cast<vfloat>((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  const vint small = (vint)(m < 0.707106781f);
  m = select(small, m + m, m) - 1.0f;
  vfloat e = __builtin_convertvector(exponent + small, vfloat);
  e = select(tiny, e - 23.0f, e);
  const vfloat z = m * m;
  vfloat p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  vfloat y = p * m * z;
  y = fma(e, splat(-2.12194440e-4f), y);
  y = fma(z, splat(-0.5f), y);
  y = m + y;
  y = fma(e, splat(0.693359375f), y);
  const float inf = std::numeric_limits<float>::infinity();
  y = select((vint)(x == inf), splat(inf), y);
  y = select((vint)(x == 0.0f), splat(-inf), y);
  return select((vint)(x < 0.0f) | (vint)(x != x), splat(std::numeric_limits<float>::quiet_NaN()), y);
}

// Rational form near 0, exponential form elsewhere.
FULMEN_INLINE vfloat tanh(vfloat x) {
  const vfloat a = abs(x);
  const vfloat z = x * x;
  vfloat p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const vfloat near = fma(p * z, x, x);
  const vfloat t = exp(min(a, splat(10.0f)) * 2.0f);
  vfloat far = 1.0f - 2.0f / (t + 1.0f);
  far = std::bit_cast<vfloat>(std::bit_cast<vuint>(far) | (std::bit_cast<vuint>(x) & 0x80000000u));
  return select((vint)(x != x), x, select((vint)(a < 0.625f), near, far));
}

FULMEN_INLINE vfloat sigmoid(vfloat x) { return 1.0f / (1.0f + exp(-x)); }

}  // namespace fulmen::cpu::FULMEN_TARGET
