// Normalisations: layer_norm, rms_norm, group_norm, batch_norm. Composites over plain reductions, in f32 for 16-bit
// floats, with the result in x's dtype; weight and bias may be of another float dtype, as PyTorch allows on a CPU.
// Gradients recompute mean and rstd: they cost one more read of a row that is in cache, and nothing has to be saved.
#include "ops/axes.h"
#include "ops/families.h"

namespace fulmen {
namespace {

ValueId mean_over(Builder& b, ValueId x, const Dims& dims) {
  const int64_t count = size_of_dims(b.type(x).shape, dims);
  return b.mul(b.sum(x, dims, true), count ? 1.0 / static_cast<double>(count) : 0.0);
}

struct Normalised {
  ValueId value;  // (x - mean) rstd
  ValueId mean, variance, rstd;
};

// Over `dims` (normal, not empty), two passes: mean, then the mean of squared differences.
Normalised normalise(Builder& b, ValueId x, const Dims& dims, double eps) {
  const ValueId mean = mean_over(b, x, dims);
  const ValueId d = b.sub(x, mean);
  const ValueId variance = mean_over(b, b.mul(d, d), dims);
  const ValueId rstd = b.emit1("rsqrt", {b.add(variance, eps)});
  return {b.mul(d, rstd), mean, variance, rstd};
}

// d x of (x - mean) rstd for a gradient g of it: rstd (g - mean(g) - xhat mean(g xhat)).
ValueId normalise_gradient(Builder& b, const Normalised& n, ValueId g, const Dims& dims) {
  const ValueId inner = b.sub(b.sub(g, mean_over(b, g, dims)), b.mul(n.value, mean_over(b, b.mul(g, n.value), dims)));
  return b.mul(inner, n.rstd);
}

Dims last_dims(int64_t rank, int64_t count) {
  Dims dims;
  for (int64_t i = rank - count; i < rank; ++i) dims.push_back(i);
  return dims;
}
Dims first_dims(int64_t count) {
  Dims dims;
  for (int64_t i = 0; i < count; ++i) dims.push_back(i);
  return dims;
}

// Sum over the leading dims, without them; x itself where there are none.
ValueId sum_leading(Builder& b, ValueId x, int64_t count) { return count == 0 ? x : b.sum(x, first_dims(count), false); }

void check_parameter(const CallTypes& call, size_t i, const Dims& needed, const std::string& why) {
  if (!call.has(i)) return;
  need_float(call, i);
  if (call[i].shape != needed)
    call.shape_error(operand_name(call.op, i) + " is " + to_string(call[i].shape) + ", needed " + to_string(needed) + ", " + why);
}

// layer_norm and rms_norm: x is a float with at least normalized_ndim dims, parameters have those dims' shape.
std::vector<TensorType> row_norm_shape(const CallTypes& call) {
  need_float(call, 0);
  const int64_t count = call.attrs.get_int("normalized_ndim");
  if (count < 1 || count > call[0].rank())
    call.shape_error("normalized_ndim is " + std::to_string(count) + ", x has " + std::to_string(call[0].rank()) +
                     " dims; needed 1 to " + std::to_string(call[0].rank()));
  const Dims& shape = call[0].shape;
  const Dims needed(shape.end() - count, shape.end());
  for (size_t i = 1; i < call.op.operands.size(); ++i) check_parameter(call, i, needed, "the last dims of x " + to_string(shape));
  return {contiguous_type(call[0].dtype, shape)};
}

ValueId with_parameters(Builder& b, ValueId value, ValueId weight, ValueId bias) {
  const DType dtype = b.type(value).dtype;
  if (weight != no_value) value = b.mul(value, b.convert(weight, dtype));
  if (bias != no_value) value = b.add(value, b.convert(bias, dtype));
  return value;
}

DType wide_dtype(Builder& b, const Node& node) { return compute_dtype(b.type(node.inputs[0]).dtype); }

std::vector<ValueId> layer_norm_meaning(Builder& b, const Node& node) {
  const TensorType type = b.type(node.inputs[0]);
  const Dims dims = last_dims(type.rank(), node.attrs.get_int("normalized_ndim"));
  const ValueId x = b.convert(node.inputs[0], wide_dtype(b, node));
  const Normalised n = normalise(b, x, dims, node.attrs.get_float("eps"));
  return {b.convert(with_parameters(b, n.value, node.inputs[1], node.inputs[2]), type.dtype)};
}

std::vector<ValueId> layer_norm_gradient(Builder& b, const GradientArgs& args) {
  const TensorType type = b.type(args.inputs[0]);
  const DType dtype = compute_dtype(type.dtype);
  const int64_t count = args.node.attrs.get_int("normalized_ndim");
  const Dims dims = last_dims(type.rank(), count);
  const ValueId g = b.convert(args.output_grads[0], dtype), weight = args.inputs[1], bias = args.inputs[2];
  std::vector<ValueId> grads(3, no_value);
  if (args.need[0] || args.need[1]) {
    const Normalised n = normalise(b, b.convert(args.inputs[0], dtype), dims, args.node.attrs.get_float("eps"));
    if (args.need[0])
      grads[0] = b.convert(normalise_gradient(b, n, weight == no_value ? g : b.mul(g, b.convert(weight, dtype)), dims), type.dtype);
    if (args.need[1]) grads[1] = b.convert(sum_leading(b, b.mul(g, n.value), type.rank() - count), b.type(weight).dtype);
  }
  if (args.need[2]) grads[2] = b.convert(sum_leading(b, g, type.rank() - count), b.type(bias).dtype);
  return grads;
}

OpDef layer_norm_op() {
  return {
      {.name = "layer_norm"},
      /*doc=*/
      "(x - mean) / sqrt(var + eps) * weight + bias over the last normalized_ndim dims; var is the biased one. weight and bias have "
      "those dims' shape. Statistics in f32 or wider, the result in x's dtype.",
      /*operands=*/{{"x"}, {"weight", Need::optional}, {"bias", Need::optional}},
      /*attributes=*/{{"normalized_ndim", AttrKind::integer, int64_t{1}}, {"eps", AttrKind::number, 1e-5}},
      /*shape=*/row_norm_shape,
      /*meaning=*/Decomposition{layer_norm_meaning},
      /*gradient=*/GradientRule{layer_norm_gradient},
      /*autocast=*/Autocast::fp32_on_cuda,
      /*samples=*/
      {{{"rows", {"f32[5,17]", "f32[17]", "f32[17]"}, {}},
        {"plain", {"f32[5,17]", "none", "none"}, {}},
        {"no_bias", {"f32[2,3,8]", "f32[8]", "none"}, {}},
        {"no_weight", {"f32[2,3,8]", "none", "f32[8]"}, {}},
        {"two_dims", {"f32[2,3,5]", "f32[3,5]", "f32[3,5]"}, {{"normalized_ndim", int64_t{2}}}},
        {"all_dims", {"f32[13]", "f32[13]", "f32[13]"}, {}},
        {"one_column", {"f32[5,1]", "f32[1]", "f32[1]"}, {{"eps", 0.1}}},
        {"no_rows", {"f32[0,7]", "f32[7]", "f32[7]"}, {}},
        {"transposed", {"f32[5,7]{stride=1,5}", "f32[7]", "f32[7]"}, {}},
        {"row_gaps", {"f32[4,11]{stride=16,1}", "f32[11]", "f32[11]"}, {}},
        {"bf16", {"bf16[3,67]", "bf16[67]", "bf16[67]"}, {}},
        {"f16", {"f16[3,19]", "f16[19]", "f16[19]"}, {}},
        {"mixed", {"bf16[3,19]", "f32[19]", "f32[19]"}, {}},
        {"f64", {"f64[3,5]", "f64[5]", "f64[5]"}, {}}},
       {{{"weight_shape", {"f32[5,17]", "f32[16]", "none"}, {}}, "ShapeError", "weight is [16], needed [17]"},
        {{"ndim", {"f32[5]", "none", "none"}, {{"normalized_ndim", int64_t{2}}}}, "ShapeError", "normalized_ndim is 2, x has 1 dims"},
        {{"integers", {"i64[5]", "none", "none"}, {}}, "TypeError", "x is i64, needed a float dtype"}}},
      /*torch=*/{},
  };
}

// eps none is the machine epsilon of x's compute dtype for 16-bit floats, else of x's dtype, as in PyTorch.
double rms_eps(const Attributes& attrs, DType dtype) {
  if (attrs.has("eps")) return attrs.get_float("eps");
  return dtype == DType::f64 ? 2.220446049250313e-16 : 1.1920928955078125e-07;
}

Normalised rms_normalise(Builder& b, ValueId x, const Dims& dims, double eps) {
  const ValueId square = mean_over(b, b.mul(x, x), dims);
  const ValueId rstd = b.emit1("rsqrt", {b.add(square, eps)});
  return {b.mul(x, rstd), no_value, square, rstd};
}

std::vector<ValueId> rms_norm_meaning(Builder& b, const Node& node) {
  const TensorType type = b.type(node.inputs[0]);
  const Dims dims = last_dims(type.rank(), node.attrs.get_int("normalized_ndim"));
  const ValueId x = b.convert(node.inputs[0], wide_dtype(b, node));
  const Normalised n = rms_normalise(b, x, dims, rms_eps(node.attrs, type.dtype));
  return {b.convert(with_parameters(b, n.value, node.inputs[1], no_value), type.dtype)};
}

std::vector<ValueId> rms_norm_gradient(Builder& b, const GradientArgs& args) {
  const TensorType type = b.type(args.inputs[0]);
  const DType dtype = compute_dtype(type.dtype);
  const int64_t count = args.node.attrs.get_int("normalized_ndim");
  const Dims dims = last_dims(type.rank(), count);
  const ValueId g = b.convert(args.output_grads[0], dtype), weight = args.inputs[1];
  const Normalised n = rms_normalise(b, b.convert(args.inputs[0], dtype), dims, rms_eps(args.node.attrs, type.dtype));
  std::vector<ValueId> grads(2, no_value);
  if (args.need[0]) {
    const ValueId gw = weight == no_value ? g : b.mul(g, b.convert(weight, dtype));
    const ValueId inner = b.sub(gw, b.mul(n.value, mean_over(b, b.mul(gw, n.value), dims)));
    grads[0] = b.convert(b.mul(inner, n.rstd), type.dtype);
  }
  if (args.need[1]) grads[1] = b.convert(sum_leading(b, b.mul(g, n.value), type.rank() - count), b.type(weight).dtype);
  return grads;
}

OpDef rms_norm_op() {
  return {
      {.name = "rms_norm"},
      /*doc=*/
      "x / sqrt(mean(x^2) + eps) * weight over the last normalized_ndim dims. eps none is the machine epsilon: of f32 for 16-bit "
      "floats too. Statistics in f32 or wider, the result in x's dtype.",
      /*operands=*/{{"x"}, {"weight", Need::optional}},
      /*attributes=*/{{"normalized_ndim", AttrKind::integer, int64_t{1}}, {"eps", AttrKind::number, std::monostate{}}},
      /*shape=*/row_norm_shape,
      /*meaning=*/Decomposition{rms_norm_meaning},
      /*gradient=*/GradientRule{rms_norm_gradient},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"rows", {"f32[5,17]", "f32[17]"}, {{"eps", 1e-6}}},
        {"plain", {"f32[5,17]", "none"}, {}},
        {"two_dims", {"f32[2,3,5]", "f32[3,5]"}, {{"normalized_ndim", int64_t{2}}}},
        {"one_column", {"f32[5,1]", "f32[1]"}, {{"eps", 0.1}}},
        {"no_rows", {"f32[0,7]", "f32[7]"}, {}},
        {"transposed", {"f32[5,7]{stride=1,5}", "f32[7]"}, {}},
        {"bf16", {"bf16[3,67]", "bf16[67]"}, {{"eps", 1e-6}}},
        {"f16", {"f16[3,19]", "f16[19]"}, {}},
        {"f64", {"f64[3,5]", "f64[5]"}, {}}},
       {{{"weight_shape", {"f32[5,17]", "f32[16]"}, {}}, "ShapeError", "weight is [16], needed [17]"},
        {{"integers", {"i64[5]", "none"}, {}}, "TypeError", "x is i64, needed a float dtype"}}},
      /*torch=*/{},
  };
}

