// Pointwise ops: here those that select, bound and convert; the rest of the family is in elementary.cpp (one operand),
// arithmetic.cpp (two operands), activation.cpp and, as formulas of others, pointwise_composites.cpp. Comparisons and
// logic are in comparison.cpp.
#include "ops/families.h"
#include "ops/pointwise_entry.h"
#include "ops/reference_loops.h"
#include "ops/rules/dims.h"

namespace fulmen {

using pointwise::Kind;

namespace {

OpDef where_op() {
  return OpDef{
      {.name = "where"},
      "a where condition (bool) is true, else b; all three are broadcast. The dtype is a's and b's promoted one.",
      {{"condition"}, {"a"}, {"b"}},
      /*attributes=*/{},
      [](const CallTypes& call) -> std::vector<TensorType> {
        need_bool(call, 0);
        const std::vector<const TensorType*> values = {call.inputs[1], call.inputs[2]};
        return {result_type(promoted_dtype(values), broadcast_all(call))};
      },
      pointwise_reference("where"),
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(3, no_value);
        const ValueId dy = args.output_grads[0];
        if (dy == no_value) return grads;
        const ValueId zero = number_like(b, dy, 0.0);
        if (args.need[1]) grads[1] = for_operand(b, args, 1, b.where(args.inputs[0], dy, zero));
        if (args.need[2]) grads[2] = for_operand(b, args, 2, b.where(args.inputs[0], zero, dy));
        return grads;
      }),
      Autocast::keep,
      {{{"plain", {"bool[3,5]", "f32[3,5]!", "f32[3,5]!"}, {}},
        {"scalar", {"bool[]", "f32[]!", "f32[]!"}, {}},
        {"empty", {"bool[0,3]", "f32[1,3]!", "f32[]!"}, {}},
        {"mask_row", {"bool[7]", "f32[4,7]!", "f32[]!"}, {}},
        {"wide_mask", {"bool[2,3,5]", "f32[5]!", "f32[3,1]!"}, {}},
        {"strided", {"bool[5,3]{stride=1,5}", "f32[5,3]{stride=0,1}!", "f32[5,3]{stride=7,2}!"}, {}},
        {"bf16", {"bool[2,19]", "bf16[2,19]!", "bf16[19]!"}, {}},
        {"mixed", {"bool[5]", "bf16[5]!", "f32[5]!"}, {}},
        {"integers", {"bool[5]", "i64[5]", "i32[1]"}, {}},
        {"bools", {"bool[5]", "bool[5]", "bool[]"}, {}}},
       {{{"float_condition", {"f32[3]", "f32[3]", "f32[3]"}, {}}, "TypeError", "where: condition is f32, needed bool"},
        {{"sizes_differ", {"bool[3]", "f32[4]", "f32[4]"}, {}}, "ShapeError", "condition is [3], a is [4]; sizes must be equal or 1"}}},
      {"torch.where"}};
}

