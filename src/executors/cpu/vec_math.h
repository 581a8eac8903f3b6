// The functions that vec.h leaves out, and Lanes, the class that makes the pointwise bodies (ops/pointwise_bodies.h)
// work on vectors. Accuracy against the correctly rounded result, over the whole range: erf, expm1, log1p, log2, sin,
// cos, pow 2 ulp (tested at 4). Polynomials are least-squares fits reweighted toward minimax, made for this file.
#pragma once

#include "executors/cpu/vec.h"

namespace fulmen::cpu::FULMEN_TARGET {

FULMEN_INLINE vfloat copy_sign(vfloat magnitude, vfloat sign) {
  return std::bit_cast<vfloat>((std::bit_cast<vuint>(magnitude) & 0x7fffffffu) | (std::bit_cast<vuint>(sign) & 0x80000000u));
}

// A scalar function lane by lane: for what is rare, or for arguments beyond the fast range.
template <class F>
FULMEN_INLINE vfloat each_lane(F f, vfloat a, vfloat b) {
  for (int i = 0; i < lanes; ++i) a[i] = f(a[i], b[i]);
  return a;
}

FULMEN_INLINE bool any_lane(vint mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  int any = 0;
  for (int i = 0; i < lanes; ++i) any |= mask[i];
  return any != 0;
#endif
}

FULMEN_INLINE vfloat trunc(vfloat x) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
#else
  return copy_sign(floor(abs(x)), x);
#endif
}
FULMEN_INLINE vfloat ceil(vfloat x) { return -floor(-x); }

// x P(x^2) up to 1; beyond, 1 - erfc with erfc = exp(Q(|x|)), which is small there. From 4 on it rounds to 1.
FULMEN_INLINE vfloat erf(vfloat x) {
  const vfloat a = abs(x), z = x * x;
  vfloat p = splat(7.853851275e-05f);
  p = fma(p, z, splat(-0.0008010190795f));
  p = fma(p, z, splat(0.005188327283f));
  p = fma(p, z, splat(-0.026853811f));
  p = fma(p, z, splat(0.1128358543f));
  p = fma(p, z, splat(-0.3761262596f));
  p = fma(p, z, splat(1.128379107f));
  const vfloat b = min(a, splat(4.0f));
  constexpr float ln2 = 0.693147181f;
  vfloat q = splat(-3.004959035e-05f * ln2);
  q = fma(q, b, splat(0.0006223720266f * ln2));
  q = fma(q, b, splat(-0.005996220279f * ln2));
  q = fma(q, b, splat(0.03618371114f * ln2));
  q = fma(q, b, splat(-0.1561290473f * ln2));
  q = fma(q, b, splat(-0.9138042331f * ln2));
  q = fma(q, b, splat(-1.629507303f * ln2));
  q = fma(q, b, splat(0.0002441146789f * ln2));
  const vfloat far = copy_sign(1.0f - exp_nonpositive(q), x);
  return select((vint)(x != x), x, select((vint)(a < 1.0f), p * x, far));
}

// exp(x) - 1 as 2^n (e^r - 1) + (2^n - 1), with no cancellation near 0.
FULMEN_INLINE vfloat expm1(vfloat x) {
  const vfloat clamped = min(max(x, splat(-30.0f)), splat(88.7228391f));
  const vfloat n = round_even(clamped * 1.44269504f);
  vfloat r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vfloat p = splat(0.0001991246536f);
  p = fma(p, r, splat(0.001394100836f));
  p = fma(p, r, splat(0.008333276026f));
  p = fma(p, r, splat(0.04166635498f));
  p = fma(p, r, splat(0.1666666716f));
  p = fma(p, r, splat(0.5f));
  p = fma(p * r, r, r);
  const vfloat half = power_of_two(n - 1.0f);  // n reaches 128
  const vfloat y = select((vint)(n == 0.0f), p, 2.0f * fma(half, p, half - 0.5f));
  const vfloat high = select((vint)(x > 88.7228391f), splat(std::numeric_limits<float>::infinity()), y);
  return select((vint)(x != x) | (vint)(x == 0.0f), x, high);
}