// (batch, channels, ...) as (batch, groups, channels per group * rest), and back.
Dims grouped_shape(const Dims& shape, int64_t groups) {
  return {shape[0], groups, element_count(Dims(shape.begin() + 1, shape.end())) / groups};
}

// A per-channel value (channels) that broadcasts against (batch, channels, ...).
ValueId per_channel(Builder& b, ValueId value, const Dims& shape, DType dtype) {
  Dims wide(shape.size() - 1, 1);
  wide[0] = shape[1];
  return b.convert(b.reshape(value, wide), dtype);
}

// Sum over all dims but the channels.
ValueId sum_channels(Builder& b, ValueId x, DType dtype) {
  Dims dims;
  for (int64_t i = 0; i < b.type(x).rank(); ++i)
    if (i != 1) dims.push_back(i);
  return b.convert(b.sum(x, dims, false), dtype);
}

std::vector<ValueId> group_norm_meaning(Builder& b, const Node& node) {
  const TensorType type = b.type(node.inputs[0]);
  const DType dtype = wide_dtype(b, node);
  const ValueId x = b.reshape(b.convert(node.inputs[0], dtype), grouped_shape(type.shape, node.attrs.get_int("groups")));
  ValueId y = b.reshape(normalise(b, x, {2}, node.attrs.get_float("eps")).value, type.shape);
  if (node.inputs[1] != no_value) y = b.mul(y, per_channel(b, node.inputs[1], type.shape, dtype));
  if (node.inputs[2] != no_value) y = b.add(y, per_channel(b, node.inputs[2], type.shape, dtype));
  return {b.convert(y, type.dtype)};
}

