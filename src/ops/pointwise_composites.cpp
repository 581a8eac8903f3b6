// Pointwise ops that are short formulas of others. They compute in f32 at least and round once, and fuse into one kernel
// as everything pointwise does, so a primitive of their own would gain nothing.
#include <limits>
#include <numbers>

#include "ops/axes.h"
#include "ops/pointwise_entry.h"
#include "ops/rules/dims.h"

namespace fulmen {

using pointwise::Kind;

namespace {

using Formula = std::function<ValueId(Builder&, ValueId x, const Attributes&)>;

// dx from dy, in the dtype that the formula computes in.
using Slope = std::function<ValueId(Builder&, ValueId x, ValueId dy, const Attributes&)>;

GradientRule slope_rule(Slope slope) {
  return [slope = std::move(slope)](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
    if (!args.need[0] || args.output_grads[0] == no_value) return {no_value};
    const DType wide = compute_dtype(float_result(b.type(args.inputs[0]).dtype));
    const ValueId dx = slope(b, b.convert(args.inputs[0], wide), b.convert(args.output_grads[0], wide), args.node.attrs);
    return {for_operand(b, args, 0, dx)};
  };
}

// y = formula(x) in x's float dtype, in f32 for 16-bit floats, integers and bool. A slope is given where the formula's own
// gradient would be wrong at single points: 0 times infinity, or a bound that two pieces share.
OpDef formula_op(const char* name, const char* doc, const char* domain, std::vector<AttrDef> attributes, Formula formula,
                 std::vector<std::string> torch, Autocast autocast = Autocast::keep, Slope slope = nullptr) {
  std::vector<Sample> good = unary_samples(domain);
  std::variant<GradientRule, NotDifferentiable, ByDecomposition> gradient = ByDecomposition{};
  if (slope) gradient = slope_rule(std::move(slope));
  return OpDef{{.name = name},
               doc,
               {{"x"}},
               std::move(attributes),
               pointwise_shape(Kind::floating),
               Decomposition{[formula = std::move(formula)](Builder& b, const Node& node) -> std::vector<ValueId> {
                 const DType result = float_result(b.type(node.inputs[0]).dtype);
                 const ValueId x = b.convert(node.inputs[0], compute_dtype(result));
                 return {b.convert(formula(b, x, node.attrs), result)};
               }},
               std::move(gradient),
               autocast,
               {std::move(good), {{{"two_operands", {"f32[2]", "f32[2]"}, {}}, "TypeError", "got 2 operands, takes at most 1"}}},
               std::move(torch)};
}

AttrDef number_attribute(const char* name, double fallback) { return {name, AttrKind::number, AttrValue(fallback)}; }

ValueId square(Builder& b, ValueId x) { return b.emit1("square", {x}); }
ValueId root(Builder& b, ValueId x) { return b.emit1("sqrt", {x}); }
ValueId clamp(Builder& b, ValueId x, double low, double high) { return b.emit1("clamp", {x}, {{"min", low}, {"max", high}}); }
// Where low < x < high or x is NaN, dy; 0 elsewhere, at the bounds too.
ValueId between(Builder& b, ValueId x, ValueId dy, double low, double high) {
  return b.where(b.emit1("logical_or", {compare(b, "le", x, low), compare(b, "ge", x, high)}), number_like(b, dy, 0.0), dy);
}
// log(2 x) for x so large that x^2 + 1 is x^2, `otherwise` elsewhere: squares overflow there.
ValueId log_of_double_if_large(Builder& b, ValueId x, ValueId otherwise) {
  return b.where(compare(b, "gt", x, 1e10), b.add(b.log(x), std::numbers::ln2), otherwise);
}
ValueId cosine_of_arcsine(Builder& b, ValueId x) { return root(b, b.mul(one_minus(b, x), b.add(x, 1.0))); }

std::vector<OpDef> inverse_and_hyperbolic() {
  std::vector<OpDef> ops;
  const auto add = [&](OpDef op) { ops.push_back(std::move(op)); };
  add(formula_op("asin", "The angle in [-pi/2, pi/2] whose sine is x; NaN outside [-1, 1].", "unit", {},
                 [](Builder& b, ValueId x, const Attributes&) { return b.emit1("atan2", {x, cosine_of_arcsine(b, x)}); },
                 {"torch.asin", "Tensor.asin", "torch.arcsin"}, Autocast::fp32,
                 [](Builder& b, ValueId x, ValueId dy, const Attributes&) { return b.div(dy, cosine_of_arcsine(b, x)); }));
  add(formula_op("acos", "The angle in [0, pi] whose cosine is x; NaN outside [-1, 1].", "unit", {},
                 [](Builder& b, ValueId x, const Attributes&) { return b.emit1("atan2", {cosine_of_arcsine(b, x), x}); },
                 {"torch.acos", "Tensor.acos", "torch.arccos"}, Autocast::fp32,
                 [](Builder& b, ValueId x, ValueId dy, const Attributes&) { return b.neg(b.div(dy, cosine_of_arcsine(b, x))); }));
  add(formula_op("atan", "The angle in (-pi/2, pi/2) whose tangent is x.", "normal", {},
                 [](Builder& b, ValueId x, const Attributes&) { return b.emit1("atan2", {x, number_like(b, x, 1.0)}); },
                 {"torch.atan", "Tensor.atan", "torch.arctan"}));
  add(formula_op("sinh", "(e^x - e^-x) / 2, exact near 0.", "normal", {},
                 [](Builder& b, ValueId x, const Attributes&) {
                   return b.mul(b.sub(b.emit1("expm1", {x}), b.emit1("expm1", {b.neg(x)})), 0.5);
                 },
                 {"torch.sinh", "Tensor.sinh"}, Autocast::fp32));
  add(formula_op("cosh", "(e^x + e^-x) / 2.", "normal", {},
                 [](Builder& b, ValueId x, const Attributes&) { return b.mul(b.add(b.exp(x), b.exp(b.neg(x))), 0.5); },
                 {"torch.cosh", "Tensor.cosh"}, Autocast::fp32));
  add(formula_op("asinh", "The number whose sinh is x: sign(x) log1p(|x| + x^2 / (1 + sqrt(x^2 + 1))).", "nonzero", {},
                 [](Builder& b, ValueId x, const Attributes&) {
                   const ValueId x2 = square(b, x), size = b.emit1("abs", {x});
                   const ValueId rest = b.div(x2, b.add(root(b, b.add(x2, 1.0)), 1.0));
                   return b.mul(b.emit1("sign", {x}), log_of_double_if_large(b, size, b.emit1("log1p", {b.add(size, rest)})));
                 },
                 {"torch.asinh", "Tensor.asinh", "torch.arcsinh"}, Autocast::keep,
                 [](Builder& b, ValueId x, ValueId dy, const Attributes&) { return b.div(dy, root(b, b.add(square(b, x), 1.0))); }));
  add(formula_op("acosh", "The number >= 0 whose cosh is x: log(x + sqrt(x - 1) sqrt(x + 1)); NaN below 1.", "above_one", {},
                 [](Builder& b, ValueId x, const Attributes&) {
                   return log_of_double_if_large(b, x, b.log(b.add(x, b.mul(root(b, b.add(x, -1.0)), root(b, b.add(x, 1.0))))));
                 },
                 {"torch.acosh", "Tensor.acosh", "torch.arccosh"}, Autocast::keep,
                 [](Builder& b, ValueId x, ValueId dy, const Attributes&) {
                   return b.div(dy, b.mul(root(b, b.add(x, -1.0)), root(b, b.add(x, 1.0))));
                 }));
  add(formula_op("atanh", "The number whose tanh is x: log1p(2 x / (1 - x)) / 2; NaN outside [-1, 1].", "unit", {},
                 [](Builder& b, ValueId x, const Attributes&) {
                   return b.mul(b.emit1("log1p", {b.div(b.mul(x, 2.0), one_minus(b, x))}), 0.5);
                 },
                 {"torch.atanh", "Tensor.atanh", "torch.arctanh"}, Autocast::keep,
                 [](Builder& b, ValueId x, ValueId dy, const Attributes&) { return b.div(dy, b.mul(one_minus(b, x), b.add(x, 1.0))); }));
  add(formula_op("exp2", "2^x.", "normal", {},
                 [](Builder& b, ValueId x, const Attributes&) { return b.exp(b.mul(x, std::numbers::ln2)); },
                 {"torch.exp2", "Tensor.exp2", "torch.special.exp2"}));
  add(formula_op("log10", "The logarithm to base 10.", "positive", {},
                 [](Builder& b, ValueId x, const Attributes&) { return b.mul(b.log(x), std::numbers::log10e); },
                 {"torch.log10", "Tensor.log10"}, Autocast::fp32));
  return ops;
}

std::vector<OpDef> further_activations() {
  std::vector<OpDef> ops;
  const auto add = [&](OpDef op) { ops.push_back(std::move(op)); };
  add(formula_op("relu6", "min(max(x, 0), 6). The gradient at the bounds is 0.", "normal", {},
                 [](Builder& b, ValueId x, const Attributes&) { return clamp(b, x, 0.0, 6.0); }, {}, Autocast::keep,
                 [](Builder& b, ValueId x, ValueId dy, const Attributes&) { return between(b, x, dy, 0.0, 6.0); }));
  add(formula_op("hardtanh", "min(max(x, min_val), max_val). The gradient at the bounds is 0.", "normal", {number_attribute("min_val", -1.0), number_attribute("max_val", 1.0)},
                 [](Builder& b, ValueId x, const Attributes& attrs) { return clamp(b, x, attrs.get_float("min_val"), attrs.get_float("max_val")); },
                 {}, Autocast::keep, [](Builder& b, ValueId x, ValueId dy, const Attributes& attrs) {
                   return between(b, x, dy, attrs.get_float("min_val"), attrs.get_float("max_val"));
                 }));
  add(formula_op("hardsigmoid", "min(max(x + 3, 0), 6) / 6. The gradient at the bounds is 0.", "normal", {},
                 [](Builder& b, ValueId x, const Attributes&) { return b.mul(clamp(b, b.add(x, 3.0), 0.0, 6.0), 1.0 / 6.0); },
                 {"torch.nn.functional.hardsigmoid"}, Autocast::keep,
                 [](Builder& b, ValueId x, ValueId dy, const Attributes&) { return b.mul(between(b, x, dy, -3.0, 3.0), 1.0 / 6.0); }));
  add(formula_op("hardswish", "x min(max(x + 3, 0), 6) / 6.", "normal", {},
                 [](Builder& b, ValueId x, const Attributes&) { return b.mul(b.mul(x, clamp(b, b.add(x, 3.0), 0.0, 6.0)), 1.0 / 6.0); },
                 {"torch.nn.functional.hardswish"}));
  add(formula_op("mish", "x tanh(softplus(x)).", "normal", {},
                 [](Builder& b, ValueId x, const Attributes&) { return b.mul(x, b.emit1("tanh", {b.emit1("softplus", {x})})); },
                 {"torch.nn.functional.mish"}));
  add(formula_op("selu", "1.0507 times (x where x > 0, 1.6733 (e^x - 1) elsewhere), with the constants to double precision.", "normal", {},
                 [](Builder& b, ValueId x, const Attributes&) {
                   return b.mul(b.emit1("elu", {x}, {{"alpha", 1.6732632423543772848170429916717}}), 1.0507009873554804934193349852946);
                 },
                 {"torch.nn.functional.selu", "torch.selu"}));
  add(formula_op("celu", "x where x > 0, alpha (e^(x / alpha) - 1) elsewhere.", "normal", {number_attribute("alpha", 1.0)},
                 [](Builder& b, ValueId x, const Attributes& attrs) {
                   const double alpha = attrs.get_float("alpha");
                   return b.mul(b.emit1("elu", {b.mul(x, 1.0 / alpha)}), alpha);
                 },
                 {"torch.nn.functional.celu", "torch.celu"}));
  add(formula_op("softsign", "x / (1 + |x|).", "normal", {},
                 [](Builder& b, ValueId x, const Attributes&) { return b.div(x, b.add(b.emit1("abs", {x}), 1.0)); },
                 {"torch.nn.functional.softsign"}));
  return ops;
}

// Two operands, broadcast, in the promoted float dtype.
OpDef pair_formula(const char* name, const char* doc, ValueId (*formula)(Builder&, ValueId, ValueId), std::vector<std::string> torch) {
  return OpDef{{.name = name},
               doc,
               {{"a"}, {"b"}},
               /*attributes=*/{},
               pointwise_shape(Kind::floating),
               Decomposition{[formula](Builder& b, const Node& node) -> std::vector<ValueId> {
                 const TensorType* types[] = {&b.trace().type(node.inputs[0]), &b.trace().type(node.inputs[1])};
                 const DType result = float_result(promoted_dtype(types)), wide = compute_dtype(result);
                 return {b.convert(formula(b, b.convert(node.inputs[0], wide), b.convert(node.inputs[1], wide)), result)};
               }},
               ByDecomposition{},
               Autocast::keep,
               {binary_samples("nonzero"),
                {{{"sizes_differ", {"f32[3,4]", "f32[2,4]"}, {}}, "ShapeError", "a is [3,4], b is [2,4]; sizes must be equal or 1"}}},
               std::move(torch)};
}

OpDef nan_to_num() {
  return OpDef{{.name = "nan_to_num"},
               "x with NaN replaced by nan, inf by posinf and -inf by neginf; the largest and lowest number of the dtype if none.",
               {{"x"}},
               {number_attribute("nan", 0.0), {"posinf", AttrKind::number, AttrValue()}, {"neginf", AttrKind::number, AttrValue()}},
               [](const CallTypes& call) -> std::vector<TensorType> {
                 need_float(call, 0);
                 return {result_type(call[0].dtype, call[0].shape)};
               },
               Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
                 const ValueId x = node.inputs[0];
                 const DType dtype = b.type(x).dtype;
                 const double largest = dtype == DType::f64    ? std::numeric_limits<double>::max()
                                        : dtype == DType::f32  ? static_cast<double>(std::numeric_limits<float>::max())
                                        : dtype == DType::bf16 ? 0x1.FEp127
                                                               : 65504.0;
                 const double infinite = std::numeric_limits<double>::infinity();
                 const double above = node.attrs.has("posinf") ? node.attrs.get_float("posinf") : largest;
                 const double below = node.attrs.has("neginf") ? node.attrs.get_float("neginf") : -largest;
                 ValueId y = b.where(b.emit1("isnan", {x}), number_like(b, x, node.attrs.get_float("nan")), x);
                 y = b.where(compare(b, "eq", x, infinite), number_like(b, x, above), y);
                 return {b.where(compare(b, "eq", x, -infinite), number_like(b, x, below), y)};
               }},
               ByDecomposition{},
               Autocast::keep,
               {{{"plain", {"f32[3,5]!"}, {}}, {"bounds", {"bf16[9]!"}, {{"nan", 1.0}, {"posinf", 2.0}, {"neginf", -2.0}}}},
                {{{"integers", {"i64[3]"}, {}}, "TypeError", "nan_to_num: x is i64, needed a float dtype"}}},
               {"torch.nan_to_num", "Tensor.nan_to_num"}};
}

}  // namespace

std::vector<OpDef> pointwise_composites() {
  std::vector<OpDef> ops = inverse_and_hyperbolic();
  for (OpDef& op : further_activations()) ops.push_back(std::move(op));
  ops.push_back(pair_formula(
      "logaddexp", "log(e^a + e^b), without overflow.",
      [](Builder& b, ValueId x, ValueId y) {
        const ValueId gap = b.neg(b.emit1("abs", {b.sub(x, y)}));
        return b.add(b.emit1("maximum", {x, y}), b.emit1("log1p", {b.exp(gap)}));
      },
      {"torch.logaddexp", "Tensor.logaddexp"}));
  ops.push_back(pair_formula(
      "hypot", "sqrt(a^2 + b^2).", [](Builder& b, ValueId x, ValueId y) { return root(b, b.add(square(b, x), square(b, y))); },
      {"torch.hypot", "Tensor.hypot"}));
  ops.push_back(nan_to_num());
  return ops;
}

}  // namespace fulmen
