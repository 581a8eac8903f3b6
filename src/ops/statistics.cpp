// Composites over reductions: var, std, logsumexp, norm. 16-bit floats are computed in f32 and rounded once. The plain
// reductions are in reduction.cpp.
#include <cmath>
#include <limits>

#include "ops/families.h"
#include "ops/reduction_rules.h"

namespace fulmen {

std::vector<OpDef> statistics_ops();

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

DType float_dtype(const CallTypes& call) {
  need_float(call, 0);
  return call[0].dtype;
}

// x in its compute dtype minus its mean over dims.
ValueId centred(Builder& b, ValueId x, const Dims& dims) {
  const ValueId wide = b.convert(x, compute_dtype(b.type(x).dtype));
  return b.sub(wide, b.emit1("mean", {wide}, {{"dims", dims}, {"keepdim", true}}));
}

// max(0, count - correction)
double degrees_of_freedom(const TensorType& x, const Attributes& attrs) {
  const int64_t count = size_of_dims(x.shape, accepted_dims(attrs.get_dims("dims"), x.rank()));
  return std::max(0.0, static_cast<double>(count) - attrs.get_float("correction"));
}

ValueId variance(Builder& b, ValueId x, const Attributes& attrs) {
  const ValueId d = centred(b, x, attrs.get_dims("dims"));
  const ValueId total = b.sum(b.mul(d, d), attrs.get_dims("dims"), attrs.get_bool("keepdim"));
  return b.div(total, b.number(degrees_of_freedom(b.type(x), attrs), b.type(d).dtype));
}

// d var / d x = 2 (x - mean) / (count - correction); `grad` broadcasts against x, in the compute dtype.
ValueId variance_gradient(Builder& b, ValueId x, const Attributes& attrs, ValueId grad) {
  const ValueId d = centred(b, x, attrs.get_dims("dims"));
  const ValueId scaled = b.mul(grad, b.number(2.0 / degrees_of_freedom(b.type(x), attrs), b.type(d).dtype));
  return b.convert(b.mul(d, scaled), b.type(x).dtype);
}

std::vector<AttrDef> moment_attributes() {
  return {{"dims", AttrKind::dims, Dims{}}, {"correction", AttrKind::number, 1.0}, {"keepdim", AttrKind::boolean, false}};
}

Samples moment_samples() {
  return {{{"all", {"f32[5,7]"}, {}},
           {"last", {"f32[5,7]"}, {{"dims", Dims{-1}}}},
           {"biased_kept", {"f32[3,11]"}, {{"dims", Dims{0}}, {"correction", 0.0}, {"keepdim", true}}},
           {"two_dims", {"f32[2,13,3]"}, {{"dims", Dims{0, 2}}}},
           {"transposed", {"f32[5,7]{stride=1,5}"}, {{"dims", Dims{1}}}},
           {"bf16", {"bf16[3,67]"}, {{"dims", Dims{1}}}},
           {"f64", {"f64[3,5]"}, {{"dims", Dims{1}}}}},
          {{{"integers", {"i64[4]"}, {}}, "TypeError", "needed a float dtype"},
           {{"dim_too_large", {"f32[4]"}, {{"dims", Dims{1}}}}, "ShapeError", "dims is 1, x has 1 dims"}}};
}

// amax over dims with infinities replaced by 0, so that subtracting it never makes a NaN.
ValueId finite_maximum(Builder& b, ValueId x, const Dims& dims) {
  const ValueId top = b.amax(x, dims, true);
  return b.where(b.emit1("isinf", {top}), b.number(0.0, b.type(x).dtype), top);
}

OpDef logsumexp_op() {
  return {
      {.name = "logsumexp"},
      /*doc=*/
      "log(sum(exp(x))) over dims, shifted by the maximum so that it never overflows: log(sum(exp(x - m))) + m. A line of -inf "
      "(or nothing) gives -inf, with gradient 0.",
      /*operands=*/{{"x"}},
      /*attributes=*/{{"dims", AttrKind::dims, Dims{}}, {"keepdim", AttrKind::boolean, false}},
      /*shape=*/reduction_shape(float_dtype, true),
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const TensorType type = b.type(node.inputs[0]);
        const Dims& dims = node.attrs.get_dims("dims");
        const Dims shape = reduced_shape(type.shape, accepted_dims(dims, type.rank()), node.attrs.get_bool("keepdim"));
        const ValueId x = b.convert(node.inputs[0], compute_dtype(type.dtype));
        if (type.element_count() == 0)  // a maximum of nothing does not exist
          return {b.convert(b.log(b.sum(b.exp(x), dims, node.attrs.get_bool("keepdim"))), type.dtype)};
        const ValueId top = finite_maximum(b, x, dims);
        const ValueId result = b.add(b.log(b.sum(b.exp(b.sub(x, top)), dims, true)), top);
        return {b.convert(b.reshape(result, shape), type.dtype)};
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const TensorType type = b.type(args.inputs[0]);
        const Dims& dims = args.node.attrs.get_dims("dims");
        const DType dtype = compute_dtype(type.dtype);
        const ValueId x = b.convert(args.inputs[0], dtype);
        const ValueId lse = keep_reduced(b, b.convert(args.outputs[0], dtype), type.shape, dims);
        const ValueId closed = b.emit1("eq", {lse, b.number(-infinity, dtype)});
        const ValueId p = b.exp(b.sub(x, b.where(closed, b.number(0.0, dtype), lse)));
        const ValueId grad = keep_reduced(b, b.convert(args.output_grads[0], dtype), type.shape, dims);
        return {b.convert(b.mul(p, grad), type.dtype)};
      }},
      /*autocast=*/Autocast::fp32_on_cuda,
      /*samples=*/
      {{{"all", {"f32[5,7]"}, {}},
        {"last", {"f32[5,17]"}, {{"dims", Dims{-1}}}},
        {"kept", {"f32[3,11]"}, {{"dims", Dims{0}}, {"keepdim", true}}},
        {"nothing", {"f32[3,0]"}, {{"dims", Dims{1}}}},
        {"transposed", {"f32[5,7]{stride=1,5}"}, {{"dims", Dims{1}}}},
        {"bf16", {"bf16[3,67]"}, {{"dims", Dims{1}}}},
        {"f64", {"f64[3,5]"}, {{"dims", Dims{1}}}}},
       {{{"integers", {"i64[4]"}, {}}, "TypeError", "needed a float dtype"}}},
      /*torch=*/{"torch.logsumexp", "Tensor.logsumexp"},
  };
}

