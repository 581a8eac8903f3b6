// Accuracy of the vector functions behind the pointwise ops, in units in the last place of float, against double; special
// values; every instruction set.
#include "ops/table.h"
#include "tests/unit/executors/cpu/tile_cases.h"

namespace fulmen::cpu::tile::testing {
namespace {

using Function = double (*)(double);

struct MathCase {
  const char* op;
  Function exact;
  double low, high;
  double ulps;
  double absolute;  // allowed besides, where the exact result passes through zero by cancellation
};

std::vector<float> run_on(const char* op, const std::vector<float>& x, Isa isa) {
  const std::string spec = "f32[" + std::to_string(x.size()) + "]";
  const Trace trace = make_trace({spec}, [&](Builder& b, const std::vector<ValueId>& in) { return std::vector<ValueId>{b.emit1(op, {in[0]})}; });
  auto compiled = compile_body(trace, isa);
  EXPECT_TRUE(std::holds_alternative<Program>(compiled));
  std::vector<float> y(x.size());
  const void* inputs[] = {x.data()};
  void* outputs[] = {y.data()};
  run(std::get<Program>(compiled), inputs, outputs, nullptr);
  return y;
}

double ulp_of(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::ldexp(1.0, std::max(exponent - 24, -149));
}

TEST(TileMath, WithinFourUlps) {
  const MathCase cases[] = {
      {"exp", [](double x) { return std::exp(x); }, -87, 88.7, 4, 0},
      {"exp", [](double x) { return std::exp(x); }, -104, -87, 4, 3e-45},
      {"expm1", [](double x) { return std::expm1(x); }, -20, 88.5, 4, 0},
      {"expm1", [](double x) { return std::expm1(x); }, -1, 1, 4, 0},
      {"log", [](double x) { return std::log(x); }, 1e-30, 1e30, 4, 0},
      {"log", [](double x) { return std::log(x); }, 0.5, 2, 4, 0},
      {"log1p", [](double x) { return std::log1p(x); }, -0.99, 1e3, 4, 0},
      {"log1p", [](double x) { return std::log1p(x); }, -0.01, 0.01, 4, 0},
      {"log2", [](double x) { return std::log2(x); }, 1e-20, 1e20, 4, 0},
      {"sin", [](double x) { return std::sin(x); }, -100, 100, 4, 0},
      {"sin", [](double x) { return std::sin(x); }, -60000, 60000, 4, 1e-8},
      {"cos", [](double x) { return std::cos(x); }, -100, 100, 4, 0},
      {"cos", [](double x) { return std::cos(x); }, -1e7, 1e7, 4, 1e-8},
      {"tanh", [](double x) { return std::tanh(x); }, -12, 12, 4, 0},
      {"erf", [](double x) { return std::erf(x); }, -5, 5, 4, 0},
      {"sigmoid", [](double x) { return 1 / (1 + std::exp(-x)); }, -80, 40, 6, 0},
      {"sqrt", [](double x) { return std::sqrt(x); }, 0, 1e9, 1, 0},
      {"gelu", [](double x) { return x * 0.5 * std::erfc(-x * 0.70710678118654752); }, -8, 8, 4, 4e-7},
      {"silu", [](double x) { return x / (1 + std::exp(-x)); }, -80, 40, 6, 0},
  };
  std::mt19937_64 generator(17);
  for (Isa isa : available_isas()) {
    if (isa > Isa::avx512) continue;
    for (const MathCase& c : cases) {
      SCOPED_TRACE(std::string(isa_name(isa)) + " " + c.op + " on [" + std::to_string(c.low) + ", " + std::to_string(c.high) + "]");
      std::vector<float> x(20011);
      const bool is_wide = c.low > 0 && c.high / c.low > 1e6;
      for (float& v : x) {
        const double t = std::uniform_real_distribution<double>(0, 1)(generator);
        v = static_cast<float>(is_wide ? c.low * std::pow(c.high / c.low, t) : c.low + (c.high - c.low) * t);
      }
      const std::vector<float> y = run_on(c.op, x, isa);
      double worst = 0;
      float at = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const double exact = c.exact(x[i]);
        const double error = std::max(0.0, std::abs(y[i] - exact) - c.absolute) / ulp_of(exact);
        if (!(error <= worst)) worst = error, at = x[i];
      }
      EXPECT_LE(worst, c.ulps) << "at " << at;
    }
  }
}

TEST(TileMath, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> x = {0.0f, -0.0f, inf, -inf, nan, 1e-45f, -1e-45f, 1e-39f, 3.4e38f, -3.4e38f, 1.0f, -1.0f, 0.5f, 2.0f};
  const std::pair<const char*, Function> cases[] = {
      {"exp", [](double v) { return std::exp(v); }},     {"expm1", [](double v) { return std::expm1(v); }},
      {"log", [](double v) { return std::log(v); }},     {"log1p", [](double v) { return std::log1p(v); }},
      {"log2", [](double v) { return std::log2(v); }},   {"sin", [](double v) { return std::sin(v); }},
      {"cos", [](double v) { return std::cos(v); }},     {"tanh", [](double v) { return std::tanh(v); }},
      {"erf", [](double v) { return std::erf(v); }},     {"sigmoid", [](double v) { return 1 / (1 + std::exp(-v)); }},
      {"sqrt", [](double v) { return std::sqrt(v); }},   {"floor", [](double v) { return std::floor(v); }},
      {"ceil", [](double v) { return std::ceil(v); }},   {"trunc", [](double v) { return std::trunc(v); }},
      {"round", [](double v) { return std::nearbyint(v); }}, {"relu", [](double v) { return v < 0 ? 0 : v; }},
      {"abs", [](double v) { return std::abs(v); }}};
  for (Isa isa : available_isas()) {
    if (isa > Isa::avx512) continue;
    for (const auto& [op, exact] : cases) {
      const std::vector<float> y = run_on(op, x, isa);
      for (size_t i = 0; i < x.size(); ++i) {
        const float want = static_cast<float>(exact(x[i]));
        const bool is_right = std::isnan(want) ? std::isnan(y[i]) : std::isinf(want) ? y[i] == want : std::abs(y[i] - want) <= 1e-6f * std::abs(want) + 3e-45f;
        EXPECT_TRUE(is_right) << isa_name(isa) << " " << op << "(" << x[i] << ") = " << y[i] << ", needed " << want;
      }
    }
  }
}

TEST(TileMath, NanWinsInMaximaAndSums) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (Isa isa : available_isas()) {
    if (isa > Isa::avx512) continue;
    const Trace trace = make_trace({"f32[3,41]"}, [](Builder& b, const std::vector<ValueId>& in) {
      return std::vector<ValueId>{b.amax(in[0], {1}, false), b.emit1("amin", {in[0]}, {{"dims", Dims{1}}}), b.sum(in[0], {1}, false)};
    });
    auto compiled = compile_body(trace, isa);
    ASSERT_TRUE(std::holds_alternative<Program>(compiled));
    std::vector<float> x(3 * 41, 1.0f), high(3), low(3), sum(3);
    x[41 + 40] = nan;
    x[2] = -nan;
    const void* inputs[] = {x.data()};
    void* outputs[] = {high.data(), low.data(), sum.data()};
    run(std::get<Program>(compiled), inputs, outputs, nullptr);
    for (const auto* result : {&high, &low, &sum}) {
      EXPECT_TRUE(std::isnan((*result)[0]) && std::isnan((*result)[1])) << isa_name(isa);
      EXPECT_FALSE(std::isnan((*result)[2])) << isa_name(isa);
    }
  }
}

}  // namespace
}  // namespace fulmen::cpu::tile::testing