std::vector<ValueId> group_norm_gradient(Builder& b, const GradientArgs& args) {
  const TensorType type = b.type(args.inputs[0]);
  const DType dtype = compute_dtype(type.dtype);
  const Dims grouped = grouped_shape(type.shape, args.node.attrs.get_int("groups"));
  const ValueId g = b.convert(args.output_grads[0], dtype), weight = args.inputs[1], bias = args.inputs[2];
  std::vector<ValueId> grads(3, no_value);
  if (args.need[0] || args.need[1]) {
    const Normalised n = normalise(b, b.reshape(b.convert(args.inputs[0], dtype), grouped), {2}, args.node.attrs.get_float("eps"));
    if (args.need[0]) {
      const ValueId gw = weight == no_value ? g : b.mul(g, per_channel(b, weight, type.shape, dtype));
      grads[0] = b.convert(b.reshape(normalise_gradient(b, n, b.reshape(gw, grouped), {2}), type.shape), type.dtype);
    }
    if (args.need[1]) grads[1] = sum_channels(b, b.mul(g, b.reshape(n.value, type.shape)), b.type(weight).dtype);
  }
  if (args.need[2]) grads[2] = sum_channels(b, g, b.type(bias).dtype);
  return grads;
}

OpDef group_norm_op() {
  return {
      {.name = "group_norm"},
      /*doc=*/
      "x is (batch, channels, ...); the channels are split into groups, each normalised over its channels and all later dims as in "
      "layer_norm, then scaled and shifted by weight and bias (channels). The result has x's dtype.",
      /*operands=*/{{"x"}, {"weight", Need::optional}, {"bias", Need::optional}},
      /*attributes=*/{{"groups", AttrKind::integer, std::nullopt}, {"eps", AttrKind::number, 1e-5}},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        need_rank(call, 0, 2, 100);
        const int64_t groups = call.attrs.get_int("groups"), channels = call[0].shape[1];
        if (groups < 1 || channels % groups)
          call.shape_error("groups is " + std::to_string(groups) + ", x has " + std::to_string(channels) +
                           " channels; groups must divide them");
        check_parameter(call, 1, {channels}, "one a channel of x");
        check_parameter(call, 2, {channels}, "one a channel of x");
        return {contiguous_type(call[0].dtype, call[0].shape)};
      },
      /*meaning=*/Decomposition{group_norm_meaning},
      /*gradient=*/GradientRule{group_norm_gradient},
      /*autocast=*/Autocast::fp32_on_cuda,
      /*samples=*/
      {{{"images", {"f32[2,6,3,5]", "f32[6]", "f32[6]"}, {{"groups", int64_t{3}}}},
        {"plain", {"f32[2,6,7]", "none", "none"}, {{"groups", int64_t{2}}}},
        {"one_group", {"f32[3,4]", "f32[4]", "f32[4]"}, {{"groups", int64_t{1}}}},
        {"no_batch", {"f32[0,4,3]", "f32[4]", "f32[4]"}, {{"groups", int64_t{2}}}},
        {"channels_last", {"f32[2,4,3,5]{stride=60,1,20,4}", "f32[4]", "f32[4]"}, {{"groups", int64_t{2}}}},
        {"bf16", {"bf16[2,6,11]", "bf16[6]", "bf16[6]"}, {{"groups", int64_t{3}}}}},
       {{{"groups", {"f32[2,6,3]", "none", "none"}, {{"groups", int64_t{4}}}}, "ShapeError", "groups is 4, x has 6 channels"},
        {{"weight_shape", {"f32[2,6,3]", "f32[3]", "none"}, {{"groups", int64_t{2}}}}, "ShapeError", "weight is [3], needed [6]"}}},
      /*torch=*/{},
  };
}

