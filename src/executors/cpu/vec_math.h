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
FULMEN_INLINE bool beyond_reduction(vfloat x) {
#if defined(__FMA__)
  return any_lane(~(vint)(abs(x) <= 65536.0f));
#else
  return any_lane(~(vint)(abs(x) <= 0.78f));  // each part would be rounded
#endif
}
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

#if defined(__AVX512F__)
// exp with the work that the instruction set spares: out of range, scalef gives 0 and inf by itself, and operands are
// ordered so that NaN stays.
FULMEN_INLINE vfloat fast_exp(vfloat x) {
  const vfloat clamped = (vfloat)_mm512_min_ps(_mm512_set1_ps(110.0f), _mm512_max_ps(_mm512_set1_ps(-110.0f), (__m512)x));
  const vfloat n = round_even(clamped * 1.44269504f);
  vfloat r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  vfloat p = splat(1.3981999507e-3f);
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
  return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)n);
}

// Functions of |x| on [0, 6) as polynomials of degree 5 on 16 pieces, highest power first; one register a power, looked
// up by a permutation. Absolute error below 5e-9 (distribution) and 4e-8 (slope) before rounding.
inline constexpr float piece_width = 0.375f;
alignas(64) inline constexpr float normal_cdf_pieces[6][16] = {
    {6.70514273e-05f, 2.52122354e-05f, -2.3484994e-05f, -4.51153428e-05f, -3.53355936e-05f, -1.30995732e-05f, 3.20986283e-06f, 8.472628e-06f,
     6.92611911e-06f, 3.81583959e-06f, 1.60771833e-06f, 5.43274609e-07f, 1.50798854e-07f, 3.48687301e-08f, 6.77763312e-09f, 1.11442255e-09f},
    {0.000178002811f, 0.000420304103f, 0.000418784213f, 0.000232656705f, 2.16002736e-05f, -9.999756e-05f, -0.00012016829f, -8.69155192e-05f,
     -4.68493017e-05f, -2.00867689e-05f, -7.05587581e-06f, -2.06392792e-06f, -5.07825803e-07f, -1.05812667e-07f, -1.87599944e-08f, -2.84005086e-09f},
    {-0.0033240309f, -0.00204616878f, -0.000273657206f, 0.00107075658f, 0.00155993714f, 0.0013599965f, 0.000888287381f, 0.000464176264f,
     0.000199760878f, 7.19123927e-05f, 2.18607602e-05f, 5.64661968e-06f, 1.24464816e-06f, 2.3485461e-07f, 3.80247585e-08f, 5.29219024e-09f},
    {-0.00516770408f, -0.0134694064f, -0.0169455614f, -0.0155586265f, -0.0113980388f, -0.00689636823f, -0.0035053785f, -0.0015113597f,
     -0.000556069543f, -0.000175288122f, -4.74731896e-05f, -1.10686451e-05f, -2.22508584e-06f, -3.86107416e-07f, -5.78857637e-08f, -7.50326645e-09f},
    {0.146996588f, 0.127712846f, 0.0964027196f, 0.0632224455f, 0.0360230654f, 0.0178327095f, 0.007669752f, 0.00286597665f,
     0.000930446491f, 0.000262444577f, 6.43148742e-05f, 1.3693455e-05f, 2.53304393e-06f, 4.07099719e-07f, 5.68444136e-08f, 6.89611168e-09f},
    {0.574365675f, 0.713112295f, 0.825749278f, 0.90532428f, 0.954246402f, 0.980419934f, 0.992605388f, 0.997542083f,
     0.999282479f, 0.999816358f, 0.999958813f, 0.999991953f, 0.999998629f, 0.999999821f, 1.0f, 1.0f},
};
alignas(64) inline constexpr float gelu_slope_pieces[6][16] = {
    {0.00038889781f, 7.24487836e-05f, -0.000237045111f, -0.000283728936f, -0.000122303827f, 3.84743325e-05f, 8.7614826e-05f, 5.69707408e-05f,
     1.60325362e-05f, -3.95862844e-06f, -6.86697149e-06f, -4.13588623e-06f, -1.680639e-06f, -5.19693174e-07f, -1.28165169e-07f, -2.58244626e-08f},
    {0.00105448975f, 0.00228402019f, 0.00179574429f, 0.000373665127f, -0.000684394094f, -0.000857681327f, -0.000495422981f, -0.000116923446f,
     5.97048274e-05f, 8.04963274e-05f, 4.89664526e-05f, 2.08609654e-05f, 6.86961766e-06f, 1.82099268e-06f, 3.96946945e-07f, 7.20802049e-08f},
    {-0.0129367197f, -0.00564314704f, 0.00311720325f, 0.00754340319f, 0.00660612946f, 0.00321078999f, 0.000411696441f, -0.000752273772f,
     -0.000787455356f, -0.000468936836f, -0.000204776588f, -7.05056227e-05f, -1.97663539e-05f, -4.59221383e-06f, -8.93759932e-07f, -1.46782767e-07f},
    {-0.0204885677f, -0.0496147424f, -0.0528882518f, -0.0354329199f, -0.0131354639f, 0.00175036024f, 0.00680526206f, 0.00590990065f,
     0.00342577044f, 0.00152369926f, 0.000546224299f, 0.000161613265f, 4.00020799e-05f, 8.35396168e-06f, 1.48053823e-06f, 2.23593474e-07f},
    {0.288825303f, 0.215016559f, 0.108076505f, 0.0175343659f, -0.0305351745f, -0.0401932634f, -0.030229615f, -0.0169383734f,
     -0.00759258773f, -0.0028058996f, -0.00086850056f, -0.00022727855f, -5.05913558e-05f, -9.61924616e-06f, -1.56697843e-06f, -2.19190511e-07f},
    {0.647863984f, 0.904681563f, 1.06675601f, 1.12660277f, 1.11635017f, 1.07849979f, 1.04245877f, 1.01903689f,
     1.0071913f, 1.00230956f, 1.00063419f, 1.00014937f, 1.00003028f, 1.00000525f, 1.00000083f, 1.00000012f},
};
FULMEN_INLINE vfloat piecewise(const float (&pieces)[6][16], vfloat a) {
  const vfloat s = min(a, splat(5.9999995f)) * (1.0f / piece_width);
  const vfloat k = floor(s);
  const vfloat t = (s - k) - 0.5f;
  const __m512i index = _mm512_cvttps_epi32((__m512)k);
  vfloat p = (vfloat)_mm512_permutexvar_ps(index, _mm512_load_ps(pieces[0]));
  for (int i = 1; i < 6; ++i) p = fma(p, t, (vfloat)_mm512_permutexvar_ps(index, _mm512_load_ps(pieces[i])));
  return p;
}
// Both functions: f(-x) = 1 - f(x).
FULMEN_INLINE vfloat reflected(vfloat x, vfloat y) {
  return select((vint)(x != x), x, select((vint)(x < 0.0f), 1.0f - y, y));
}
FULMEN_INLINE vfloat normal_cdf(vfloat x) { return reflected(x, piecewise(normal_cdf_pieces, abs(x))); }
FULMEN_INLINE vfloat gelu_slope(vfloat x) { return reflected(x, piecewise(gelu_slope_pieces, abs(x))); }
#else
FULMEN_INLINE vfloat fast_exp(vfloat x) { return exp(x); }
FULMEN_INLINE vfloat normal_cdf(vfloat x) { return fma(splat(0.5f), erf(x * 0.707106781f), splat(0.5f)); }
FULMEN_INLINE vfloat gelu_slope(vfloat x) { return fma(x * 0.398942280f, exp(x * x * -0.5f), normal_cdf(x)); }
#endif

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
FULMEN_INLINE Lanes exp(Lanes a) { return Lanes(fast_exp(a.v)); }
FULMEN_INLINE Lanes sigmoid(Lanes a) { return Lanes(1.0f / (1.0f + fast_exp(-a.v))); }
#define FULMEN_LANES_FUNCTION(name) \
  FULMEN_INLINE Lanes name(Lanes a) { return Lanes(name(a.v)); }
FULMEN_LANES_FUNCTION(abs)
FULMEN_LANES_FUNCTION(normal_cdf)
FULMEN_LANES_FUNCTION(gelu_slope)
FULMEN_LANES_FUNCTION(expm1)
FULMEN_LANES_FUNCTION(log)
FULMEN_LANES_FUNCTION(log1p)
FULMEN_LANES_FUNCTION(log2)
FULMEN_LANES_FUNCTION(sqrt)
FULMEN_LANES_FUNCTION(sin)
FULMEN_LANES_FUNCTION(cos)
FULMEN_LANES_FUNCTION(tanh)
FULMEN_LANES_FUNCTION(erf)
FULMEN_LANES_FUNCTION(floor)
FULMEN_LANES_FUNCTION(ceil)
FULMEN_LANES_FUNCTION(trunc)
FULMEN_LANES_FUNCTION(round_even)
#undef FULMEN_LANES_FUNCTION

}  // namespace fulmen::cpu::FULMEN_TARGET
