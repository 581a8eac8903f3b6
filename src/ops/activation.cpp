// Activation functions and their one-instruction gradients, which are ops of their own so that a backward pass reads as
// one line and every executor computes it in one go. Each has a gradient in turn, so second derivatives work.
#include <numbers>

#include "ops/pointwise_entry.h"
#include "ops/rules/dims.h"

namespace fulmen {

using pointwise::Kind;

namespace {

// Shape rule of gelu and gelu_grad: also checks `approximate`.
ShapeRule gelu_shape() {
  return [inner = pointwise_shape(Kind::floating)](const CallTypes& call) {
    const std::string& approximate = call.attrs.get_text("approximate");
    if (approximate != "none" && approximate != "tanh")
      call.type_error("approximate is \"" + approximate + "\", needed \"none\" or \"tanh\"");
    return inner(call);
  };
}

std::vector<Sample> with(std::vector<Sample> samples, std::vector<Sample> more) {
  for (Sample& sample : more) samples.push_back(std::move(sample));
  return samples;
}

// f'' of gelu, in x's dtype. With phi the normal density: phi(x) (2 - x^2). For the tanh form with u = k (x + c x^3) and
// t = tanh(u): (1 - t^2) (u' + x u''/2 - x t u'^2).
ValueId gelu_curvature(Builder& b, ValueId x, bool tanh_form) {
  const ValueId x2 = b.emit1("square", {x});
  if (!tanh_form) {
    const ValueId density = b.mul(b.exp(b.mul(x2, -0.5)), std::numbers::inv_sqrtpi / std::numbers::sqrt2);
    return b.mul(density, b.add(b.neg(x2), 2.0));
  }
  const double k = pointwise::sqrt_two_over_pi, c = pointwise::gelu_cubic;
  const ValueId u = b.mul(b.mul(x, b.add(b.mul(x2, c), 1.0)), k);
  const ValueId t = b.emit1("tanh", {u});
  const ValueId slope = b.mul(b.add(b.mul(x2, 3.0 * c), 1.0), k);
  const ValueId bend = b.mul(x2, 3.0 * k * c);  // x u'' / 2, u'' = 6 k c x
  const ValueId last = b.mul(b.mul(x, t), b.emit1("square", {slope}));
  return b.mul(one_minus(b, b.emit1("square", {t})), b.sub(b.add(slope, bend), last));
}

// The entry of a gradient op g(x, dy), linear in dy: its own gradient is g(x, .) for dy, and dy * grad * curvature for x.
OpDef gradient_op(const char* name, const char* doc, std::vector<OperandDef> operands, std::vector<AttrDef> attributes,
                  ShapeRule shape, GradientRule gradient, std::vector<Sample> good) {
  return OpDef{{.name = name},
               doc,
               std::move(operands),
               std::move(attributes),
               std::move(shape),
               pointwise_reference(name),
               std::move(gradient),
               Autocast::keep,
               {std::move(good),
                {{{"sizes_differ", {"f32[3]", "f32[2]"}, {}}, "ShapeError", "sizes must be equal or 1, dim -1 has 3 and 2"},
                 {{"one_operand", {"f32[3]"}, {}}, "TypeError", "operand 'dy' is not given"}}},
               /*torch=*/{}};
}

// Samples of g(x, dy): equal shapes, and dy with stride 0 as the gradient of a sum has it.
std::vector<Sample> gradient_samples(const Attributes& attrs = {}, const std::string& domain = "normal") {
  return {
      {"plain", {"f32[3,5]!", "f32[3,5]!"}, attrs, domain},
      {"scalar", {"f32[]!", "f32[]!"}, attrs, domain},
      {"empty", {"f32[0,4]!", "f32[0,4]!"}, attrs, domain},
      {"gradient_of_sum", {"f32[4,7]!", "f32[4,7]{stride=0,0}!"}, attrs, domain},
      {"transposed", {"f32[5,3]{stride=1,5}!", "f32[5,3]!"}, attrs, domain},
      {"bf16", {"bf16[2,19]!", "bf16[2,19]!"}, attrs, domain},
      {"f64", {"f64[17]!", "f64[17]!"}, attrs, domain},
  };
}

// gradient of g(x, dy) = dy f'(x) given curvature(b, x) = f''(x)
GradientRule second_order(const char* name, std::function<ValueId(Builder&, const GradientArgs&)> curvature) {
  return [name, curvature = std::move(curvature)](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
    std::vector<ValueId> grads = {no_value, no_value};
    const ValueId grad = args.output_grads[0];
    if (grad == no_value) return grads;
    if (args.need[0]) grads[0] = for_operand(b, args, 0, b.mul(b.mul(grad, args.inputs[1]), curvature(b, args)));
    if (args.need[1]) grads[1] = for_operand(b, args, 1, b.emit1(name, {args.inputs[0], grad}, args.node.attrs));
    return grads;
  };
}

OpDef gelu() {
  const Attributes tanh_form = {{"approximate", std::string("tanh")}};
  return OpDef{
      {.name = "gelu"},
      "x Phi(x) with Phi the normal distribution function; with approximate=\"tanh\" the form "
      "0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).",
      {{"x"}},
      {{"approximate", AttrKind::text, AttrValue(std::string("none"))}},
      gelu_shape(),
      pointwise_reference("gelu"),
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        if (!args.need[0] || args.output_grads[0] == no_value) return {no_value};
        return {for_operand(b, args, 0, b.emit1("gelu_grad", {args.inputs[0], args.output_grads[0]}, args.node.attrs))};
      }),
      Autocast::keep,
      {with(unary_samples("normal"), {{"tanh_form", {"f32[3,5]!"}, tanh_form},
                                      {"tanh_form_bf16", {"bf16[2,37]!"}, tanh_form},
                                      {"tanh_form_f64", {"f64[13]!"}, tanh_form}}),
       {{{"approximate", {"f32[2]"}, {{"approximate", std::string("erf")}}},
         "TypeError",
         "approximate is \"erf\", needed \"none\" or \"tanh\""}}},
      {"torch.nn.functional.gelu", "torch._C._nn.gelu"}};
}