Dims all_but_channels(int64_t rank) {
  Dims dims;
  for (int64_t i = 0; i < rank; ++i)
    if (i != 1) dims.push_back(i);
  return dims;
}

enum BatchNormOperand { bn_x, bn_weight, bn_bias, bn_running_mean, bn_running_var };

// With running statistics instead of the batch's.
Normalised from_running(Builder& b, const std::span<const ValueId> inputs, ValueId x, double eps) {
  const TensorType type = b.type(x);
  const ValueId mean = per_channel(b, inputs[bn_running_mean], type.shape, type.dtype);
  const ValueId variance = per_channel(b, inputs[bn_running_var], type.shape, type.dtype);
  const ValueId rstd = b.emit1("rsqrt", {b.add(variance, eps)});
  return {b.mul(b.sub(x, mean), rstd), mean, variance, rstd};
}

std::vector<ValueId> batch_norm_meaning(Builder& b, const Node& node) {
  const TensorType type = b.type(node.inputs[bn_x]);
  const DType dtype = wide_dtype(b, node);
  const ValueId x = b.convert(node.inputs[bn_x], dtype);
  const bool training = node.attrs.get_bool("training");
  const double eps = node.attrs.get_float("eps"), momentum = node.attrs.get_float("momentum");
  const Dims dims = all_but_channels(type.rank());
  const Normalised n = training ? normalise(b, x, dims, eps) : from_running(b, node.inputs, x, eps);
  ValueId y = n.value;
  if (node.inputs[bn_weight] != no_value) y = b.mul(y, per_channel(b, node.inputs[bn_weight], type.shape, dtype));
  if (node.inputs[bn_bias] != no_value) y = b.add(y, per_channel(b, node.inputs[bn_bias], type.shape, dtype));
  std::vector<ValueId> results{b.convert(y, type.dtype)};
  const auto count = static_cast<double>(size_of_dims(type.shape, dims));
  const ValueId unbiased = training ? b.mul(n.variance, count / (count - 1.0)) : n.variance;
  const ValueId fresh[2] = {n.mean, unbiased};
  for (int i = 0; i < 2; ++i) {
    const ValueId old = node.inputs[static_cast<size_t>(bn_running_mean + i)];
    ValueId value = b.reshape(fresh[i], {type.shape[1]});
    if (old != no_value) {
      const ValueId wide = b.convert(old, dtype);
      value = training ? b.add(b.mul(wide, 1.0 - momentum), b.mul(value, momentum)) : wide;
      value = b.convert(value, b.type(old).dtype);
    }
    results.push_back(value);
  }
  return results;
}