OpDef clamp_op() {
  const auto shape = [](const CallTypes& call) -> std::vector<TensorType> {
    if (!call.attrs.has("min") && !call.attrs.has("max")) call.type_error("min and max are none, needed at least one of them");
    DType dtype = call[0].dtype;
    if (dtype == DType::boolean) call.type_error("x is bool; needed a number");
    for (const char* bound : {"min", "max"})
      if (!is_float(dtype) && call.attrs.has(bound) && std::holds_alternative<double>(*call.attrs.find(bound))) dtype = DType::f32;
    return {result_type(dtype, call[0].shape)};
  };
  return OpDef{
      {.name = "clamp"},
      "min(max(x, min), max); a bound that is none doesn't bound, NaN stays NaN. An integer x with a float bound gives f32. "
      "The gradient passes where min <= x <= max.",
      {{"x"}},
      {{"min", AttrKind::number, AttrValue()}, {"max", AttrKind::number, AttrValue()}},
      shape,
      pointwise_reference("clamp"),
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const ValueId x = args.inputs[0], dy = args.output_grads[0];
        if (!args.need[0] || dy == no_value) return {no_value};
        ValueId open = no_value;
        if (args.node.attrs.has("min")) open = compare(b, "ge", x, args.node.attrs.get_float("min"));
        if (args.node.attrs.has("max")) {
          const ValueId below = compare(b, "le", x, args.node.attrs.get_float("max"));
          open = open == no_value ? below : b.emit1("logical_and", {open, below});
        }
        return {for_operand(b, args, 0, b.where(open, dy, number_like(b, dy, 0.0)))};
      }),
      Autocast::keep,
      {{{"both", {"f32[3,5]!"}, {{"min", -0.5}, {"max", 0.75}}},
        {"lower", {"f32[3,5]{stride=1,3}!"}, {{"min", 0.1}}},
        {"upper", {"bf16[21]!"}, {{"max", 0.0}}},
        {"f64", {"f64[13]!"}, {{"min", -1.0}, {"max", 1.0}}},
        {"empty", {"f32[0]!"}, {{"min", 0.0}}},
        {"scalar", {"f32[]!"}, {{"min", 0.0}}},
        {"integers", {"i64[9]"}, {{"min", int64_t{-1}}, {"max", int64_t{2}}}},
        {"integers_by_float", {"i32[9]"}, {{"min", 0.5}}}},
       {{{"no_bound", {"f32[3]"}, {}}, "TypeError", "clamp: min and max are none, needed at least one of them"},
        {{"of_bool", {"bool[3]"}, {{"min", 0.0}}}, "TypeError", "x is bool; needed a number"}}},
      {"torch.clamp", "Tensor.clamp", "torch.clip", "Tensor.clip"}};
}

OpDef convert_op() {
  return OpDef{
      {.name = "convert"},
      "x in another dtype. Floats round to nearest even, floats become integers by dropping the fraction, anything but 0 is "
      "true; integers wrap.",
      {{"x"}},
      {{"dtype", AttrKind::dtype, std::nullopt}},
      [](const CallTypes& call) -> std::vector<TensorType> { return {result_type(call.attrs.get_dtype("dtype"), call[0].shape)}; },
      Primitive{[](const ReferenceArgs& args) {
        const int64_t count = args.inputs[0]->type.element_count();
        for (int64_t k = 0; k < count; ++k) copy_element(*args.inputs[0], k, args.outputs[0], k);
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        if (!args.need[0] || args.output_grads[0] == no_value) return {no_value};
        return {for_operand(b, args, 0, args.output_grads[0])};
      }),
      Autocast::keep,
      {{{"to_bf16", {"f32[3,5]!"}, {{"dtype", DType::bf16}}},
        {"to_f16", {"f32[2,3]{stride=1,2}!"}, {{"dtype", DType::f16}}},
        {"to_f32", {"bf16[7]!"}, {{"dtype", DType::f32}}},
        {"to_f64", {"f32[]!"}, {{"dtype", DType::f64}}},
        {"same", {"f32[4]{stride=2}!"}, {{"dtype", DType::f32}}},
        {"to_integer", {"f32[9]"}, {{"dtype", DType::i32}}},
        {"to_bytes", {"i64[9]"}, {{"dtype", DType::u8}}},
        {"to_bool", {"i32[9]"}, {{"dtype", DType::boolean}}},
        {"float_to_bool", {"f32[9]"}, {{"dtype", DType::boolean}}},
        {"from_bool", {"bool[3,3]"}, {{"dtype", DType::bf16}}},
        {"empty", {"f32[0]!"}, {{"dtype", DType::bf16}}}},
       {{{"no_dtype", {"f32[3]"}, {}}, "TypeError", "convert: attribute 'dtype' is not given"}}},
      {"Tensor.to", "Tensor.type"}};
}