OpDef softplus() {
  const std::vector<AttrDef> attributes = {{"beta", AttrKind::number, AttrValue(1.0)}, {"threshold", AttrKind::number, AttrValue(20.0)}};
  return OpDef{
      {.name = "softplus"},
      "log(1 + exp(beta x)) / beta; x itself where beta x > threshold.",
      {{"x"}},
      attributes,
      pointwise_shape(Kind::floating),
      pointwise_reference("softplus"),
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        if (!args.need[0] || args.output_grads[0] == no_value) return {no_value};
        return {for_operand(b, args, 0, b.emit1("softplus_grad", {args.inputs[0], args.output_grads[0]}, args.node.attrs))};
      }),
      Autocast::fp32,
      {with(unary_samples("normal"), {{"steep", {"f32[3,5]!"}, {{"beta", 3.0}, {"threshold", 2.0}}}}),
       {{{"beta_is_text", {"f32[2]"}, {{"beta", std::string("one")}}}, "TypeError", "beta is \"one\", needed a number"}}},
      {"torch.nn.functional.softplus", "torch._C._nn.softplus"}};
}

OpDef leaky_relu() {
  return OpDef{
      {.name = "leaky_relu"},
      "x where x >= 0, negative_slope * x elsewhere.",
      {{"x"}},
      {{"negative_slope", AttrKind::number, AttrValue(0.01)}},
      pointwise_shape(Kind::floating),
      pointwise_reference("leaky_relu"),
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const ValueId dy = args.output_grads[0];
        if (!args.need[0] || dy == no_value) return {no_value};
        const double slope = args.node.attrs.get_float("negative_slope");
        return {for_operand(b, args, 0, b.where(compare(b, "gt", args.inputs[0], 0.0), dy, b.mul(dy, slope)))};
      }),
      Autocast::keep,
      {with(unary_samples("normal"), {{"steep", {"f32[3,5]!"}, {{"negative_slope", 0.3}}}}),
       {{{"unknown", {"f32[2]"}, {{"slope", 0.1}}}, "TypeError", "there is no attribute 'slope'"}}},
      {"torch.nn.functional.leaky_relu", "torch._C._nn.leaky_relu"}};
}

OpDef elu() {
  return OpDef{
      {.name = "elu"},
      "x where x > 0, alpha (exp(x) - 1) elsewhere.",
      {{"x"}},
      {{"alpha", AttrKind::number, AttrValue(1.0)}},
      pointwise_shape(Kind::floating),
      pointwise_reference("elu"),
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const ValueId dy = args.output_grads[0];
        if (!args.need[0] || dy == no_value) return {no_value};
        const ValueId below = b.add(args.outputs[0], args.node.attrs.get_float("alpha"));  // alpha exp(x)
        return {for_operand(b, args, 0, b.where(compare(b, "gt", args.inputs[0], 0.0), dy, b.mul(dy, below)))};
      }),
      Autocast::keep,
      {with(unary_samples("normal"), {{"alpha", {"f32[3,5]!"}, {{"alpha", 1.7}}}}),
       {{{"unknown", {"f32[2]"}, {{"scale", 0.1}}}, "TypeError", "there is no attribute 'scale'"}}},
      {"torch.nn.functional.elu"}};
}

}  // namespace