std::vector<ValueId> batch_norm_gradient(Builder& b, const GradientArgs& args) {
  const TensorType type = b.type(args.inputs[bn_x]);
  const DType dtype = compute_dtype(type.dtype);
  const bool training = args.node.attrs.get_bool("training");
  std::vector<ValueId> grads(5, no_value);
  if (args.output_grads[0] == no_value) return grads;  // running statistics carry no gradient, as in PyTorch
  const ValueId x = b.convert(args.inputs[bn_x], dtype), g = b.convert(args.output_grads[0], dtype);
  const Dims dims = all_but_channels(type.rank());
  const double eps = args.node.attrs.get_float("eps");
  const ValueId weight = args.inputs[bn_weight];
  if (args.need[bn_x] || args.need[bn_weight]) {
    const Normalised n = training ? normalise(b, x, dims, eps) : from_running(b, args.inputs, x, eps);
    if (args.need[bn_x]) {
      const ValueId gw = weight == no_value ? g : b.mul(g, per_channel(b, weight, type.shape, dtype));
      grads[bn_x] = b.convert(training ? normalise_gradient(b, n, gw, dims) : b.mul(gw, n.rstd), type.dtype);
    }
    if (args.need[bn_weight]) grads[bn_weight] = sum_channels(b, b.mul(g, n.value), b.type(weight).dtype);
  }
  if (args.need[bn_bias]) grads[bn_bias] = sum_channels(b, g, b.type(args.inputs[bn_bias]).dtype);
  return grads;
}