// log(u) with u = 1 + x, plus what rounding u lost.
FULMEN_INLINE vfloat log1p(vfloat x) {
  const vfloat u = 1.0f + x;
  const vfloat y = log(u) + (x - (u - 1.0f)) / u;
  const vint special = (vint)(u <= 0.0f) | (vint)(x > 3.4028234e38f);
  return select((vint)(x == 0.0f), x, select(special, log(u), y));
}

// Exact at powers of two: the exponent is added at the end.
FULMEN_INLINE vfloat log2(vfloat x) {
  const vint tiny = (vint)(x < 1.17549435e-38f);
  const vint bits = std::bit_cast<vint>(select(tiny, x * 8388608.0f, x));
  vint exponent = ((bits >> 23) & 0xff) - 126;
  vfloat m = std::bit_cast<vfloat>((bits & 0x007fffff) | 0x3f000000);
  const vint small = (vint)(m < 0.707106781f);
  m = select(small, m + m, m);
  vfloat e = __builtin_convertvector(exponent + small, vfloat);
  e = select(tiny, e - 23.0f, e);
  const vfloat y = fma(log(m), splat(1.44269504f), e);
  return select((vint)(x > 0.0f) & (vint)(x <= 3.4028234e38f), y, log(x));
}

struct SinCos {
  vfloat sin, cos;
};
// Reduction by pi/2 in three parts, exact enough up to 2^16; larger arguments go lane by lane.
FULMEN_INLINE SinCos sin_cos(vfloat x) {
  const vfloat n = round_even(x * 0.636619772f);
  vfloat r = fma(n, splat(-1.5707962513f), x);
  r = fma(n, splat(-7.54978941586e-8f), r);
  r = fma(n, splat(-5.39030285816e-15f), r);
  const vfloat z = r * r;
  vfloat s = splat(2.724839078e-06f);
  s = fma(s, z, splat(-0.000198400754f));
  s = fma(s, z, splat(0.008333331905f));
  s = fma(s, z, splat(-0.1666666716f));
  s = fma(s * z, r, r);
  vfloat c = splat(-2.729929633e-07f);
  c = fma(c, z, splat(2.48005872e-05f));
  c = fma(c, z, splat(-0.001388888806f));
  c = fma(c, z, splat(0.04166666791f));
  c = fma(c * z, z, fma(z, splat(-0.5f), splat(1.0f)));
  const vint quadrant = __builtin_convertvector(n, vint);
  const vint odd = -(quadrant & 1);
  const vuint sin_sign = (std::bit_cast<vuint>(quadrant) & 2u) << 30;
  const vuint cos_sign = (std::bit_cast<vuint>(quadrant + 1) & 2u) << 30;
  SinCos result;
  result.sin = std::bit_cast<vfloat>(std::bit_cast<vuint>(select(odd, c, s)) ^ sin_sign);
  result.cos = std::bit_cast<vfloat>(std::bit_cast<vuint>(select(odd, s, c)) ^ cos_sign);
  return result;
}
FULMEN_INLINE bool beyond_reduction(vfloat x) { return any_lane(~(vint)(abs(x) <= 65536.0f)); }
FULMEN_INLINE vfloat sin(vfloat x) {
  if (beyond_reduction(x)) return each_lane([](float a, float) { return std::sin(a); }, x, x);
  return select((vint)(x == 0.0f), x, sin_cos(x).sin);
}
FULMEN_INLINE vfloat cos(vfloat x) {
  if (beyond_reduction(x)) return each_lane([](float a, float) { return std::cos(a); }, x, x);
  return sin_cos(x).cos;
}

FULMEN_INLINE vfloat fmod(vfloat a, vfloat b) { return each_lane([](float x, float y) { return std::fmod(x, y); }, a, b); }
FULMEN_INLINE vfloat atan2(vfloat a, vfloat b) { return each_lane([](float x, float y) { return std::atan2(x, y); }, a, b); }
// Seldom on a hot path: constant exponents are turned into products and roots before they get here.
FULMEN_INLINE vfloat pow(vfloat a, vfloat b) { return each_lane([](float x, float y) { return std::pow(x, y); }, a, b); }