ValueId vector_norm(Builder& b, ValueId x, double order, const Dims& dims, bool keepdim) {
  const DType dtype = b.type(x).dtype;
  if (order == 2.0) return b.emit1("sqrt", {b.sum(b.mul(x, x), dims, keepdim)});
  const ValueId size = b.emit1("abs", {x});
  if (order == infinity) return b.amax(size, dims, keepdim);
  if (order == -infinity) return b.emit1("amin", {size}, {{"dims", dims}, {"keepdim", keepdim}});
  if (order == 1.0) return b.sum(size, dims, keepdim);
  if (order == 0.0) return b.sum(b.convert(b.emit1("ne", {x, b.number(0.0, dtype)}), dtype), dims, keepdim);
  const ValueId powers = b.emit1("pow", {size, b.number(order, dtype)});
  return b.emit1("pow", {b.sum(powers, dims, keepdim), b.number(1.0 / order, dtype)});
}

// 0 where `at` is 0, else value / at.
ValueId divide_or_zero(Builder& b, ValueId value, ValueId at) {
  const DType dtype = b.type(at).dtype;
  const ValueId zero = b.number(0.0, dtype);
  const ValueId is_zero = b.emit1("eq", {at, zero});
  return b.where(is_zero, zero, b.div(value, b.where(is_zero, b.number(1.0, dtype), at)));
}

ValueId vector_norm_gradient(Builder& b, ValueId x, ValueId norm, ValueId grad, double order, const Dims& dims) {
  const DType dtype = b.type(x).dtype;
  const Dims shape = b.type(x).shape;
  if (order == 0.0) return full_on(b, shape, 0.0, dtype, x);
  if (order == 2.0) return b.mul(x, divide_or_zero(b, grad, norm));
  const ValueId sign = b.emit1("sign", {x});
  if (order == 1.0) return b.mul(sign, grad);
  const ValueId size = b.emit1("abs", {x});
  if (std::isinf(order)) {
    const ValueId hit = b.emit1("eq", {size, norm});
    const ValueId count = b.sum(b.convert(hit, dtype), dims, true);
    return b.mul(sign, b.where(hit, b.div(grad, count), b.number(0.0, dtype)));
  }
  // sign(x) |x|^(p-1) / norm^(p-1); written with the ratio, which is at most 1 for p > 1
  const ValueId ratio = divide_or_zero(b, size, norm);
  const ValueId zero = b.number(0.0, dtype);
  const ValueId safe = b.where(b.emit1("eq", {ratio, zero}), b.number(1.0, dtype), ratio);
  return b.mul(b.mul(sign, b.emit1("pow", {safe, b.number(order - 1.0, dtype)})), grad);
}