std::vector<OpDef> activation_ops() {
  std::vector<OpDef> ops;
  const auto add = [&](OpDef op) { ops.push_back(std::move(op)); };

  add(unary_op({"relu", "x where x > 0, 0 elsewhere; NaN stays NaN. The dtype stays. Gradient 0 at 0.", Kind::number,
                Autocast::keep, "normal", {"torch.relu", "Tensor.relu", "torch.nn.functional.relu", "torch.relu_"}},
               [](Builder& b, ValueId, ValueId y, ValueId dy) { return b.emit1("relu_grad", {y, dy}); }));
  add(gelu());
  add(unary_op({"silu", "x * sigmoid(x).", Kind::floating, Autocast::keep, "normal",
                {"torch.nn.functional.silu", "torch._C._nn.silu"}},
               [](Builder& b, ValueId x, ValueId, ValueId dy) { return b.emit1("silu_grad", {x, dy}); }));
  add(unary_op({"log_sigmoid", "log(sigmoid(x)), without overflow.", Kind::floating, Autocast::keep, "normal",
                {"torch.nn.functional.logsigmoid"}},
               [](Builder& b, ValueId x, ValueId, ValueId dy) { return b.mul(dy, b.emit1("sigmoid", {b.neg(x)})); }));
  add(softplus());
  add(leaky_relu());
  add(elu());

  const std::vector<AttrDef> approximate = {{"approximate", AttrKind::text, AttrValue(std::string("none"))}};
  const Attributes tanh_form = {{"approximate", std::string("tanh")}};
  add(gradient_op("gelu_grad", "dy times the derivative of gelu at x.", {{"x"}, {"dy"}}, approximate, gelu_shape(),
                  second_order("gelu_grad",
                               [](Builder& b, const GradientArgs& args) {
                                 return gelu_curvature(b, args.inputs[0], args.node.attrs.get_text("approximate") == "tanh");
                               }),
                  with(gradient_samples(), {{"tanh_form", {"f32[3,5]!", "f32[3,5]!"}, tanh_form}})));
  add(gradient_op("silu_grad", "dy times the derivative of silu at x: s (1 + x (1 - s)) with s = sigmoid(x).", {{"x"}, {"dy"}}, {}, pointwise_shape(Kind::floating),
                  second_order("silu_grad",
                               [](Builder& b, const GradientArgs& args) {
                                 const ValueId x = args.inputs[0], s = b.emit1("sigmoid", {x});
                                 const ValueId bracket = b.add(b.mul(x, b.add(b.mul(s, -2.0), 1.0)), 2.0);
                                 return b.mul(b.mul(s, one_minus(b, s)), bracket);
                               }),
                  gradient_samples()));
  add(gradient_op("tanh_grad", "dy (1 - y^2), y the result of tanh.", {{"y"}, {"dy"}}, {},
                  pointwise_shape(Kind::floating),
                  second_order("tanh_grad", [](Builder& b, const GradientArgs& args) { return b.mul(args.inputs[0], -2.0); }),
                  gradient_samples()));
  add(gradient_op("sigmoid_grad", "dy y (1 - y), y the result of sigmoid.", {{"y"}, {"dy"}}, {},
                  pointwise_shape(Kind::floating),
                  second_order("sigmoid_grad",
                               [](Builder& b, const GradientArgs& args) { return b.add(b.mul(args.inputs[0], -2.0), 1.0); }),
                  gradient_samples()));
  add(gradient_op("relu_grad", "dy where x > 0, 0 elsewhere; x is the operand or the result of relu.", {{"x"}, {"dy"}},
                  {}, pointwise_shape(Kind::number),
                  GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
                    std::vector<ValueId> grads = {no_value, no_value};
                    const ValueId grad = args.output_grads[0];
                    if (args.need[1] && grad != no_value)
                      grads[1] = for_operand(b, args, 1, b.emit1("relu_grad", {args.inputs[0], grad}));
                    return grads;
                  }),
                  gradient_samples()));
  add(gradient_op("softplus_grad", "dy times the derivative of softplus at x: sigmoid(beta x), 1 where beta x > threshold.",
                  {{"x"}, {"dy"}},
                  {{"beta", AttrKind::number, AttrValue(1.0)}, {"threshold", AttrKind::number, AttrValue(20.0)}},
                  pointwise_shape(Kind::floating),
                  second_order("softplus_grad",
                               [](Builder& b, const GradientArgs& args) {
                                 const double beta = args.node.attrs.get_float("beta");
                                 const ValueId z = b.mul(args.inputs[0], beta);
                                 const ValueId s = b.emit1("sigmoid", {z});
                                 const ValueId bend = b.mul(b.mul(s, one_minus(b, s)), beta);
                                 const ValueId straight = compare(b, "gt", z, args.node.attrs.get_float("threshold"));
                                 return b.where(straight, number_like(b, bend, 0.0), bend);
                               }),
                  with(gradient_samples(), {{"steep", {"f32[3,5]!", "f32[3,5]!"}, {{"beta", 3.0}, {"threshold", 2.0}}}})));
  return ops;
}

}  // namespace fulmen
