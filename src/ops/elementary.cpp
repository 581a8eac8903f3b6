// Elementary functions of one operand: signs, rounding, powers, exponentials, trigonometry. Integers and bool become f32
// where the function's values aren't integers. Activations of neural networks are in activation.cpp.
#include <numbers>

#include "ops/pointwise_entry.h"

namespace fulmen {

using pointwise::Kind;

std::vector<OpDef> elementary_ops() {
  std::vector<OpDef> ops;
  const auto add = [&](OpDef op) { ops.push_back(std::move(op)); };

  OpDef negation = unary_op({"neg", "-x. The dtype stays; bool is refused.", Kind::number, Autocast::keep, "normal",
                             {"torch.neg", "Tensor.neg", "Tensor.__neg__", "operator.neg", "torch.negative", "Tensor.negative"}},
                            [](Builder& b, ValueId, ValueId, ValueId dy) { return b.neg(dy); });
  negation.shape = pointwise_shape_no_bool(Kind::number);
  negation.samples.bad.push_back({{"of_bool", {"bool[3]"}, {}}, "TypeError", "x is bool; needed a number"});
  add(std::move(negation));

  add(unary_op({"abs", "|x|. The dtype stays. Gradient 0 at 0.", Kind::number, Autocast::keep, "normal",
                {"torch.abs", "Tensor.abs", "Tensor.__abs__", "operator.abs", "torch.absolute"}},
               [](Builder& b, ValueId x, ValueId, ValueId dy) { return b.mul(dy, b.emit1("sign", {x})); }));
  add(unary_op({"sign", "-1, 0 or 1 by the sign of x; NaN stays NaN. The dtype stays. Gradient 0.", Kind::number,
                Autocast::keep, "normal", {"torch.sign", "Tensor.sign"}},
               zero_gradient()));
  add(unary_op({"square", "x * x. The dtype stays; integers wrap.", Kind::number, Autocast::keep, "normal",
                {"torch.square", "Tensor.square"}},
               [](Builder& b, ValueId x, ValueId, ValueId dy) { return b.mul(dy, b.mul(x, 2.0)); }));

  add(unary_op({"floor", "The largest integer not above x; integers stay. Gradient 0.", Kind::number, Autocast::keep,
                "normal", {"torch.floor", "Tensor.floor"}},
               zero_gradient()));
  add(unary_op({"ceil", "The smallest integer not below x; integers stay. Gradient 0.", Kind::number, Autocast::keep,
                "normal", {"torch.ceil", "Tensor.ceil"}},
               zero_gradient()));
  add(unary_op({"trunc", "x without its fraction; integers stay. Gradient 0.", Kind::number, Autocast::keep, "normal",
                {"torch.trunc", "Tensor.trunc", "torch.fix", "Tensor.fix"}},
               zero_gradient()));
  add(unary_op({"round", "The nearest integer, halves to the even one; integers stay. Gradient 0.", Kind::number,
                Autocast::keep, "normal", {"torch.round", "Tensor.round"}},
               zero_gradient()));

  add(unary_op({"exp", "e^x.", Kind::floating, Autocast::fp32, "normal", {"torch.exp", "Tensor.exp"}},
               [](Builder& b, ValueId, ValueId y, ValueId dy) { return b.mul(dy, y); }));
  add(unary_op({"expm1", "e^x - 1, exact near 0.", Kind::floating, Autocast::fp32, "normal", {"torch.expm1", "Tensor.expm1"}},
               [](Builder& b, ValueId, ValueId y, ValueId dy) { return b.mul(dy, b.add(y, 1.0)); }));
  add(unary_op({"log", "The natural logarithm; NaN below 0, -inf at 0.", Kind::floating, Autocast::fp32, "positive",
                {"torch.log", "Tensor.log"}},
               [](Builder& b, ValueId x, ValueId, ValueId dy) { return b.div(dy, x); }));
  add(unary_op({"log1p", "log(1 + x), exact near 0.", Kind::floating, Autocast::fp32, "positive", {"torch.log1p", "Tensor.log1p"}},
               [](Builder& b, ValueId x, ValueId, ValueId dy) { return b.div(dy, b.add(x, 1.0)); }));
  add(unary_op({"log2", "The logarithm to base 2.", Kind::floating, Autocast::fp32, "positive", {"torch.log2", "Tensor.log2"}},
               [](Builder& b, ValueId x, ValueId, ValueId dy) { return b.div(dy, b.mul(x, std::numbers::ln2)); }));
  add(unary_op({"sqrt", "The square root; NaN below 0.", Kind::floating, Autocast::keep, "positive", {"torch.sqrt", "Tensor.sqrt"}},
               [](Builder& b, ValueId, ValueId y, ValueId dy) { return b.div(dy, b.mul(y, 2.0)); }));
  add(unary_op({"rsqrt", "1 / sqrt(x).", Kind::floating, Autocast::fp32, "positive", {"torch.rsqrt", "Tensor.rsqrt"}},
               [](Builder& b, ValueId, ValueId y, ValueId dy) {
                 return b.mul(b.mul(dy, -0.5), b.mul(y, b.emit1("square", {y})));
               }));
  add(unary_op({"reciprocal", "1 / x.", Kind::floating, Autocast::fp32, "nonzero", {"torch.reciprocal", "Tensor.reciprocal"}},
               [](Builder& b, ValueId, ValueId y, ValueId dy) { return b.neg(b.mul(dy, b.emit1("square", {y}))); }));
  add(unary_op({"sin", "The sine of x in radians.", Kind::floating, Autocast::keep, "normal", {"torch.sin", "Tensor.sin"}},
               [](Builder& b, ValueId x, ValueId, ValueId dy) { return b.mul(dy, b.emit1("cos", {x})); }));
  add(unary_op({"cos", "The cosine of x in radians.", Kind::floating, Autocast::keep, "normal", {"torch.cos", "Tensor.cos"}},
               [](Builder& b, ValueId x, ValueId, ValueId dy) { return b.neg(b.mul(dy, b.emit1("sin", {x}))); }));
  add(unary_op({"tan", "The tangent of x in radians.", Kind::floating, Autocast::fp32, "unit", {"torch.tan", "Tensor.tan"}},
               [](Builder& b, ValueId, ValueId y, ValueId dy) { return b.mul(dy, b.add(b.emit1("square", {y}), 1.0)); }));
  add(unary_op({"tanh", "The hyperbolic tangent.", Kind::floating, Autocast::keep, "normal",
                {"torch.tanh", "Tensor.tanh", "torch.nn.functional.tanh"}},
               [](Builder& b, ValueId, ValueId y, ValueId dy) { return b.emit1("tanh_grad", {y, dy}); }));
  add(unary_op({"erf", "The error function, 2/sqrt(pi) times the integral of exp(-t^2) from 0 to x.", Kind::floating,
                Autocast::keep, "normal", {"torch.erf", "Tensor.erf", "torch.special.erf"}},
               [](Builder& b, ValueId x, ValueId, ValueId dy) {
                 const ValueId density = b.exp(b.neg(b.emit1("square", {x})));
                 return b.mul(dy, b.mul(density, 2.0 * std::numbers::inv_sqrtpi));
               }));
  add(unary_op({"sigmoid", "1 / (1 + exp(-x)).", Kind::floating, Autocast::keep, "normal",
                {"torch.sigmoid", "Tensor.sigmoid", "torch.nn.functional.sigmoid", "torch.special.expit"}},
               [](Builder& b, ValueId, ValueId y, ValueId dy) { return b.emit1("sigmoid_grad", {y, dy}); }));
  return ops;
}

}  // namespace fulmen
