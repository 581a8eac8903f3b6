// Running sums and products along a dim. Gradients run backwards through `flip`.
#include "ops/axes.h"
#include "ops/families.h"
#include "ops/reference_loops.h"

namespace fulmen {
namespace {

std::vector<TensorType> cumulative_shape(const CallTypes& call) {
  checked_dim(call, call.attrs.get_int("dim"), call[0].rank());
  DType dtype = is_float(call[0].dtype) ? call[0].dtype : DType::i64;
  if (const auto asked = dtype_attribute(call.attrs, "dtype")) dtype = *asked;
  if (dtype == DType::boolean) call.type_error("dtype is bool, needed a number dtype");
  return {contiguous_type(dtype, call[0].shape)};
}

template <class Fold>
void run_along(const ReferenceArgs& args, Fold&& fold) {
  const HostTensor& x = *args.inputs[0];
  HostTensor& out = args.outputs[0];
  const Dims& shape = x.type.shape;
  const DimView view = view_around(shape, dim_of(args.attrs, static_cast<int64_t>(shape.size())));
  for (int64_t o = 0; o < view.outer; ++o)
    for (int64_t n = 0; n < view.inner; ++n)
      for (int64_t k = 0; k < view.size; ++k) {
        const int64_t at = view.at(o, k, n);
        copy_element(x, at, out, at);
        if (k == 0) continue;
        const auto to = static_cast<size_t>(at), before = static_cast<size_t>(view.at(o, k - 1, n));
        if (is_float(out.type.dtype))
          out.f[to] = fold(out.f[before], out.f[to]);
        else
          out.i[to] = wrap_integer(static_cast<int64_t>(fold(static_cast<uint64_t>(out.i[before]), static_cast<uint64_t>(out.i[to]))),
                                   out.type.dtype);
      }
}

ValueId cumulate(Builder& b, const char* op, ValueId x, int64_t dim) { return b.emit1(op, {x}, {{"dim", dim}}); }

// result[k] = sum of x[i] for i >= k
ValueId sum_from_here(Builder& b, ValueId x, int64_t dim) {
  const Dims dims{dim};
  return b.emit1("flip", {cumulate(b, "cumsum", b.emit1("flip", {x}, {{"dims", dims}}), dim)}, {{"dims", dims}});
}

// grad_x[k] = sum_{i >= k} g[i] prod_{j <= i, j != k} x[j]. Before the first zero of a line that is
// sum_from_here(g y) / x; at the first zero it is sum_from_here(g y'), y' the running product with this zero taken as 1;
// behind it every term has the zero in it.
std::vector<ValueId> cumprod_gradient(Builder& b, const GradientArgs& args) {
  const TensorType type = b.type(args.inputs[0]);
  const DType dtype = compute_dtype(b.type(args.outputs[0]).dtype);
  const ValueId x = b.convert(args.inputs[0], dtype), g = b.convert(args.output_grads[0], dtype);
  if (type.rank() == 0) return {b.convert(g, type.dtype)};
  const int64_t dim = dim_of(args.node.attrs, type.rank());
  const ValueId zero = b.number(0.0, dtype), one = b.number(1.0, dtype);
  const ValueId is_zero = b.emit1("eq", {x, zero});
  const ValueId zeros_so_far = cumulate(b, "cumsum", b.convert(is_zero, dtype), dim);
  const ValueId none_yet = b.emit1("eq", {zeros_so_far, zero});
  const ValueId first = b.emit1("logical_and", {is_zero, b.emit1("eq", {zeros_so_far, one})});
  const ValueId y = cumulate(b, "cumprod", x, dim);
  const ValueId y_without = cumulate(b, "cumprod", b.where(first, one, x), dim);
  const ValueId before = b.div(sum_from_here(b, b.mul(g, y), dim), b.where(is_zero, one, x));
  const ValueId at = sum_from_here(b, b.mul(g, y_without), dim);
  return {b.convert(b.where(none_yet, before, b.where(first, at, zero)), type.dtype)};
}

Samples cumulative_samples(const std::string& domain) {
  return {{{"last", {"f32[5,7]"}, {{"dim", int64_t{-1}}}, domain},
           {"first", {"f32[5,7]"}, {{"dim", int64_t{0}}}, domain},
           {"middle", {"f32[2,13,3]"}, {{"dim", int64_t{1}}}, domain},
           {"one", {"f32[3,1]"}, {{"dim", int64_t{1}}}, domain},
           {"empty", {"f32[3,0]"}, {{"dim", int64_t{1}}}, domain},
           {"scalar", {"f32[]"}, {{"dim", int64_t{0}}}, domain},
           {"transposed", {"f32[5,7]{stride=1,5}"}, {{"dim", int64_t{1}}}, domain},
           {"integers", {"i32[3,5]"}, {{"dim", int64_t{1}}}, domain},
           {"bools", {"bool[3,5]"}, {{"dim", int64_t{1}}}, domain},
           {"bf16", {"bf16[3,19]"}, {{"dim", int64_t{1}}}, domain},
           {"widened", {"bf16[3,19]"}, {{"dim", int64_t{1}}, {"dtype", DType::f32}}, domain}},
          {{{"dim_too_large", {"f32[5]"}, {{"dim", int64_t{1}}}}, "ShapeError", "dim is 1, x has 1 dims"},
           {{"dtype_bool", {"i32[5]"}, {{"dim", int64_t{0}}, {"dtype", DType::boolean}}}, "TypeError", "dtype is bool"}}};
}

}  // namespace

std::vector<OpDef> cumulative_ops() {
  std::vector<OpDef> ops;
  ops.push_back({
      {.name = "cumsum"},
      /*doc=*/
      "Running sum along dim: y[k] = x[0] + ... + x[k]. Integers and bools give i64; with dtype, elements are converted first. "
      "Floats accumulate in f32 or wider.",
      /*operands=*/{{"x"}},
      /*attributes=*/{{"dim", AttrKind::integer, std::nullopt}, {"dtype", AttrKind::dtype, std::monostate{}}},
      /*shape=*/cumulative_shape,
      /*meaning=*/Primitive{[](const ReferenceArgs& args) { run_along(args, [](auto a, auto b) { return a + b; }); }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const TensorType type = b.type(args.inputs[0]);
        if (type.rank() == 0) return {b.convert(args.output_grads[0], type.dtype)};
        return {b.convert(sum_from_here(b, args.output_grads[0], dim_of(args.node.attrs, type.rank())), type.dtype)};
      }},
      /*autocast=*/Autocast::fp32_on_cuda,
      cumulative_samples("normal"),
      /*torch=*/{"torch.cumsum", "Tensor.cumsum"},
  });
  Samples products = cumulative_samples("unit");
  products.good.push_back({"with_zeros", {"f32[5,3]"}, {{"dim", int64_t{1}}}, "small_int"});
  ops.push_back({
      {.name = "cumprod"},
      /*doc=*/
      "Running product along dim: y[k] = x[0] ... x[k]. Integers and bools give i64; with dtype, elements are converted first. The "
      "gradient is exact where x has zeros too.",
      /*operands=*/{{"x"}},
      /*attributes=*/{{"dim", AttrKind::integer, std::nullopt}, {"dtype", AttrKind::dtype, std::monostate{}}},
      /*shape=*/cumulative_shape,
      /*meaning=*/Primitive{[](const ReferenceArgs& args) { run_along(args, [](auto a, auto b) { return a * b; }); }},
      /*gradient=*/GradientRule{cumprod_gradient},
      /*autocast=*/Autocast::fp32_on_cuda,
      std::move(products),
      /*torch=*/{"torch.cumprod", "Tensor.cumprod"},
  });
  return ops;
}

}  // namespace fulmen