// The result of a comparison of Lanes.
struct LaneMask {
  vint bits;
};

// A vector of floats with the operators and functions that the pointwise bodies look up. In this namespace, so that the
// copies made for different instruction sets have different names.
struct Lanes {
  vfloat v;
  FULMEN_INLINE Lanes() = default;
  FULMEN_INLINE explicit Lanes(vfloat x) : v(x) {}
  FULMEN_INLINE explicit Lanes(double x) : v(splat(static_cast<float>(x))) {}
  FULMEN_INLINE explicit Lanes(int x) : v(splat(static_cast<float>(x))) {}
};
FULMEN_INLINE Lanes operator+(Lanes a, Lanes b) { return Lanes(a.v + b.v); }
FULMEN_INLINE Lanes operator-(Lanes a, Lanes b) { return Lanes(a.v - b.v); }
FULMEN_INLINE Lanes operator*(Lanes a, Lanes b) { return Lanes(a.v * b.v); }
FULMEN_INLINE Lanes operator/(Lanes a, Lanes b) { return Lanes(a.v / b.v); }
FULMEN_INLINE Lanes operator-(Lanes a) { return Lanes(-a.v); }
FULMEN_INLINE LaneMask operator<(Lanes a, Lanes b) { return {(vint)(a.v < b.v)}; }
FULMEN_INLINE LaneMask operator<=(Lanes a, Lanes b) { return {(vint)(a.v <= b.v)}; }
FULMEN_INLINE LaneMask operator>(Lanes a, Lanes b) { return {(vint)(a.v > b.v)}; }
FULMEN_INLINE LaneMask operator>=(Lanes a, Lanes b) { return {(vint)(a.v >= b.v)}; }
FULMEN_INLINE LaneMask operator==(Lanes a, Lanes b) { return {(vint)(a.v == b.v)}; }
FULMEN_INLINE LaneMask operator!=(Lanes a, Lanes b) { return {(vint)(a.v != b.v)}; }
FULMEN_INLINE Lanes select(LaneMask m, Lanes yes, Lanes no) { return Lanes(select(m.bits, yes.v, no.v)); }
FULMEN_INLINE Lanes maximum(Lanes a, Lanes b) { return Lanes(maximum_nan(a.v, b.v)); }
FULMEN_INLINE Lanes minimum(Lanes a, Lanes b) { return Lanes(minimum_nan(a.v, b.v)); }
FULMEN_INLINE Lanes pow(Lanes a, Lanes b) { return Lanes(pow(a.v, b.v)); }
FULMEN_INLINE Lanes fmod(Lanes a, Lanes b) { return Lanes(fmod(a.v, b.v)); }
FULMEN_INLINE Lanes atan2(Lanes a, Lanes b) { return Lanes(atan2(a.v, b.v)); }
#define FULMEN_LANES_FUNCTION(name) \
  FULMEN_INLINE Lanes name(Lanes a) { return Lanes(name(a.v)); }
FULMEN_LANES_FUNCTION(abs)
FULMEN_LANES_FUNCTION(exp)
FULMEN_LANES_FUNCTION(expm1)
FULMEN_LANES_FUNCTION(log)
FULMEN_LANES_FUNCTION(log1p)
FULMEN_LANES_FUNCTION(log2)
FULMEN_LANES_FUNCTION(sqrt)
FULMEN_LANES_FUNCTION(sin)
FULMEN_LANES_FUNCTION(cos)
FULMEN_LANES_FUNCTION(tanh)
FULMEN_LANES_FUNCTION(erf)
FULMEN_LANES_FUNCTION(sigmoid)
FULMEN_LANES_FUNCTION(floor)
FULMEN_LANES_FUNCTION(ceil)
FULMEN_LANES_FUNCTION(trunc)
FULMEN_LANES_FUNCTION(round_even)
#undef FULMEN_LANES_FUNCTION

}  // namespace fulmen::cpu::FULMEN_TARGET
