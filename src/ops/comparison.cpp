// Comparisons and tests of values (result bool), logic over "is not 0", and bit operations on integers and bool. None of
// them is differentiable.
#include "ops/families.h"
#include "ops/pointwise_entry.h"
#include "ops/reference_loops.h"
#include "ops/rules/dims.h"

namespace fulmen {

using pointwise::Kind;

namespace {

NotDifferentiable bool_result() { return {"its result is a bool"}; }

OpDef comparison(const char* name, const char* doc, std::vector<std::string> torch) {
  OpDef op = binary_op({name, doc, Kind::comparison, Autocast::keep, "small_int", std::move(torch)}, bool_result());
  op.samples.good.push_back({"bools", {"bool[5]", "bool[5]"}, {}});
  return op;
}

OpDef logic(const char* name, const char* doc, std::vector<std::string> torch) {
  OpDef op = binary_op({name, doc, Kind::logical, Autocast::keep, "small_int", std::move(torch)}, bool_result());
  op.samples.good.push_back({"bools", {"bool[2,5]", "bool[5]"}, {}});
  return op;
}

// Bitwise ops have no floats, hence no shared body: on bool, ~ is not.
OpDef bitwise(const char* name, const char* doc, size_t operands, int64_t (*apply)(int64_t, int64_t), std::vector<std::string> torch) {
  std::vector<OperandDef> names = operands == 1 ? std::vector<OperandDef>{{"x"}} : std::vector<OperandDef>{{"a"}, {"b"}};
  std::vector<Sample> good;
  std::vector<BadSample> bad;
  if (operands == 1) {
    good = {{"bools", {"bool[2,5]"}, {}}, {"i64", {"i64[7]{stride=2}"}, {}}, {"u8", {"u8[9]"}, {}}, {"scalar", {"i32[]"}, {}}, {"empty", {"bool[0]"}, {}}};
    bad = {{{"floats", {"f32[3]"}, {}}, "TypeError", "x is f32; needed bool or an integer dtype"}};
  } else {
    good = {{"bools", {"bool[2,5]", "bool[5]"}, {}},
            {"bool_and_integer", {"bool[3]", "i32[3]"}, {}},
            {"i64", {"i64[7]{stride=2}", "i64[7]"}, {}},
            {"mixed_bytes", {"u8[9]", "i8[9]"}, {}},
            {"strided", {"i32[3,4]{stride=1,3}", "i32[3,4]{stride=0,1}"}, {}},
            {"empty", {"bool[0,2]", "bool[2]"}, {}}};
    bad = {{{"floats", {"i64[3]", "f32[3]"}, {}}, "TypeError", "b is f32; needed bool or an integer dtype"},
           {{"sizes_differ", {"i64[3]", "i64[2]"}, {}}, "ShapeError", "a is [3], b is [2]; sizes must be equal or 1"}};
  }
  return OpDef{{.name = name},
               doc,
               std::move(names),
               /*attributes=*/{},
               [](const CallTypes& call) -> std::vector<TensorType> {
                 for (size_t i = 0; i < call.inputs.size(); ++i)
                   if (is_float(call[i].dtype))
                     call.type_error(operand_name(call.op, i) + " is " + std::string(dtype_name(call[i].dtype)) +
                                     "; needed bool or an integer dtype");
                 return {result_type(promoted_dtype(call.inputs), broadcast_all(call))};
               },
               Primitive{[apply](const ReferenceArgs& args) {
                 HostTensor& out = args.outputs[0];
                 std::vector<const Dims*> shapes;
                 for (const HostTensor* input : args.inputs) shapes.push_back(&input->type.shape);
                 const bool negates_bool = args.inputs.size() == 1 && out.type.dtype == DType::boolean;
                 for_each_broadcast(out.type.shape, shapes, [&](int64_t linear, const std::vector<int64_t>& at) {
                   const int64_t a = args.inputs[0]->i[static_cast<size_t>(at[0])];
                   const int64_t b = args.inputs.size() > 1 ? args.inputs[1]->i[static_cast<size_t>(at[1])] : 0;
                   out.i[static_cast<size_t>(linear)] = negates_bool ? a == 0 : wrap_integer(apply(a, b), out.type.dtype);
                 });
               }},
               NotDifferentiable{"its result is an integer or a bool"},
               Autocast::keep,
               {std::move(good), std::move(bad)},
               std::move(torch)};
}

}  // namespace

std::vector<OpDef> comparison_ops() {
  std::vector<OpDef> ops;
  const auto add = [&](OpDef op) { ops.push_back(std::move(op)); };
  add(comparison("eq", "a == b; NaN equals nothing.", {"torch.eq", "Tensor.eq", "operator.eq"}));
  add(comparison("ne", "a != b; true for NaN.", {"torch.ne", "Tensor.ne", "operator.ne"}));
  add(comparison("lt", "a < b.", {"torch.lt", "Tensor.lt", "operator.lt"}));
  add(comparison("le", "a <= b.", {"torch.le", "Tensor.le", "operator.le"}));
  add(comparison("gt", "a > b.", {"torch.gt", "Tensor.gt", "operator.gt"}));
  add(comparison("ge", "a >= b.", {"torch.ge", "Tensor.ge", "operator.ge"}));

  add(unary_op({"isnan", "Whether x is NaN.", Kind::comparison, Autocast::keep, "normal", {"torch.isnan", "Tensor.isnan"}}, bool_result()));
  add(unary_op({"isinf", "Whether x is inf or -inf.", Kind::comparison, Autocast::keep, "normal", {"torch.isinf", "Tensor.isinf"}},
               bool_result()));
  add(unary_op({"isfinite", "Whether x is neither NaN nor infinite.", Kind::comparison, Autocast::keep, "normal",
                {"torch.isfinite", "Tensor.isfinite"}},
               bool_result()));

  add(unary_op({"logical_not", "Whether x is 0.", Kind::logical, Autocast::keep, "small_int", {"torch.logical_not", "Tensor.logical_not"}},
               bool_result()));
  add(logic("logical_and", "Whether neither a nor b is 0.", {"torch.logical_and", "Tensor.logical_and"}));
  add(logic("logical_or", "Whether a or b is not 0.", {"torch.logical_or", "Tensor.logical_or"}));
  add(logic("logical_xor", "Whether exactly one of a and b is not 0.", {"torch.logical_xor", "Tensor.logical_xor"}));

  add(bitwise("bitwise_not", "All bits of x turned over; for bool, not.", 1, [](int64_t a, int64_t) { return ~a; },
              {"torch.bitwise_not", "Tensor.bitwise_not", "operator.invert", "Tensor.__invert__"}));
  add(bitwise("bitwise_and", "The bits that a and b share; for bool, and.", 2, [](int64_t a, int64_t b) { return a & b; },
              {"torch.bitwise_and", "Tensor.bitwise_and", "operator.and_", "Tensor.__and__"}));
  add(bitwise("bitwise_or", "The bits of a or b; for bool, or.", 2, [](int64_t a, int64_t b) { return a | b; },
              {"torch.bitwise_or", "Tensor.bitwise_or", "operator.or_", "Tensor.__or__"}));
  add(bitwise("bitwise_xor", "The bits of either a or b; for bool, exclusive or.", 2, [](int64_t a, int64_t b) { return a ^ b; },
              {"torch.bitwise_xor", "Tensor.bitwise_xor", "operator.xor", "Tensor.__xor__"}));
  return ops;
}

}  // namespace fulmen
