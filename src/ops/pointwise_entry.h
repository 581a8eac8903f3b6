// How entries of pointwise ops are put together: the shape rule of a kind, the reference from the shared bodies
// (ops/pointwise_bodies.h), gradients that come out in the operand's shape and dtype, and the samples that every
// pointwise op has. The entries are in pointwise.cpp, elementary.cpp, activation.cpp and comparison.cpp.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/builder.h"
#include "ops/op_def.h"
#include "ops/pointwise_bodies.h"

namespace fulmen {

// The body that computes a call: the op's own name, or what its attributes choose (gelu with approximate="tanh" is
// gelu_tanh, div with rounding="floor" is floor_divide). Empty if the op has no body.
std::string_view pointwise_body_name(std::string_view op, const Attributes& attrs);

// Result types by kind: broadcast operands, promoted dtype. `kind` number refuses nothing; see refuse_bool.
ShapeRule pointwise_shape(pointwise::Kind kind);
// The same for ops that bool has no meaning for: "neg: x is bool; needed a number".
ShapeRule pointwise_shape_no_bool(pointwise::Kind kind);

// Reference of the op `op`: its body in double for floats, in int64 (wrapping) for integers.
Primitive pointwise_reference(std::string op);

// Gradient of a one-operand op from dx = slope(builder, x, y, dy).
using UnarySlope = std::function<ValueId(Builder&, ValueId x, ValueId y, ValueId dy)>;
GradientRule unary_gradient(UnarySlope slope);

// Gradients of a two-operand op, each in the broadcast shape; they are summed to the operand's shape.
using BinarySlope = std::function<ValueId(Builder&, ValueId a, ValueId b, ValueId y, ValueId dy)>;
GradientRule binary_gradient(BinarySlope for_a, BinarySlope for_b);

// A rule for ops whose gradient is zero wherever it exists (floor, sign): no operand gets one.
GradientRule zero_gradient();

// The gradient in the shape and dtype of operand i.
ValueId for_operand(Builder& b, const GradientArgs& args, size_t i, ValueId grad);

// Calls that every op with these many float operands takes: scalar, empty, one element, transposed, gaps, stride 0, the
// 16-bit formats, integers, broadcasting.
std::vector<Sample> unary_samples(const std::string& domain, const Attributes& attrs = {});
std::vector<Sample> binary_samples(const std::string& domain, const Attributes& attrs = {}, bool gradient = true);

struct PointwiseSpec {
  const char* name;
  const char* doc;
  pointwise::Kind kind;
  Autocast autocast;
  const char* domain;
  std::vector<std::string> torch;
};
OpDef unary_op(PointwiseSpec spec, UnarySlope slope);
OpDef unary_op(PointwiseSpec spec, GradientRule rule);
OpDef unary_op(PointwiseSpec spec, NotDifferentiable reason);
OpDef binary_op(PointwiseSpec spec, std::variant<GradientRule, NotDifferentiable, ByDecomposition> gradient);

// Numbers beside a value: 1 - x, x <= number as bool, and so on, in x's dtype.
ValueId one_minus(Builder& b, ValueId x);
ValueId number_like(Builder& b, ValueId x, double value);
ValueId compare(Builder& b, std::string_view op, ValueId x, double value);

std::vector<OpDef> elementary_ops();
std::vector<OpDef> arithmetic_ops();
std::vector<OpDef> activation_ops();
std::vector<OpDef> pointwise_composites();

}  // namespace fulmen
