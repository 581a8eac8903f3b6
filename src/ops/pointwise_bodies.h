// One body for each pointwise op, written once and used with several element types:
//   double and int64_t   the reference (ops/pointwise.cpp)
//   a SIMD class         the CPU executor (executors/cpu/tile), float lanes
//   a text class         source code for a GPU compiler
// A type T works here if it has + - * / and comparisons, and if select, abs, exp, log, ... below are found for it by
// argument-dependent lookup. Masks stay inside bodies: an op whose result is bool gives T(1) or T(0).
//
// The list at the end, FULMEN_POINTWISE_OPS, names every body with its op, its tensor operands, its kind and the
// attributes that follow the operands as further arguments.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <type_traits>

namespace fulmen::pointwise {

// What double needs besides <cmath>; a SIMD or text type brings its own.
using std::abs;
using std::atan2;
using std::ceil;
using std::cos;
using std::erf;
using std::exp;
using std::expm1;
using std::floor;
using std::fmod;
using std::log;
using std::log1p;
using std::log2;
using std::pow;
using std::sin;
using std::sqrt;
using std::tan;
using std::tanh;
using std::trunc;

inline double round_even(double x) { return std::nearbyint(x); }
// The normal distribution function, and the derivative of x times it.
inline double normal_cdf(double x) { return 0.5 * (1.0 + std::erf(x * 0.70710678118654752440)); }
inline double gelu_slope(double x) { return normal_cdf(x) + x * 0.39894228040143267794 * std::exp(-0.5 * x * x); }
inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double select(bool condition, double yes, double no) { return condition ? yes : no; }
inline double maximum(double a, double b) { return a != a ? a : b != b ? b : a > b ? a : b; }
inline double minimum(double a, double b) { return a != a ? a : b != b ? b : a < b ? a : b; }

// Integers wrap, as PyTorch's do, with no undefined behaviour.
inline int64_t wrap(uint64_t x) { return static_cast<int64_t>(x); }
inline int64_t select(bool condition, int64_t yes, int64_t no) { return condition ? yes : no; }
inline int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
inline constexpr bool is_int = std::is_same_v<T, int64_t>;

inline constexpr double inv_sqrt_two_pi = 0.39894228040143267794;
inline constexpr double sqrt_two_over_pi = 0.79788456080286535588;
inline constexpr double gelu_cubic = 0.044715;

// --- one operand ---
struct Identity {
  template <class T> static T apply(T x) { return x; }
};
struct Neg {
  template <class T> static T apply(T x) {
    if constexpr (is_int<T>) return wrap(0 - static_cast<uint64_t>(x)); else return -x;
  }
};
struct Abs {
  template <class T> static T apply(T x) {
    if constexpr (is_int<T>) return x < 0 ? Neg::apply(x) : x; else return abs(x);
  }
};
struct Square {
  template <class T> static T apply(T x) {
    if constexpr (is_int<T>) return wrap(static_cast<uint64_t>(x) * static_cast<uint64_t>(x)); else return x * x;
  }
};
// NaN gives NaN for floats
struct Sign {
  template <class T> static T apply(T x) { return select(x > T(0), T(1), select(x < T(0), T(-1), x)); }
};
struct Exp { template <class T> static T apply(T x) { return exp(x); } };
struct Expm1 { template <class T> static T apply(T x) { return expm1(x); } };
struct Log { template <class T> static T apply(T x) { return log(x); } };
struct Log1p { template <class T> static T apply(T x) { return log1p(x); } };
struct Log2 { template <class T> static T apply(T x) { return log2(x); } };
struct Sqrt { template <class T> static T apply(T x) { return sqrt(x); } };
struct Rsqrt { template <class T> static T apply(T x) { return T(1) / sqrt(x); } };
struct Reciprocal { template <class T> static T apply(T x) { return T(1) / x; } };
struct Sin { template <class T> static T apply(T x) { return sin(x); } };
struct Cos { template <class T> static T apply(T x) { return cos(x); } };
struct Tan { template <class T> static T apply(T x) { return sin(x) / cos(x); } };
struct Tanh { template <class T> static T apply(T x) { return tanh(x); } };
struct Erf { template <class T> static T apply(T x) { return erf(x); } };
struct Sigmoid { template <class T> static T apply(T x) { return sigmoid(x); } };
struct Floor {
  template <class T> static T apply(T x) { if constexpr (is_int<T>) return x; else return floor(x); }
};
struct Ceil {
  template <class T> static T apply(T x) { if constexpr (is_int<T>) return x; else return ceil(x); }
};
struct Trunc {
  template <class T> static T apply(T x) { if constexpr (is_int<T>) return x; else return trunc(x); }
};
// ties to even
struct Round {
  template <class T> static T apply(T x) { if constexpr (is_int<T>) return x; else return round_even(x); }
};
// NaN stays NaN
struct Relu {
  template <class T> static T apply(T x) { return select(x < T(0), T(0), x); }
};
// x Phi(x), Phi the normal distribution function
struct Gelu {
  template <class T> static T apply(T x) { return x * normal_cdf(x); }
};
struct GeluTanh {
  template <class T> static T apply(T x) {
    const T inner = T(sqrt_two_over_pi) * (x + T(gelu_cubic) * x * x * x);
    return T(0.5) * x * (T(1) + tanh(inner));
  }
};
struct Silu { template <class T> static T apply(T x) { return x * sigmoid(x); } };
struct LogSigmoid {
  template <class T> static T apply(T x) { return minimum(x, T(0)) - log1p(exp(-abs(x))); }
};
struct LogicalNot { template <class T> static T apply(T x) { return select(x == T(0), T(1), T(0)); } };
struct IsNan { template <class T> static T apply(T x) { return select(x != x, T(1), T(0)); } };
struct IsInf {
  template <class T> static T apply(T x) {
    if constexpr (is_int<T>) return 0; else return select(abs(x) == T(std::numeric_limits<double>::infinity()), T(1), T(0));
  }
};
struct IsFinite {
  template <class T> static T apply(T x) {
    if constexpr (is_int<T>) return 1; else return select(abs(x) < T(std::numeric_limits<double>::infinity()), T(1), T(0));
  }
};

// --- two operands ---
struct Add {
  template <class T> static T apply(T a, T b) {
    if constexpr (is_int<T>) return wrap(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); else return a + b;
  }
};
struct Sub {
  template <class T> static T apply(T a, T b) {
    if constexpr (is_int<T>) return wrap(static_cast<uint64_t>(a) - static_cast<uint64_t>(b)); else return a - b;
  }
};
struct Mul {
  template <class T> static T apply(T a, T b) {
    if constexpr (is_int<T>) return wrap(static_cast<uint64_t>(a) * static_cast<uint64_t>(b)); else return a * b;
  }
};
struct Div { template <class T> static T apply(T a, T b) { return a / b; } };
// Toward minus infinity. An integer divided by 0 gives 0, here and below.
struct FloorDivide {
  template <class T> static T apply(T a, T b) {
    if constexpr (is_int<T>) {
      if (b == 0) return 0;
      if (b == -1) return Neg::apply(a);
      const int64_t quotient = a / b;
      return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
    } else {
      return floor(a / b);
    }
  }
};
// Toward zero.
struct TruncDivide {
  template <class T> static T apply(T a, T b) {
    if constexpr (is_int<T>) return b == 0 ? 0 : b == -1 ? Neg::apply(a) : a / b; else return trunc(a / b);
  }
};
// The sign of the divisor, as Python's %.
struct Remainder {
  template <class T> static T apply(T a, T b) {
    if constexpr (is_int<T>) {
      if (b == 0 || b == -1) return 0;
      const int64_t rest = a % b;
      return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
    } else {
      const T rest = fmod(a, b);
      return select(rest * b < T(0), rest + b, rest);
    }
  }
};
// The sign of the dividend, as C's fmod.
struct Fmod {
  template <class T> static T apply(T a, T b) {
    if constexpr (is_int<T>) return b == 0 || b == -1 ? 0 : a % b; else return fmod(a, b);
  }
};
// For integers the exponent is not negative; results wrap.
struct Pow {
  template <class T> static T apply(T a, T b) {
    if constexpr (is_int<T>) {
      if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
      uint64_t result = 1, base = static_cast<uint64_t>(a);
      for (uint64_t n = static_cast<uint64_t>(b); n; n >>= 1, base *= base)
        if (n & 1) result *= base;
      return wrap(result);
    } else {
      return pow(a, b);
    }
  }
};
struct Maximum { template <class T> static T apply(T a, T b) { return maximum(a, b); } };
struct Minimum { template <class T> static T apply(T a, T b) { return minimum(a, b); } };
struct Atan2 { template <class T> static T apply(T a, T b) { return atan2(a, b); } };
struct Eq { template <class T> static T apply(T a, T b) { return select(a == b, T(1), T(0)); } };
struct Ne { template <class T> static T apply(T a, T b) { return select(a != b, T(1), T(0)); } };
struct Lt { template <class T> static T apply(T a, T b) { return select(a < b, T(1), T(0)); } };
struct Le { template <class T> static T apply(T a, T b) { return select(a <= b, T(1), T(0)); } };
struct Gt { template <class T> static T apply(T a, T b) { return select(a > b, T(1), T(0)); } };
struct Ge { template <class T> static T apply(T a, T b) { return select(a >= b, T(1), T(0)); } };
struct LogicalAnd {
  template <class T> static T apply(T a, T b) { return select(a != T(0), select(b != T(0), T(1), T(0)), T(0)); }
};
struct LogicalOr {
  template <class T> static T apply(T a, T b) { return select(a != T(0), T(1), select(b != T(0), T(1), T(0))); }
};
struct LogicalXor {
  template <class T> static T apply(T a, T b) {
    return select(a != T(0), select(b != T(0), T(0), T(1)), select(b != T(0), T(1), T(0)));
  }
};

// --- three operands ---
struct Where { template <class T> static T apply(T condition, T yes, T no) { return select(condition != T(0), yes, no); } };
// An absent bound is the lowest or highest value of T. NaN stays NaN.
struct Clamp { template <class T> static T apply(T x, T low, T high) { return minimum(maximum(x, low), high); } };
// log(1 + exp(beta x)) / beta; x itself where beta x > threshold
struct Softplus {
  template <class T> static T apply(T x, T beta, T threshold) {
    const T z = x * beta;
    const T soft = (maximum(z, T(0)) + log1p(exp(-abs(z)))) / beta;
    return select(z > threshold, x, soft);
  }
};
struct LeakyRelu {
  template <class T> static T apply(T x, T slope) { return select(x < T(0), x * slope, x); }
};
struct Elu {
  template <class T> static T apply(T x, T alpha) { return select(x > T(0), x, alpha * expm1(minimum(x, T(0)))); }
};

// --- gradients worth one instruction; dy is the gradient of the result ---
struct GeluGrad { template <class T> static T apply(T x, T dy) { return dy * gelu_slope(x); } };
struct GeluTanhGrad {
  template <class T> static T apply(T x, T dy) {
    const T x2 = x * x;
    const T t = tanh(T(sqrt_two_over_pi) * (x + T(gelu_cubic) * x2 * x));
    const T slope = T(sqrt_two_over_pi) * (T(1) + T(3 * gelu_cubic) * x2);
    return dy * (T(0.5) * (T(1) + t) + T(0.5) * x * (T(1) - t * t) * slope);
  }
};
struct SiluGrad {
  template <class T> static T apply(T x, T dy) {
    const T s = sigmoid(x);
    return dy * s * (T(1) + x * (T(1) - s));
  }
};
// y is the result of the forward
struct TanhGrad { template <class T> static T apply(T y, T dy) { return dy * (T(1) - y * y); } };
struct SigmoidGrad { template <class T> static T apply(T y, T dy) { return dy * y * (T(1) - y); } };
// x is the operand or the result of the forward
struct ReluGrad { template <class T> static T apply(T x, T dy) { return select(x > T(0), dy, T(0)); } };
struct SoftplusGrad {
  template <class T> static T apply(T x, T dy, T beta, T threshold) {
    const T z = x * beta;
    return select(z > threshold, dy, dy * sigmoid(z));
  }
};

// What an op takes and gives.
enum class Kind {
  number,      // any dtype but bool; the result has the promoted dtype
  floating,    // computed in the promoted float dtype: integers and bool become the default float
  comparison,  // any dtype; the result is bool
  logical,     // any dtype, read as "is not 0"; the result is bool
  select,      // the first operand is bool, the rest are promoted
};

// M(op name, body, tensor operands, kind, attributes that follow as arguments: names separated by a space)
#define FULMEN_POINTWISE_OPS(M)                                \
  M(neg, Neg, 1, number, "")                                   \
  M(abs, Abs, 1, number, "")                                   \
  M(square, Square, 1, number, "")                             \
  M(sign, Sign, 1, number, "")                                 \
  M(exp, Exp, 1, floating, "")                                 \
  M(expm1, Expm1, 1, floating, "")                             \
  M(log, Log, 1, floating, "")                                 \
  M(log1p, Log1p, 1, floating, "")                             \
  M(log2, Log2, 1, floating, "")                               \
  M(sqrt, Sqrt, 1, floating, "")                               \
  M(rsqrt, Rsqrt, 1, floating, "")                             \
  M(reciprocal, Reciprocal, 1, floating, "")                   \
  M(sin, Sin, 1, floating, "")                                 \
  M(cos, Cos, 1, floating, "")                                 \
  M(tan, Tan, 1, floating, "")                                 \
  M(tanh, Tanh, 1, floating, "")                               \
  M(erf, Erf, 1, floating, "")                                 \
  M(sigmoid, Sigmoid, 1, floating, "")                         \
  M(floor, Floor, 1, number, "")                               \
  M(ceil, Ceil, 1, number, "")                                 \
  M(trunc, Trunc, 1, number, "")                               \
  M(round, Round, 1, number, "")                               \
  M(relu, Relu, 1, number, "")                                 \
  M(gelu, Gelu, 1, floating, "")                               \
  M(gelu_tanh, GeluTanh, 1, floating, "")                      \
  M(silu, Silu, 1, floating, "")                               \
  M(log_sigmoid, LogSigmoid, 1, floating, "")                  \
  M(softplus, Softplus, 1, floating, "beta threshold")         \
  M(leaky_relu, LeakyRelu, 1, floating, "negative_slope")      \
  M(elu, Elu, 1, floating, "alpha")                            \
  M(clamp, Clamp, 1, number, "min max")                        \
  M(add, Add, 2, number, "")                                   \
  M(sub, Sub, 2, number, "")                                   \
  M(mul, Mul, 2, number, "")                                   \
  M(div, Div, 2, floating, "")                                 \
  M(floor_divide, FloorDivide, 2, number, "")                  \
  M(trunc_divide, TruncDivide, 2, number, "")                  \
  M(remainder, Remainder, 2, number, "")                       \
  M(fmod, Fmod, 2, number, "")                                 \
  M(pow, Pow, 2, number, "")                                   \
  M(maximum, Maximum, 2, number, "")                           \
  M(minimum, Minimum, 2, number, "")                           \
  M(atan2, Atan2, 2, floating, "")                             \
  M(eq, Eq, 2, comparison, "")                                 \
  M(ne, Ne, 2, comparison, "")                                 \
  M(lt, Lt, 2, comparison, "")                                 \
  M(le, Le, 2, comparison, "")                                 \
  M(gt, Gt, 2, comparison, "")                                 \
  M(ge, Ge, 2, comparison, "")                                 \
  M(isnan, IsNan, 1, comparison, "")                           \
  M(isinf, IsInf, 1, comparison, "")                           \
  M(isfinite, IsFinite, 1, comparison, "")                     \
  M(logical_not, LogicalNot, 1, logical, "")                   \
  M(logical_and, LogicalAnd, 2, logical, "")                   \
  M(logical_or, LogicalOr, 2, logical, "")                     \
  M(logical_xor, LogicalXor, 2, logical, "")                   \
  M(where, Where, 3, select, "")                               \
  M(gelu_grad, GeluGrad, 2, floating, "")                      \
  M(gelu_tanh_grad, GeluTanhGrad, 2, floating, "")             \
  M(silu_grad, SiluGrad, 2, floating, "")                      \
  M(tanh_grad, TanhGrad, 2, floating, "")                      \
  M(sigmoid_grad, SigmoidGrad, 2, floating, "")                \
  M(relu_grad, ReluGrad, 2, number, "")                        \
  M(softplus_grad, SoftplusGrad, 2, floating, "beta threshold")

}  // namespace fulmen::pointwise
