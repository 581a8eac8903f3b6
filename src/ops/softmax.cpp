// softmax and log_softmax: composites whose gradients need their results only. Computed in f32 for 16-bit floats, so that
// one fused kernel reads a row, keeps it in cache and rounds once. The softmax of attention is in attention.cpp.
#include "ops/axes.h"
#include "ops/families.h"

namespace fulmen {
namespace {

DType softmax_dtype(const CallTypes& call) {
  const DType dtype = dtype_attribute(call.attrs, "dtype").value_or(call[0].dtype);
  if (!is_float(dtype))
    call.type_error("x has dtype " + text_of(call[0].dtype) + (call.attrs.has("dtype") ? ", dtype is " + text_of(dtype) : "") +
                    "; needed a float dtype, or dtype=f32");
  return dtype;
}

std::vector<TensorType> softmax_shape(const CallTypes& call) {
  checked_dim(call, call.attrs.get_int("dim"), call[0].rank());
  return {contiguous_type(softmax_dtype(call), call[0].shape)};
}

struct Line {
  ValueId shifted;  // x - max
  ValueId powers;   // exp of it
  ValueId total;    // their sum
  DType result;
};

// The parts of both ops. A maximum of nothing doesn't exist, so an empty dim goes without.
Line parts(Builder& b, const Node& node) {
  const TensorType type = b.type(node.inputs[0]);
  const DType result = dtype_attribute(node.attrs, "dtype").value_or(type.dtype);
  const ValueId x = b.convert(b.convert(node.inputs[0], result), compute_dtype(result));
  if (type.rank() == 0) {
    const ValueId shifted = b.sub(x, x);
    const ValueId powers = b.exp(shifted);
    return {shifted, powers, powers, result};
  }
  const Dims dims{dim_of(node.attrs, type.rank())};
  const ValueId shifted = type.element_count() == 0 ? x : b.sub(x, b.amax(x, dims, true));
  const ValueId powers = b.exp(shifted);
  return {shifted, powers, b.sum(powers, dims, true), result};
}

// Gradient of x from that of its softmax input: `value` is in the compute dtype.
ValueId finish(Builder& b, const GradientArgs& args, ValueId value) { return b.convert(value, b.type(args.inputs[0]).dtype); }

Samples softmax_samples() {
  return {{{"last", {"f32[5,17]"}, {{"dim", int64_t{-1}}}},
           {"first", {"f32[5,7]"}, {{"dim", int64_t{0}}}},
           {"middle", {"f32[2,13,3]"}, {{"dim", int64_t{1}}}},
           {"one_column", {"f32[5,1]"}, {{"dim", int64_t{1}}}},
           {"scalar", {"f32[]"}, {{"dim", int64_t{0}}}},
           {"no_rows", {"f32[0,7]"}, {{"dim", int64_t{1}}}},
           {"no_columns", {"f32[3,0]"}, {{"dim", int64_t{1}}}},
           {"long_row", {"f32[2,1031]"}, {{"dim", int64_t{1}}}},
           {"transposed", {"f32[5,7]{stride=1,5}"}, {{"dim", int64_t{1}}}},
           {"row_gaps", {"f32[4,11]{stride=16,1}"}, {{"dim", int64_t{1}}}},
           {"expanded", {"f32[4,6]{stride=0,1}"}, {{"dim", int64_t{1}}}},
           {"bf16", {"bf16[3,67]"}, {{"dim", int64_t{1}}}},
           {"f16", {"f16[3,19]"}, {{"dim", int64_t{1}}}},
           {"widened", {"bf16[3,19]"}, {{"dim", int64_t{1}}, {"dtype", DType::f32}}},
           {"integers", {"i32[3,5]"}, {{"dim", int64_t{1}}, {"dtype", DType::f32}}},
           {"f64", {"f64[3,5]"}, {{"dim", int64_t{1}}}}},
          {{{"dim_too_large", {"f32[5,7]"}, {{"dim", int64_t{2}}}}, "ShapeError", "dim is 2, x has 2 dims"},
           {{"integers", {"i64[5]"}, {{"dim", int64_t{0}}}}, "TypeError", "x has dtype i64"}}};
}

std::vector<AttrDef> softmax_attributes() {
  return {{"dim", AttrKind::integer, std::nullopt}, {"dtype", AttrKind::dtype, std::monostate{}}};
}

}  // namespace

std::vector<OpDef> softmax_ops() {
  std::vector<OpDef> ops;
  ops.push_back({
      {.name = "softmax"},
      /*doc=*/
      "exp(x - m) / sum(exp(x - m)) along dim, m the maximum. With dtype, x is converted first. A line of -inf gives NaN, as in "
      "PyTorch. Gradient: y (g - sum(g y)).",
      /*operands=*/{{"x"}},
      /*attributes=*/softmax_attributes(),
      /*shape=*/softmax_shape,
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const Line line = parts(b, node);
        return {b.convert(b.div(line.powers, line.total), line.result)};
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const TensorType type = b.type(args.outputs[0]);
        const DType dtype = compute_dtype(type.dtype);
        const ValueId y = b.convert(args.outputs[0], dtype), g = b.convert(args.output_grads[0], dtype);
        const ValueId product = b.mul(g, y);
        const ValueId total = type.rank() == 0 ? product : b.sum(product, {dim_of(args.node.attrs, type.rank())}, true);
        return {finish(b, args, b.mul(y, b.sub(g, total)))};
      }},
      /*autocast=*/Autocast::fp32_on_cuda,
      softmax_samples(),
      /*torch=*/{"torch.softmax", "Tensor.softmax"},
  });
  ops.push_back({
      {.name = "log_softmax"},
      /*doc=*/
      "log(softmax(x)) along dim, as x - m - log(sum(exp(x - m))), m the maximum. With dtype, x is converted first. Gradient: "
      "g - exp(y) sum(g).",
      /*operands=*/{{"x"}},
      /*attributes=*/softmax_attributes(),
      /*shape=*/softmax_shape,
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const Line line = parts(b, node);
        return {b.convert(b.sub(line.shifted, b.log(line.total)), line.result)};
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const TensorType type = b.type(args.outputs[0]);
        const DType dtype = compute_dtype(type.dtype);
        const ValueId p = b.exp(b.convert(args.outputs[0], dtype)), g = b.convert(args.output_grads[0], dtype);
        const ValueId total = type.rank() == 0 ? g : b.sum(g, {dim_of(args.node.attrs, type.rank())}, true);
        return {finish(b, args, b.sub(g, b.mul(p, total)))};
      }},
      /*autocast=*/Autocast::fp32_on_cuda,
      softmax_samples(),
      /*torch=*/{"torch.log_softmax", "Tensor.log_softmax"},
  });
  return ops;
}

}  // namespace fulmen
