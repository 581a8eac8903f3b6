// Reductions over dims: sum, mean, amax, amin, prod, any, all. Floats accumulate in f32 at least, integers in i64.
// What is built on them (variance, logsumexp, norms) is in statistics.cpp; argmax and argmin are in indexing.cpp.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/axes.h"
#include "ops/families.h"
#include "ops/reference_loops.h"
#include "ops/reduction_rules.h"

namespace fulmen {

std::vector<OpDef> statistics_ops();  // statistics.cpp

ValueId keep_reduced(Builder& b, ValueId reduced, const Dims& shape, const Dims& dims) {
  return b.reshape(reduced, reduced_shape(shape, accepted_dims(dims, static_cast<int64_t>(shape.size())), true));
}

ShapeRule reduction_shape(std::function<DType(const CallTypes&)> dtype, bool takes_empty) {
  return [dtype = std::move(dtype), takes_empty](const CallTypes& call) -> std::vector<TensorType> {
    const TensorType& x = call[0];
    const Dims dims = checked_dims(call, call.attrs.get_dims("dims"), x.rank());
    if (!takes_empty)
      for (int64_t dim : dims)
        if (x.shape[static_cast<size_t>(dim)] == 0 && element_count(reduced_shape(x.shape, dims, false)) > 0)
          call.shape_error("x is " + to_string(x.shape) + ", dim " + std::to_string(dim) +
                           " has size 0 and the result of nothing is undefined; needed size 1 or more");
    return {contiguous_type(dtype(call), reduced_shape(x.shape, dims, call.attrs.get_bool("keepdim")))};
  };
}

namespace {

// fold(linear index into x, linear index into the result) for every element of x.
template <class F>
void for_each_reduced(const ReferenceArgs& args, F&& fold) {
  const Dims& shape = args.inputs[0]->type.shape;
  const Dims dims = accepted_dims(args.attrs.get_dims("dims"), static_cast<int64_t>(shape.size()));
  Dims strides = contiguous_strides(reduced_shape(shape, dims, true));
  for (int64_t dim : dims) strides[static_cast<size_t>(dim)] = 0;
  for_each_index(shape, [&](const Dims& index, int64_t linear) { fold(linear, linear_index(index, strides)); });
}

void fill(HostTensor& out, double value) {
  std::fill(out.f.begin(), out.f.end(), value);
  std::fill(out.i.begin(), out.i.end(), static_cast<int64_t>(value));
}

// sum or prod: the element is converted to the result's dtype first, as in PyTorch.
template <class Fold>
void accumulate(const ReferenceArgs& args, double start, Fold&& fold) {
  const HostTensor& x = *args.inputs[0];
  HostTensor& out = args.outputs[0];
  fill(out, start);
  HostTensor element = make_host(out.type.dtype, {1});
  for_each_reduced(args, [&](int64_t from, int64_t to) {
    copy_element(x, from, element, 0);
    const auto at = static_cast<size_t>(to);
    if (is_float(out.type.dtype))
      out.f[at] = fold(out.f[at], element.f[0]);
    else
      out.i[at] = wrap_integer(static_cast<int64_t>(fold(static_cast<uint64_t>(out.i[at]), static_cast<uint64_t>(element.i[0]))),
                               out.type.dtype);
  });
}

// amax or amin; NaN wins.
template <class Better>
void extreme(const ReferenceArgs& args, Better&& better) {
  const HostTensor& x = *args.inputs[0];
  HostTensor& out = args.outputs[0];
  std::vector<bool> seen(static_cast<size_t>(out.type.element_count()), false);
  for_each_reduced(args, [&](int64_t from, int64_t to) {
    const auto k = static_cast<size_t>(from), at = static_cast<size_t>(to);
    if (is_float(x.type.dtype)) {
      if (!seen[at] || std::isnan(x.f[k]) || (!std::isnan(out.f[at]) && better(x.f[k], out.f[at]))) out.f[at] = x.f[k];
    } else if (!seen[at] || better(x.i[k], out.i[at])) {
      out.i[at] = x.i[k];
    }
    seen[at] = true;
  });
}

DType accumulated_dtype(const CallTypes& call) {
  if (const auto dtype = dtype_attribute(call.attrs, "dtype")) {
    if (*dtype == DType::boolean) call.type_error("dtype is bool, needed a number dtype; use any or all");
    return *dtype;
  }
  return is_float(call[0].dtype) ? call[0].dtype : DType::i64;
}

DType same_dtype(const CallTypes& call) { return call[0].dtype; }

DType mean_dtype(const CallTypes& call) {
  const DType dtype = dtype_attribute(call.attrs, "dtype").value_or(call[0].dtype);
  if (!is_float(dtype))
    call.type_error("x has dtype " + text_of(call[0].dtype) + (call.attrs.has("dtype") ? ", dtype is " + text_of(dtype) : "") +
                    "; needed a float dtype, or dtype=f32");
  return dtype;
}

std::vector<AttrDef> accumulating_attributes() {
  return {{"dims", AttrKind::dims, Dims{}}, {"keepdim", AttrKind::boolean, false}, {"dtype", AttrKind::dtype, std::monostate{}}};
}

// The gradient of x where each element of the result counts `factor` times in it.
ValueId spread(Builder& b, const GradientArgs& args, double factor) {
  const TensorType& x = b.type(args.inputs[0]);
  ValueId grad = keep_reduced(b, args.output_grads[0], x.shape, args.node.attrs.get_dims("dims"));
  grad = scaled(b, grad, factor);
  return b.expand(b.convert(grad, x.dtype), x.shape);
}

// Ties share the gradient evenly, as PyTorch's amax does.
GradientRule extreme_gradient() {
  return [](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
    const ValueId x = args.inputs[0];
    const TensorType type = b.type(x);
    const Dims& dims = args.node.attrs.get_dims("dims");
    const ValueId hit = b.emit1("eq", {x, keep_reduced(b, args.outputs[0], type.shape, dims)});
    const ValueId count = b.sum(b.convert(hit, compute_dtype(type.dtype)), dims, true);
    const ValueId share = b.div(keep_reduced(b, args.output_grads[0], type.shape, dims), count);
    return {b.where(hit, b.convert(share, type.dtype), b.number(0.0, type.dtype))};
  };
}

// With no zero in a line the gradient is prod / x; with one, it is the product of the others, there alone; with more, 0.
std::vector<ValueId> prod_gradient(Builder& b, const GradientArgs& args) {
  const TensorType type = b.type(args.inputs[0]);
  const Dims& dims = args.node.attrs.get_dims("dims");
  const DType dtype = compute_dtype(b.type(args.outputs[0]).dtype);
  const ValueId x = b.convert(args.inputs[0], dtype);
  const ValueId zero = b.number(0.0, dtype), one = b.number(1.0, dtype);
  const ValueId is_zero = b.emit1("eq", {x, zero});
  const ValueId others = b.where(is_zero, one, x);
  const ValueId product = b.emit1("prod", {others}, {{"dims", dims}, {"keepdim", true}});
  const ValueId zeros = b.sum(b.convert(is_zero, dtype), dims, true);
  const ValueId lone_zero = b.emit1("logical_and", {is_zero, b.emit1("eq", {zeros, one})});
  const ValueId local = b.where(b.emit1("eq", {zeros, zero}), b.div(product, others), b.where(lone_zero, product, zero));
  const ValueId grad = keep_reduced(b, b.convert(args.output_grads[0], dtype), type.shape, dims);
  return {b.convert(b.mul(local, grad), type.dtype)};
}

Samples accumulating_samples(const std::string& domain) {
  Samples samples;
  samples.good = {
      {"all", {"f32[5,7]"}, {}, domain},
      {"last", {"f32[5,7]"}, {{"dims", Dims{-1}}}, domain},
      {"first_kept", {"f32[5,7]"}, {{"dims", Dims{0}}, {"keepdim", true}}, domain},
      {"middle", {"f32[3,17,2]"}, {{"dims", Dims{1}}}, domain},
      {"outer_two", {"f32[2,13,3]"}, {{"dims", Dims{0, 2}}}, domain},
      {"long_row", {"f32[2,1031]"}, {{"dims", Dims{1}}}, domain},
      {"transposed", {"f32[5,7]{stride=1,5}"}, {{"dims", Dims{1}}}, domain},
      {"row_gaps", {"f32[4,11]{stride=16,1}"}, {{"dims", Dims{1}}}, domain},
      {"expanded", {"f32[4,6]{stride=0,1}"}, {{"dims", Dims{0}}}, domain},
      {"one_element", {"f32[1,1]"}, {{"dims", Dims{1}}}, domain},
      {"scalar", {"f32[]"}, {}, domain},
      {"no_rows", {"f32[0,3]"}, {{"dims", Dims{1}}}, domain},
      {"bf16", {"bf16[3,67]"}, {{"dims", Dims{1}}}, domain},
      {"f16", {"f16[3,19]"}, {{"dims", Dims{0}}}, domain},
      {"f64", {"f64[3,5]"}, {{"dims", Dims{1}}}, domain},
  };
  samples.bad = {
      {{"dim_too_large", {"f32[5,7]"}, {{"dims", Dims{2}}}}, "ShapeError", "dims is 2, x has 2 dims"},
      {{"dim_twice", {"f32[5,7]"}, {{"dims", Dims{1, -1}}}}, "ShapeError", "names dim 1 twice"},
  };
  return samples;
}

OpDef truth_op(const std::string& name, const std::string& doc, bool start, std::vector<std::string> torch) {
  return {
      {.name = name},
      doc,
      /*operands=*/{{"x"}},
      /*attributes=*/{{"dims", AttrKind::dims, Dims{}}, {"keepdim", AttrKind::boolean, false}},
      /*shape=*/reduction_shape([](const CallTypes&) { return DType::boolean; }, true),
      /*meaning=*/Primitive{[start](const ReferenceArgs& args) {
        fill(args.outputs[0], start);
        for_each_reduced(args, [&](int64_t from, int64_t to) {
          if ((args.inputs[0]->at(from) != 0.0) != start) args.outputs[0].i[static_cast<size_t>(to)] = !start;
        });
      }},
      /*gradient=*/NotDifferentiable{"its result is bool"},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"all_dims", {"bool[5,7]"}, {}},
        {"last", {"bool[5,7]"}, {{"dims", Dims{-1}}}},
        {"kept", {"bool[3,4,5]"}, {{"dims", Dims{0, 2}}, {"keepdim", true}}},
        {"float", {"f32[5,3]"}, {{"dims", Dims{1}}}, "small_int"},
        {"empty_line", {"bool[3,0]"}, {{"dims", Dims{1}}}}},
       {{{"dim_too_large", {"bool[5]"}, {{"dims", Dims{1}}}}, "ShapeError", "dims is 1, x has 1 dims"}}},
      std::move(torch),
  };
}