OpDef batch_norm_op() {
  return {
      {.name = "batch_norm"},
      /*doc=*/
      "x is (batch, channels, ...). training: normalised by the mean and biased variance of each channel over all other dims, and "
      "the running statistics become (1 - momentum) old + momentum new, new variance unbiased. Otherwise normalised by the "
      "running statistics, which stay. Results: y in x's dtype, running_mean, running_var (channels); where none was given those "
      "two are the batch's own. Gradients flow through y alone.",
      /*operands=*/
      {{"x"}, {"weight", Need::optional}, {"bias", Need::optional}, {"running_mean", Need::optional}, {"running_var", Need::optional}},
      /*attributes=*/
      {{"training", AttrKind::boolean, false}, {"momentum", AttrKind::number, 0.1}, {"eps", AttrKind::number, 1e-5}},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, bn_x);
        need_rank(call, bn_x, 2, 100);
        const Dims& shape = call[bn_x].shape;
        const int64_t channels = shape[1];
        for (size_t i = bn_weight; i <= bn_running_var; ++i) check_parameter(call, i, {channels}, "one a channel of x");
        const int64_t count = size_of_dims(shape, all_but_channels(call[bn_x].rank()));
        if (call.attrs.get_bool("training")) {
          if (count == 1) call.shape_error("x is " + to_string(shape) + ", which has 1 value a channel; training needs 2 or more");
        } else if (!call.has(bn_running_mean) || !call.has(bn_running_var)) {
          call.type_error("running_mean and running_var are not both given, needed when training is false");
        }
        const auto statistic = [&](size_t i) {
          return contiguous_type(call.has(i) ? call[i].dtype : compute_dtype(call[bn_x].dtype), {channels});
        };
        return {contiguous_type(call[bn_x].dtype, shape), statistic(bn_running_mean), statistic(bn_running_var)};
      },
      /*meaning=*/Decomposition{batch_norm_meaning},
      /*gradient=*/GradientRule{batch_norm_gradient},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"training", {"f32[4,3,5,2]", "f32[3]", "f32[3]", "f32[3]", "f32[3]"}, {{"training", true}}, "positive"},
        {"inference", {"f32[4,3,5,2]", "f32[3]", "f32[3]", "f32[3]", "f32[3]"}, {}, "positive"},
        {"plain", {"f32[7,3]", "none", "none", "none", "none"}, {{"training", true}}},
        {"bf16", {"bf16[5,3,7]", "f32[3]", "f32[3]", "f32[3]", "f32[3]"}, {{"training", true}}, "positive"}},
       {{{"one_value", {"f32[1,3]", "none", "none", "none", "none"}, {{"training", true}}}, "ShapeError", "1 value a channel"},
        {{"no_statistics", {"f32[4,3]", "none", "none", "none", "none"}, {}}, "TypeError", "needed when training is false"},
        {{"weight_shape", {"f32[4,3]", "f32[4]", "none", "none", "none"}, {{"training", true}}}, "ShapeError", "weight is [4], needed [3]"}}},
      /*torch=*/{},
  };
}

}  // namespace

std::vector<OpDef> norm_ops() {
  std::vector<OpDef> ops;
  for (auto* entry : {layer_norm_op, rms_norm_op, group_norm_op, batch_norm_op}) ops.push_back(entry());
  return ops;
}

}  // namespace fulmen