OpDef norm_op() {
  return {
      {.name = "norm"},
      /*doc=*/
      "Vector norm of x over dims (all if the list is empty): (sum |x|^ord)^(1/ord); ord inf and -inf give the largest and the "
      "smallest |x|, 0 counts nonzero elements. dtype converts x first. The gradient is 0 where the norm is 0.",
      /*operands=*/{{"x"}},
      /*attributes=*/
      {{"ord", AttrKind::number, 2.0},
       {"dims", AttrKind::dims, Dims{}},
       {"keepdim", AttrKind::boolean, false},
       {"dtype", AttrKind::dtype, std::monostate{}}},
      /*shape=*/
      [](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        const auto dtype = dtype_attribute(call.attrs, "dtype");
        if (dtype && !is_float(*dtype)) call.type_error("dtype is " + text_of(*dtype) + ", needed a float dtype");
        const bool takes_empty = !std::isinf(call.attrs.get_float("ord"));
        return reduction_shape([&](const CallTypes&) { return dtype.value_or(call[0].dtype); }, takes_empty)(call);
      },
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const DType dtype = dtype_attribute(node.attrs, "dtype").value_or(b.type(node.inputs[0]).dtype);
        const ValueId x = b.convert(node.inputs[0], compute_dtype(dtype));
        return {b.convert(vector_norm(b, x, node.attrs.get_float("ord"), node.attrs.get_dims("dims"), node.attrs.get_bool("keepdim")),
                          dtype)};
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const TensorType type = b.type(args.inputs[0]);
        const Dims& dims = args.node.attrs.get_dims("dims");
        const DType dtype = compute_dtype(b.type(args.outputs[0]).dtype);
        const ValueId x = b.convert(args.inputs[0], dtype);
        const ValueId norm = keep_reduced(b, b.convert(args.outputs[0], dtype), type.shape, dims);
        const ValueId grad = keep_reduced(b, b.convert(args.output_grads[0], dtype), type.shape, dims);
        return {b.convert(vector_norm_gradient(b, x, norm, grad, args.node.attrs.get_float("ord"), dims), type.dtype)};
      }},
      /*autocast=*/Autocast::fp32_on_cuda,
      /*samples=*/
      {{{"all", {"f32[5,7]"}, {}},
        {"last", {"f32[5,17]"}, {{"dims", Dims{-1}}}},
        {"first_order", {"f32[3,11]"}, {{"ord", 1.0}, {"dims", Dims{0}}, {"keepdim", true}}, "nonzero"},
        {"third_order", {"f32[3,11]"}, {{"ord", 3.0}, {"dims", Dims{1}}}, "nonzero"},
        {"largest", {"f32[3,11]"}, {{"ord", infinity}, {"dims", Dims{1}}}, "nonzero"},
        {"smallest", {"f32[3,11]"}, {{"ord", -infinity}, {"dims", Dims{1}}}, "nonzero"},
        {"nothing", {"f32[3,0]"}, {{"dims", Dims{1}}}},
        {"transposed", {"f32[5,7]{stride=1,5}"}, {{"dims", Dims{1}}}},
        {"bf16", {"bf16[3,67]"}, {{"dims", Dims{1}}}},
        {"widened", {"bf16[3,67]"}, {{"dims", Dims{1}}, {"dtype", DType::f32}}}},
       {{{"integers", {"i64[4]"}, {}}, "TypeError", "needed a float dtype"},
        {{"largest_of_nothing", {"f32[3,0]"}, {{"ord", infinity}, {"dims", Dims{1}}}}, "ShapeError", "dim 1 has size 0"}}},
      /*torch=*/{"torch.linalg.vector_norm"},
  };
}

}  // namespace

std::vector<OpDef> statistics_ops() {
  std::vector<OpDef> ops;
  ops.push_back({
      {.name = "var"},
      /*doc=*/
      "Variance of x over dims (all if the list is empty): sum((x - mean)^2) / max(0, count - correction), in two passes. "
      "correction 1 is the unbiased estimate.",
      /*operands=*/{{"x"}},
      /*attributes=*/moment_attributes(),
      /*shape=*/reduction_shape(float_dtype, true),
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        return {b.convert(variance(b, node.inputs[0], node.attrs), b.type(node.inputs[0]).dtype)};
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const TensorType x = b.type(args.inputs[0]);
        const ValueId grad = keep_reduced(b, b.convert(args.output_grads[0], compute_dtype(x.dtype)), x.shape, args.node.attrs.get_dims("dims"));
        return {variance_gradient(b, args.inputs[0], args.node.attrs, grad)};
      }},
      /*autocast=*/Autocast::keep,
      moment_samples(),
      /*torch=*/{},
  });
  ops.push_back({
      {.name = "std"},
      /*doc=*/"Square root of var with the same arguments. The gradient is 0 where it is 0.",
      /*operands=*/{{"x"}},
      /*attributes=*/moment_attributes(),
      /*shape=*/reduction_shape(float_dtype, true),
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        return {b.convert(b.emit1("sqrt", {variance(b, node.inputs[0], node.attrs)}), b.type(node.inputs[0]).dtype)};
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const TensorType x = b.type(args.inputs[0]);
        const Dims& dims = args.node.attrs.get_dims("dims");
        const DType dtype = compute_dtype(x.dtype);
        const ValueId root = keep_reduced(b, b.convert(args.outputs[0], dtype), x.shape, dims);
        const ValueId grad = keep_reduced(b, b.convert(args.output_grads[0], dtype), x.shape, dims);
        return {variance_gradient(b, args.inputs[0], args.node.attrs, divide_or_zero(b, grad, b.mul(root, 2.0)))};
      }},
      /*autocast=*/Autocast::keep,
      moment_samples(),
      /*torch=*/{},
  });
  ops.push_back(logsumexp_op());
  ops.push_back(norm_op());
  return ops;
}

}  // namespace fulmen