OpDef extreme_op(const std::string& name, const std::string& doc, bool largest, std::vector<std::string> torch) {
  Samples samples = accumulating_samples("normal");
  samples.good.push_back({"integers", {"i32[4,9]"}, {{"dims", Dims{1}}}});
  samples.bad.push_back({{"nothing", {"f32[3,0]"}, {{"dims", Dims{1}}}}, "ShapeError", "dim 1 has size 0"});
  return {
      {.name = name},
      doc,
      /*operands=*/{{"x"}},
      /*attributes=*/{{"dims", AttrKind::dims, Dims{}}, {"keepdim", AttrKind::boolean, false}},
      /*shape=*/reduction_shape(same_dtype, false),
      /*meaning=*/Primitive{[largest](const ReferenceArgs& args) {
        if (largest)
          extreme(args, [](auto a, auto b) { return a > b; });
        else
          extreme(args, [](auto a, auto b) { return a < b; });
      }},
      /*gradient=*/extreme_gradient(),
      /*autocast=*/Autocast::keep,
      std::move(samples),
      std::move(torch),
  };
}

}  // namespace

std::vector<OpDef> reduction_ops() {
  std::vector<OpDef> ops;

  Samples sum_samples = accumulating_samples("normal");
  sum_samples.good.push_back({"integers", {"i32[4,9]"}, {{"dims", Dims{1}}}});
  sum_samples.good.push_back({"bools", {"bool[4,9]"}, {}});
  sum_samples.good.push_back({"widened", {"bf16[4,9]"}, {{"dims", Dims{1}}, {"dtype", DType::f32}}});
  sum_samples.good.push_back({"nothing", {"f32[3,0]"}, {{"dims", Dims{1}}}});
  ops.push_back({
      {.name = "sum"},
      /*doc=*/
      "Sum of x over dims (all if the list is empty). Floats accumulate in f32 or wider and are rounded once; integers and "
      "bools give i64. With dtype, elements are converted first. keepdim leaves reduced dims with size 1.",
      /*operands=*/{{"x"}},
      /*attributes=*/accumulating_attributes(),
      /*shape=*/reduction_shape(accumulated_dtype, true),
      /*meaning=*/Primitive{[](const ReferenceArgs& args) { accumulate(args, 0.0, [](auto a, auto b) { return a + b; }); }},
      /*gradient=*/
      GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> { return {spread(b, args, 1.0)}; }},
      /*autocast=*/Autocast::fp32_on_cuda,
      std::move(sum_samples),
      /*torch=*/{"torch.sum", "Tensor.sum"},
  });

  Samples mean_samples = accumulating_samples("normal");
  mean_samples.good.push_back({"widened", {"bf16[4,9]"}, {{"dims", Dims{1}}, {"dtype", DType::f32}}});
  mean_samples.bad.push_back({{"integers", {"i64[4]"}, {}}, "TypeError", "x has dtype i64"});
  ops.push_back({
      {.name = "mean"},
      /*doc=*/
      "Mean of x over dims (all if the list is empty): sum / count. Floats only, in f32 or wider and rounded once; the mean "
      "of nothing is NaN. keepdim leaves reduced dims with size 1.",
      /*operands=*/{{"x"}},
      /*attributes=*/accumulating_attributes(),
      /*shape=*/reduction_shape(mean_dtype, true),
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const TensorType x = b.type(node.inputs[0]);
        const DType dtype = dtype_attribute(node.attrs, "dtype").value_or(x.dtype);
        const Dims& dims = node.attrs.get_dims("dims");
        const auto count = static_cast<double>(size_of_dims(x.shape, accepted_dims(dims, x.rank())));
        const ValueId total = b.sum(b.convert(node.inputs[0], compute_dtype(dtype)), dims, node.attrs.get_bool("keepdim"));
        return {b.convert(b.div(total, b.number(count, compute_dtype(dtype))), dtype)};
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const TensorType& x = b.type(args.inputs[0]);
        const int64_t count = size_of_dims(x.shape, accepted_dims(args.node.attrs.get_dims("dims"), x.rank()));
        return {spread(b, args, count ? 1.0 / static_cast<double>(count) : 1.0)};
      }},
      /*autocast=*/Autocast::keep,
      std::move(mean_samples),
      /*torch=*/{"torch.mean", "Tensor.mean"},
  });

  ops.push_back(extreme_op("amax",
                           "Largest element of x over dims (all if the list is empty); NaN wins. A reduced dim must not be empty. "
                           "The gradient is shared evenly by ties.",
                           true, {"torch.amax", "Tensor.amax"}));
  ops.push_back(extreme_op("amin",
                           "Smallest element of x over dims (all if the list is empty); NaN wins. A reduced dim must not be empty. "
                           "The gradient is shared evenly by ties.",
                           false, {"torch.amin", "Tensor.amin"}));

  Samples prod_samples = accumulating_samples("unit");
  prod_samples.good.push_back({"integers", {"i32[4,5]"}, {{"dims", Dims{1}}}});
  prod_samples.good.push_back({"with_zeros", {"f32[5,3]"}, {{"dims", Dims{1}}}, "small_int"});
  ops.push_back({
      {.name = "prod"},
      /*doc=*/
      "Product of x over dims (all if the list is empty). Floats accumulate in f32 or wider; integers and bools give i64. The "
      "gradient is exact where x has zeros too.",
      /*operands=*/{{"x"}},
      /*attributes=*/accumulating_attributes(),
      /*shape=*/reduction_shape(accumulated_dtype, true),
      /*meaning=*/Primitive{[](const ReferenceArgs& args) { accumulate(args, 1.0, [](auto a, auto b) { return a * b; }); }},
      /*gradient=*/GradientRule{prod_gradient},
      /*autocast=*/Autocast::fp32,
      std::move(prod_samples),
      /*torch=*/{"torch.prod", "Tensor.prod"},
  });

  ops.push_back(truth_op("any", "Is an element of x nonzero (true, NaN), over dims (all if the list is empty)? Nothing gives false.",
                         false, {"torch.any", "Tensor.any"}));
  ops.push_back(truth_op("all", "Is every element of x nonzero, over dims (all if the list is empty)? Nothing gives true.", true,
                         {"torch.all", "Tensor.all"}));
  for (OpDef& op : statistics_ops()) ops.push_back(std::move(op));
  return ops;
}

}  // namespace fulmen
