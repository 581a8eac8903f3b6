// Arithmetic of two operands: they are broadcast against each other and promoted as PyTorch does. Integers wrap; an
// integer divided by the integer 0 gives 0 (PyTorch raises an error there, which compiled code can't).
#include "ops/pointwise_entry.h"

namespace fulmen {

using pointwise::Kind;

namespace {

// dy where a takes part, half of it where both are equal: the gradient of maximum and minimum for `mine`.
ValueId share_of(Builder& b, const char* wins, ValueId mine, ValueId other, ValueId dy) {
  const ValueId half = b.where(b.emit1("eq", {mine, other}), b.mul(dy, 0.5), number_like(b, dy, 0.0));
  return b.where(b.emit1(wins, {mine, other}), dy, half);
}

GradientRule extremum_gradient(const char* wins) {
  return binary_gradient([wins](Builder& b, ValueId a, ValueId c, ValueId, ValueId dy) { return share_of(b, wins, a, c, dy); },
                         [wins](Builder& b, ValueId a, ValueId c, ValueId, ValueId dy) { return share_of(b, wins, c, a, dy); });
}

ValueId first(Builder&, ValueId, ValueId, ValueId, ValueId dy) { return dy; }

ValueId divide_rounded(Builder& b, ValueId a, ValueId c, const char* rounding) {
  return b.emit1("div", {a, c}, {{"rounding", std::string(rounding)}});
}

OpDef division() {
  const auto shape = [](const CallTypes& call) {
    if (!call.attrs.has("rounding")) return pointwise_shape(Kind::floating)(call);
    const std::string& rounding = call.attrs.get_text("rounding");
    if (rounding != "floor" && rounding != "trunc")
      call.type_error("rounding is \"" + rounding + "\", needed none, \"floor\" or \"trunc\"");
    return pointwise_shape_no_bool(Kind::number)(call);
  };
  const GradientRule plain = binary_gradient(
      [](Builder& b, ValueId, ValueId c, ValueId, ValueId dy) { return b.div(dy, c); },
      [](Builder& b, ValueId, ValueId c, ValueId y, ValueId dy) { return b.neg(b.div(b.mul(dy, y), c)); });
  const GradientRule rule = [plain](Builder& b, const GradientArgs& args) {
    if (args.node.attrs.has("rounding")) return std::vector<ValueId>{no_value, no_value};
    return plain(b, args);
  };
  std::vector<Sample> good = binary_samples("nonzero");
  for (const char* rounding : {"floor", "trunc"}) {
    const Attributes attrs = {{"rounding", std::string(rounding)}};
    good.push_back({std::string(rounding) + "_floats", {"f32[3,5]!", "f32[3,5]!"}, attrs, "nonzero"});
    good.push_back({std::string(rounding) + "_row", {"f64[4,7]!", "f64[7]!"}, attrs, "nonzero"});
    good.push_back({std::string(rounding) + "_integers", {"i32[29]", "i32[29]"}, attrs, "nonzero"});
    good.push_back({std::string(rounding) + "_by_zero", {"i64[41]", "i64[41]"}, attrs, "small_int"});
    good.push_back({std::string(rounding) + "_bytes", {"u8[7]", "u8[7]"}, attrs, "nonzero"});
  }
  return OpDef{{.name = "div"},
               "a / b. Without rounding the result is a float (f32 for two integers); rounding \"floor\" rounds down, "
               "\"trunc\" toward zero, and both keep the promoted dtype and have gradient 0.",
               {{"a"}, {"b"}},
               {{"rounding", AttrKind::text, AttrValue()}},
               shape,
               pointwise_reference("div"),
               rule,
               Autocast::keep,
               {std::move(good),
                {{{"sizes_differ", {"f32[3,4]", "f32[2,4]"}, {}}, "ShapeError", "sizes must be equal or 1, dim -2 has 3 and 2"},
                 {{"rounding", {"f32[3]", "f32[3]"}, {{"rounding", std::string("up")}}},
                  "TypeError",
                  "rounding is \"up\", needed none, \"floor\" or \"trunc\""}}},
               {"torch.div", "Tensor.div", "torch.true_divide", "Tensor.true_divide", "operator.truediv", "Tensor.__truediv__"}};
}

}  // namespace

std::vector<OpDef> arithmetic_ops() {
  std::vector<OpDef> ops;
  const auto add = [&](OpDef op) { ops.push_back(std::move(op)); };

  add(binary_op({"add", "a + b; for bool, or.", Kind::number, Autocast::keep, "normal",
                 {"torch.add", "Tensor.add", "operator.add", "Tensor.__add__"}},
                binary_gradient(first, first)));
  OpDef difference =
      binary_op({"sub", "a - b; two bools are refused.", Kind::number, Autocast::keep, "normal",
                 {"torch.sub", "Tensor.sub", "operator.sub", "Tensor.__sub__", "torch.subtract"}},
                binary_gradient(first, [](Builder& b, ValueId, ValueId, ValueId, ValueId dy) { return b.neg(dy); }));
  difference.shape = pointwise_shape_no_bool(Kind::number);
  difference.samples.bad.push_back({{"of_bools", {"bool[3]", "bool[3]"}, {}}, "TypeError", "a is bool; needed a number"});
  add(std::move(difference));
  add(binary_op({"mul", "a * b; for bool, and.", Kind::number, Autocast::keep, "normal",
                 {"torch.mul", "Tensor.mul", "operator.mul", "Tensor.__mul__", "torch.multiply"}},
                binary_gradient([](Builder& b, ValueId, ValueId c, ValueId, ValueId dy) { return b.mul(dy, c); },
                                [](Builder& b, ValueId a, ValueId, ValueId, ValueId dy) { return b.mul(dy, a); })));
  add(division());
  OpDef quotient = binary_op({"floor_divide", "div with rounding \"floor\" under the name that Python's // has. Gradient 0.", Kind::number,
                              Autocast::keep, "nonzero",
                              {"torch.floor_divide", "Tensor.floor_divide", "operator.floordiv", "Tensor.__floordiv__"}},
                             zero_gradient());
  quotient.shape = pointwise_shape_no_bool(Kind::number);
  add(std::move(quotient));
  add(binary_op({"pow", "a to the power b. Integers stay integers and wrap; a negative integer exponent gives 0 unless a is 1 or -1.",
                 Kind::number, Autocast::fp32, "positive",
                 {"torch.pow", "Tensor.pow", "operator.pow", "Tensor.__pow__"}},
                binary_gradient(
                    [](Builder& b, ValueId a, ValueId c, ValueId, ValueId dy) {
                      const ValueId slope = b.mul(b.emit1("pow", {a, b.add(c, -1.0)}), c);
                      return b.where(compare(b, "eq", c, 0.0), number_like(b, dy, 0.0), b.mul(dy, slope));
                    },
                    [](Builder& b, ValueId a, ValueId c, ValueId y, ValueId dy) {
                      // 0^c is 0 for every c > 0, so its slope is 0 there, not 0 * log(0).
                      const ValueId flat = b.emit1("logical_and", {compare(b, "eq", a, 0.0), compare(b, "ge", c, 0.0)});
                      return b.where(flat, number_like(b, dy, 0.0), b.mul(dy, b.mul(y, b.log(a))));
                    })));
  add(binary_op({"maximum", "The larger of a and b; NaN if either is. Where they are equal, each gets half of the gradient.",
                 Kind::number, Autocast::keep, "normal", {"torch.maximum", "Tensor.maximum"}},
                extremum_gradient("gt")));
  add(binary_op({"minimum", "The smaller of a and b; NaN if either is. Where they are equal, each gets half of the gradient.",
                 Kind::number, Autocast::keep, "normal", {"torch.minimum", "Tensor.minimum"}},
                extremum_gradient("lt")));
  OpDef rest =
      binary_op({"remainder", "a - b floor(a / b): has the sign of b, as Python's %.", Kind::number, Autocast::keep, "nonzero",
                 {"torch.remainder", "Tensor.remainder", "operator.mod", "Tensor.__mod__"}},
                binary_gradient(first, [](Builder& b, ValueId a, ValueId c, ValueId, ValueId dy) {
                  return b.neg(b.mul(dy, divide_rounded(b, a, c, "floor")));
                }));
  rest.shape = pointwise_shape_no_bool(Kind::number);
  add(std::move(rest));
  OpDef c_rest = binary_op({"fmod", "a - b trunc(a / b): has the sign of a, as C's fmod.", Kind::number, Autocast::keep, "nonzero",
                            {"torch.fmod", "Tensor.fmod"}},
                           binary_gradient(first, [](Builder& b, ValueId a, ValueId c, ValueId, ValueId dy) {
                             return b.neg(b.mul(dy, divide_rounded(b, a, c, "trunc")));
                           }));
  c_rest.shape = pointwise_shape_no_bool(Kind::number);
  add(std::move(c_rest));
  // What d atan2 is made of: of / (a^2 + b^2), and 0 at the origin, where the angle has no derivative.
  const auto over_radius = [](Builder& b, ValueId of, ValueId a, ValueId c) {
    const ValueId radius = b.add(b.emit1("square", {a}), b.emit1("square", {c}));
    const ValueId at_origin = compare(b, "eq", radius, 0.0);
    return b.where(at_origin, number_like(b, radius, 0.0), b.div(of, radius));
  };
  add(binary_op({"atan2", "The angle of the point (b, a), in (-pi, pi]. The gradient at the origin is 0.", Kind::floating, Autocast::widest,
                 "nonzero", {"torch.atan2", "Tensor.atan2", "torch.arctan2"}},
                binary_gradient(
                    [over_radius](Builder& b, ValueId a, ValueId c, ValueId, ValueId dy) { return b.mul(dy, over_radius(b, c, a, c)); },
                    [over_radius](Builder& b, ValueId a, ValueId c, ValueId, ValueId dy) {
                      return b.neg(b.mul(dy, over_radius(b, a, a, c)));
                    })));
  return ops;
}

}  // namespace fulmen