OpDef detach_op() {
  return OpDef{{.name = "detach"},
               "x itself, through which no gradient flows.",
               {{"x"}},
               /*attributes=*/{},
               [](const CallTypes& call) -> std::vector<TensorType> { return {result_type(call[0].dtype, call[0].shape)}; },
               Primitive{[](const ReferenceArgs& args) {
                 args.outputs[0].f = args.inputs[0]->f;
                 args.outputs[0].i = args.inputs[0]->i;
               }},
               NotDifferentiable{"it stops the gradient"},
               Autocast::keep,
               {unary_samples("normal"), {{{"two_operands", {"f32[2]", "f32[2]"}, {}}, "TypeError", "takes at most 1"}}},
               {"torch.detach", "Tensor.detach"}};
}

OpDef masked_fill_op() {
  return OpDef{
      {.name = "masked_fill"},
      "value where mask (bool, broadcast with x) is true, else x. The dtype is x's.",
      {{"x"}, {"mask"}},
      {{"value", AttrKind::number, std::nullopt}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        need_bool(call, 1);
        return {result_type(call[0].dtype, broadcast_all(call))};
      },
      Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const ValueId x = node.inputs[0];
        return {b.where(node.inputs[1], number_like(b, x, node.attrs.get_float("value")), x)};
      }},
      ByDecomposition{},
      Autocast::keep,
      {{{"plain", {"f32[3,5]!", "bool[3,5]"}, {{"value", -2.5}}},
        {"row", {"f32[2,3,4]!", "bool[3,1]"}, {{"value", -std::numeric_limits<double>::infinity()}}},
        {"widens", {"bf16[4]!", "bool[3,4]"}, {{"value", int64_t{1}}}},
        {"transposed", {"f32[5,2]{stride=1,5}!", "bool[5,2]{stride=0,1}"}, {{"value", 0.0}}},
        {"scalar", {"f32[]!", "bool[]"}, {{"value", 3.0}}},
        {"empty", {"f32[0,2]!", "bool[2]"}, {{"value", 3.0}}},
        {"integers", {"i64[5]", "bool[5]"}, {{"value", int64_t{-100}}}}},
       {{{"integer_mask", {"f32[3]", "i64[3]"}, {{"value", 0.0}}}, "TypeError", "masked_fill: mask is i64, needed bool"},
        {{"sizes_differ", {"f32[3]", "bool[2]"}, {{"value", 0.0}}}, "ShapeError", "x is [3], mask is [2]; sizes must be equal or 1"},
        {{"no_value", {"f32[3]", "bool[3]"}, {}}, "TypeError", "attribute 'value' is not given"}}},
      {"torch.masked_fill", "Tensor.masked_fill"}};
}

OpDef lerp_op() {
  return OpDef{
      {.name = "lerp"},
      "start + weight (end - start), all broadcast.",
      {{"start"}, {"end"}, {"weight"}},
      /*attributes=*/{},
      [](const CallTypes& call) -> std::vector<TensorType> {
        for (size_t i = 0; i < 3; ++i) need_float(call, i);
        return {result_type(promoted_dtype(call.inputs), broadcast_all(call))};
      },
      Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        return {b.add(node.inputs[0], b.mul(node.inputs[2], b.sub(node.inputs[1], node.inputs[0])))};
      }},
      ByDecomposition{},
      Autocast::keep,
      {{{"plain", {"f32[3,5]!", "f32[3,5]!", "f32[3,5]!"}, {}},
        {"one_weight", {"f32[3,5]!", "f32[5]!", "f32[]!"}, {}},
        {"bf16", {"bf16[7]!", "bf16[7]!", "bf16[7]!"}, {}},
        {"empty", {"f32[0]!", "f32[1]!", "f32[]!"}, {}}},
       {{{"integers", {"i64[3]", "f32[3]", "f32[3]"}, {}}, "TypeError", "lerp: start is i64, needed a float dtype"}}},
      {"torch.lerp", "Tensor.lerp"}};
}

}  // namespace

std::vector<OpDef> pointwise_ops() {
  std::vector<OpDef> ops = elementary_ops();
  for (auto* part : {arithmetic_ops, activation_ops, pointwise_composites})
    for (OpDef& op : part()) ops.push_back(std::move(op));
  for (auto* entry : {where_op, clamp_op, convert_op, detach_op, masked_fill_op, lerp_op}) ops.push_back(entry());
  return ops;
}

}  // namespace fulmen
