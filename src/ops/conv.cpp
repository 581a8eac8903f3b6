// Convolutions over 1 to 3 spatial dims: convolution and its two adjoints are primitives, each the other's gradient, so that
// derivatives of any order stay within them; convolution_transposed is the adjoint used forward. Pooling is in pooling.cpp.
#include <algorithm>

#include "ops/axes.h"
#include "ops/convolution_geometry.h"
#include "ops/families.h"
#include "ops/reference_loops.h"

namespace fulmen {

std::vector<OpDef> pooling_ops();  // pooling.cpp

Dims spatial_list(const Attributes& attrs, std::string_view name, size_t count, int64_t fallback) {
  const Dims& given = attrs.get_dims(name);
  if (given.empty()) return Dims(count, fallback);
  return given.size() == 1 ? Dims(count, given[0]) : given;
}

void check_spatial_list(const CallTypes& call, std::string_view name, size_t count, int64_t least) {
  const Dims& given = call.attrs.get_dims(name);
  if (given.size() > 1 && given.size() != count)
    call.shape_error(std::string(name) + " is " + to_string(given) + ", needed 1 number or " + std::to_string(count));
  for (int64_t value : given)
    if (value < least) call.shape_error(std::string(name) + " is " + to_string(given) + ", needed " + std::to_string(least) + " or more");
}

namespace {

struct Geometry {
  Dims stride, padding, dilation;
  int64_t groups;
  Geometry(const Attributes& attrs, size_t count)
      : stride(spatial_list(attrs, "stride", count, 1)),
        padding(spatial_list(attrs, "padding", count, 0)),
        dilation(spatial_list(attrs, "dilation", count, 1)),
        groups(attrs.get_int("groups")) {}
};

std::vector<AttrDef> geometry_attributes() {
  return {{"stride", AttrKind::dims, Dims{1}}, {"padding", AttrKind::dims, Dims{0}}, {"dilation", AttrKind::dims, Dims{1}}, {"groups", AttrKind::integer, int64_t{1}}};
}

void check_geometry(const CallTypes& call, size_t count) {
  check_spatial_list(call, "stride", count, 1);
  check_spatial_list(call, "padding", count, 0);
  check_spatial_list(call, "dilation", count, 1);
}

// (batch, out channels, sizes) of a convolution of x with weight, after all checks. Names are those of the call's operands
// or attributes that hold the two.
Dims convolution_result(const CallTypes& call, const Dims& x, const Dims& weight, const std::string& x_name, const std::string& weight_name) {
  if (x.size() < 3 || x.size() > 5) call.shape_error(x_name + " is " + to_string(x) + ", needed (batch, channels, 1 to 3 sizes)");
  if (weight.size() != x.size())
    call.shape_error(weight_name + " is " + to_string(weight) + ", " + x_name + " is " + to_string(x) + "; needed as many dims");
  const size_t count = x.size() - 2;
  check_geometry(call, count);
  const Geometry g(call.attrs, count);
  if (g.groups < 1 || x[1] % g.groups || weight[0] % g.groups)
    call.shape_error("groups is " + std::to_string(g.groups) + ", which must divide the " + std::to_string(x[1]) + " channels of " + x_name +
                     " and the " + std::to_string(weight[0]) + " of the result");
  if (weight[1] != x[1] / g.groups)
    call.shape_error(weight_name + " takes " + std::to_string(weight[1]) + " channels, " + x_name + " has " + std::to_string(x[1]) + " in " +
                     std::to_string(g.groups) + " groups; needed " + std::to_string(x[1] / g.groups));
  Dims result{x[0], weight[0]};
  for (size_t i = 0; i < count; ++i) {
    const int64_t reach = g.dilation[i] * (weight[i + 2] - 1) + 1, room = x[i + 2] + 2 * g.padding[i];
    if (weight[i + 2] < 1 || room < reach)
      call.shape_error(x_name + " is " + to_string(x) + ", which with padding has " + std::to_string(room) + " at dim " + std::to_string(i + 2) +
                       "; the kernel reaches over " + std::to_string(reach));
    result.push_back((room - reach) / g.stride[i] + 1);
  }
  return result;
}

// body(index in x, index in weight, index in y) for every product of the convolution; taps in the padding are left out.
template <class F>
void for_each_tap(const Dims& x, const Dims& weight, const Dims& y, const Geometry& g, F&& body) {
  const size_t count = x.size() - 2;
  const Dims strides = contiguous_strides(x), kernel(weight.begin() + 2, weight.end());
  const int64_t taps = element_count(kernel), inputs = weight[1], per_group = weight[0] / g.groups;
  for_each_index(y, [&](const Dims& at, int64_t to) {
    const int64_t first = at[1] / std::max<int64_t>(per_group, 1) * inputs;
    for_each_index(kernel, [&](const Dims& tap, int64_t tap_index) {
      int64_t from = at[0] * strides[0];
      for (size_t i = 0; i < count; ++i) {
        const int64_t position = at[i + 2] * g.stride[i] - g.padding[i] + tap[i] * g.dilation[i];
        if (position < 0 || position >= x[i + 2]) return;
        from += position * strides[i + 2];
      }
      for (int64_t c = 0; c < inputs; ++c) body(from + (first + c) * strides[1], (at[1] * inputs + c) * taps + tap_index, to);
    });
  });
}

void multiply_into(HostTensor& out, int64_t to, const HostTensor& a, int64_t i, const HostTensor& b, int64_t j) {
  out.f[static_cast<size_t>(to)] += a.f[static_cast<size_t>(i)] * b.f[static_cast<size_t>(j)];
}

Attributes with(Attributes attrs, const std::string& name, Dims value) {
  attrs.set(name, std::move(value));
  return attrs;
}

Attributes geometry_of(const Attributes& attrs) {
  Attributes result;
  for (const char* name : {"stride", "padding", "dilation", "groups"}) result.set(name, *attrs.find(name));
  return result;
}

ValueId sum_to_channels(Builder& b, ValueId grad) {
  Dims dims;
  for (int64_t i = 0; i < b.type(grad).rank(); ++i)
    if (i != 1) dims.push_back(i);
  return b.sum(grad, dims, false);
}

void check_bias(const CallTypes& call, int64_t channels) {
  if (!call.has(2)) return;
  need_same_dtype(call, 0, 2);
  if (call[2].shape != Dims{channels})
    call.shape_error("bias is " + to_string(call[2].shape) + ", needed " + to_string(Dims{channels}) + ", one a channel of the result");
}

OpDef convolution_op() {
  return {
      {.name = "convolution"},
      /*doc=*/
      "Cross-correlation over 1 to 3 spatial dims: x is (batch, channels, sizes), weight (out channels, channels / groups, kernel "
      "sizes), bias (out channels); each size becomes (size + 2 padding - dilation (kernel - 1) - 1) / stride + 1. stride, padding "
      "and dilation have one number, or one a spatial dim. One float dtype; sums in f32 or wider.",
      /*operands=*/{{"x"}, {"weight"}, {"bias", Need::optional}},
      geometry_attributes(),
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        need_same_dtype(call, 0, 1);
        const Dims result = convolution_result(call, call[0].shape, call[1].shape, "x", "weight");
        check_bias(call, result[1]);
        return {contiguous_type(call[0].dtype, result)};
      },
      /*meaning=*/Primitive{[](const ReferenceArgs& args) {
        const HostTensor &x = *args.inputs[0], &weight = *args.inputs[1];
        HostTensor& out = args.outputs[0];
        const Dims& shape = out.type.shape;
        const int64_t inner = element_count(Dims(shape.begin() + 2, shape.end()));
        for (int64_t k = 0; k < out.type.element_count(); ++k)
          out.f[static_cast<size_t>(k)] = args.inputs[2] ? args.inputs[2]->f[static_cast<size_t>(k / inner % shape[1])] : 0.0;
        for_each_tap(x.type.shape, weight.type.shape, shape, Geometry(args.attrs, shape.size() - 2),
                     [&](int64_t i, int64_t j, int64_t to) { multiply_into(out, to, x, i, weight, j); });
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const ValueId x = args.inputs[0], weight = args.inputs[1], grad = args.output_grads[0];
        const Attributes& attrs = args.node.attrs;
        std::vector<ValueId> grads(3, no_value);
        if (args.need[0]) grads[0] = b.emit1("convolution_input_grad", {grad, weight}, with(attrs, "input_shape", b.type(x).shape));
        if (args.need[1]) grads[1] = b.emit1("convolution_weight_grad", {x, grad}, with(attrs, "weight_shape", b.type(weight).shape));
        if (args.need[2]) grads[2] = sum_to_channels(b, grad);
        return grads;
      }},
      /*autocast=*/Autocast::lower,
      /*samples=*/
      {{{"lines", {"f32[2,3,11]", "f32[4,3,3]", "f32[4]"}, {}},
        {"images", {"f32[2,3,7,5]", "f32[4,3,3,2]", "f32[4]"}, {{"padding", Dims{1}}}},
        {"strided", {"f32[1,3,9,8]", "f32[2,3,3,3]", "none"}, {{"stride", Dims{2, 3}}, {"padding", Dims{1, 0}}}},
        {"dilated", {"f32[1,2,9,9]", "f32[3,2,3,3]", "f32[3]"}, {{"dilation", Dims{2}}}},
        {"patches", {"f32[2,3,8,8]", "f32[5,3,4,4]", "f32[5]"}, {{"stride", Dims{4}}}},
        {"grouped", {"f32[2,4,6,5]", "f32[6,2,3,3]", "f32[6]"}, {{"groups", int64_t{2}}, {"padding", Dims{1}}}},
        {"depthwise", {"f32[1,3,7]", "f32[3,1,3]", "none"}, {{"groups", int64_t{3}}}},
        {"volumes", {"f32[1,2,4,5,3]", "f32[3,2,2,2,2]", "none"}, {}},
        {"point", {"f32[2,3,5,5]", "f32[4,3,1,1]", "none"}, {}},
        {"no_batch", {"f32[0,3,7]", "f32[4,3,3]", "f32[4]"}, {}},
        {"channels_last", {"f32[2,3,5,5]{stride=75,1,15,3}", "f32[4,3,3,3]{stride=27,1,9,3}", "f32[4]"}, {}},
        {"bf16", {"bf16[1,3,9,9]", "bf16[4,3,3,3]", "bf16[4]"}, {{"padding", Dims{1}}}},
        {"f64", {"f64[1,2,5]", "f64[3,2,3]", "none"}, {}}},
       {{{"channels", {"f32[2,3,7]", "f32[4,2,3]", "none"}, {}}, "ShapeError", "weight takes 2 channels, x has 3"},
        {{"rank", {"f32[3,7]", "f32[4,3,3]", "none"}, {}}, "ShapeError", "x is [3,7], needed (batch, channels, 1 to 3 sizes)"},
        {{"kernel", {"f32[2,3,2]", "f32[4,3,3]", "none"}, {}}, "ShapeError", "the kernel reaches over 3"},
        {{"groups", {"f32[2,3,7]", "f32[4,3,3]", "none"}, {{"groups", int64_t{2}}}}, "ShapeError", "groups is 2"},
        {{"bias", {"f32[2,3,7]", "f32[4,3,3]", "f32[3]"}, {}}, "ShapeError", "bias is [3], needed [4]"},
        {{"stride", {"f32[2,3,7]", "f32[4,3,3]", "none"}, {{"stride", Dims{0}}}}, "ShapeError", "stride is [0], needed 1 or more"},
        {{"dtypes", {"f32[2,3,7]", "bf16[4,3,3]", "none"}, {}}, "TypeError", "weight is bf16, x is f32"}}},
      /*torch=*/{"torch.conv1d", "torch.conv2d", "torch.conv3d", "torch.nn.functional.conv1d", "torch.nn.functional.conv2d", "torch.nn.functional.conv3d"},
  };
}

OpDef input_grad_op() {
  std::vector<AttrDef> attributes = geometry_attributes();
  attributes.insert(attributes.begin(), {"input_shape", AttrKind::dims, std::nullopt});
  return {
      {.name = "convolution_input_grad"},
      /*doc=*/
      "The adjoint of convolution in x: from grad, of the convolution's result shape, and weight to a tensor of input_shape. The "
      "other attributes are the convolution's.",
      /*operands=*/{{"grad"}, {"weight"}},
      std::move(attributes),
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        need_same_dtype(call, 0, 1);
        const Dims& shape = call.attrs.get_dims("input_shape");
        const Dims needed = convolution_result(call, shape, call[1].shape, "input_shape", "weight");
        if (call[0].shape != needed) call.shape_error("grad is " + to_string(call[0].shape) + ", needed " + to_string(needed));
        return {contiguous_type(call[0].dtype, shape)};
      },
      /*meaning=*/Primitive{[](const ReferenceArgs& args) {
        const HostTensor &grad = *args.inputs[0], &weight = *args.inputs[1];
        HostTensor& out = args.outputs[0];
        std::fill(out.f.begin(), out.f.end(), 0.0);
        for_each_tap(out.type.shape, weight.type.shape, grad.type.shape, Geometry(args.attrs, out.type.shape.size() - 2),
                     [&](int64_t i, int64_t j, int64_t k) { multiply_into(out, i, weight, j, grad, k); });
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const ValueId grad = args.inputs[0], weight = args.inputs[1], x = args.output_grads[0];
        const Attributes attrs = geometry_of(args.node.attrs);
        std::vector<ValueId> grads(2, no_value);
        if (args.need[0]) grads[0] = b.emit1("convolution", {x, weight}, attrs);
        if (args.need[1]) grads[1] = b.emit1("convolution_weight_grad", {x, grad}, with(attrs, "weight_shape", b.type(weight).shape));
        return grads;
      }},
      /*autocast=*/Autocast::lower,
      /*samples=*/
      {{{"lines", {"f32[2,4,9]", "f32[4,3,3]"}, {{"input_shape", Dims{2, 3, 11}}}},
        {"strided", {"f32[1,2,5,2]", "f32[2,3,3,3]"}, {{"input_shape", Dims{1, 3, 9, 8}}, {"stride", Dims{2, 3}}, {"padding", Dims{1, 0}}}},
        {"grouped", {"f32[2,6,6,5]", "f32[6,2,3,3]"}, {{"input_shape", Dims{2, 4, 6, 5}}, {"groups", int64_t{2}}, {"padding", Dims{1}}}},
        {"bf16", {"bf16[1,4,9,9]", "bf16[4,3,3,3]"}, {{"input_shape", Dims{1, 3, 9, 9}}, {"padding", Dims{1}}}}},
       {{{"grad_shape", {"f32[2,4,8]", "f32[4,3,3]"}, {{"input_shape", Dims{2, 3, 11}}}}, "ShapeError", "grad is [2,4,8], needed [2,4,9]"}}},
      /*torch=*/{},
  };
}

OpDef weight_grad_op() {
  std::vector<AttrDef> attributes = geometry_attributes();
  attributes.insert(attributes.begin(), {"weight_shape", AttrKind::dims, std::nullopt});
  return {
      {.name = "convolution_weight_grad"},
      /*doc=*/
      "The adjoint of convolution in weight: from x and grad, of the convolution's result shape, to a tensor of weight_shape. The "
      "other attributes are the convolution's.",
      /*operands=*/{{"x"}, {"grad"}},
      std::move(attributes),
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        need_same_dtype(call, 0, 1);
        const Dims& shape = call.attrs.get_dims("weight_shape");
        const Dims needed = convolution_result(call, call[0].shape, shape, "x", "weight_shape");
        if (call[1].shape != needed) call.shape_error("grad is " + to_string(call[1].shape) + ", needed " + to_string(needed));
        return {contiguous_type(call[0].dtype, shape)};
      },
      /*meaning=*/Primitive{[](const ReferenceArgs& args) {
        const HostTensor &x = *args.inputs[0], &grad = *args.inputs[1];
        HostTensor& out = args.outputs[0];
        std::fill(out.f.begin(), out.f.end(), 0.0);
        for_each_tap(x.type.shape, out.type.shape, grad.type.shape, Geometry(args.attrs, x.type.shape.size() - 2),
                     [&](int64_t i, int64_t j, int64_t k) { multiply_into(out, j, x, i, grad, k); });
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        const ValueId x = args.inputs[0], grad = args.inputs[1], weight = args.output_grads[0];
        const Attributes attrs = geometry_of(args.node.attrs);
        std::vector<ValueId> grads(2, no_value);
        if (args.need[0]) grads[0] = b.emit1("convolution_input_grad", {grad, weight}, with(attrs, "input_shape", b.type(x).shape));
        if (args.need[1]) grads[1] = b.emit1("convolution", {x, weight}, attrs);
        return grads;
      }},
      /*autocast=*/Autocast::lower,
      /*samples=*/
      {{{"lines", {"f32[2,3,11]", "f32[2,4,9]"}, {{"weight_shape", Dims{4, 3, 3}}}},
        {"strided", {"f32[1,3,9,8]", "f32[1,2,5,2]"}, {{"weight_shape", Dims{2, 3, 3, 3}}, {"stride", Dims{2, 3}}, {"padding", Dims{1, 0}}}},
        {"grouped", {"f32[2,4,6,5]", "f32[2,6,6,5]"}, {{"weight_shape", Dims{6, 2, 3, 3}}, {"groups", int64_t{2}}, {"padding", Dims{1}}}},
        {"no_batch", {"f32[0,3,7]", "f32[0,4,5]"}, {{"weight_shape", Dims{4, 3, 3}}}}},
       {{{"grad_shape", {"f32[2,3,11]", "f32[2,4,8]"}, {{"weight_shape", Dims{4, 3, 3}}}}, "ShapeError", "grad is [2,4,8], needed [2,4,9]"}}},
      /*torch=*/{},
  };
}

Dims transposed_result(const CallTypes& call) {
  const Dims &x = call[0].shape, &weight = call[1].shape;
  if (x.size() < 3 || x.size() > 5) call.shape_error("x is " + to_string(x) + ", needed (batch, channels, 1 to 3 sizes)");
  if (weight.size() != x.size()) call.shape_error("weight is " + to_string(weight) + ", x is " + to_string(x) + "; needed as many dims");
  const size_t count = x.size() - 2;
  check_geometry(call, count);
  check_spatial_list(call, "output_padding", count, 0);
  const Geometry g(call.attrs, count);
  const Dims extra = spatial_list(call.attrs, "output_padding", count, 0);
  if (weight[0] != x[1]) call.shape_error("weight takes " + std::to_string(weight[0]) + " channels, x has " + std::to_string(x[1]) + "; needed equal");
  if (g.groups < 1 || x[1] % g.groups)
    call.shape_error("groups is " + std::to_string(g.groups) + ", which must divide the " + std::to_string(x[1]) + " channels of x");
  Dims result{x[0], weight[1] * g.groups};
  for (size_t i = 0; i < count; ++i) {
    if (extra[i] >= std::max(g.stride[i], g.dilation[i]))
      call.shape_error("output_padding is " + to_string(extra) + ", needed less than stride or dilation");
    if (extra[i] >= g.stride[i])  // no convolution has this one as its adjoint
      throw UnsupportedError("convolution_transposed: output_padding is " + to_string(extra) + ", which isn't less than the stride; needed less");
    const int64_t size = (x[i + 2] - 1) * g.stride[i] - 2 * g.padding[i] + g.dilation[i] * (weight[i + 2] - 1) + extra[i] + 1;
    if (size < 1) call.shape_error("x is " + to_string(x) + ", whose result would have size " + std::to_string(size) + "; needed 1 or more");
    result.push_back(size);
  }
  return result;
}

OpDef transposed_op() {
  return {
      {.name = "convolution_transposed"},
      /*doc=*/
      "The adjoint of a convolution used forward: x is (batch, channels, sizes), weight (channels, out channels / groups, kernel "
      "sizes); each size becomes (size - 1) stride - 2 padding + dilation (kernel - 1) + output_padding + 1.",
      /*operands=*/{{"x"}, {"weight"}, {"bias", Need::optional}},
      /*attributes=*/
      {{"stride", AttrKind::dims, Dims{1}},
       {"padding", AttrKind::dims, Dims{0}},
       {"output_padding", AttrKind::dims, Dims{0}},
       {"groups", AttrKind::integer, int64_t{1}},
       {"dilation", AttrKind::dims, Dims{1}}},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        need_same_dtype(call, 0, 1);
        const Dims result = transposed_result(call);
        check_bias(call, result[1]);
        return {contiguous_type(call[0].dtype, result)};
      },
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const CallTypes call{op_of(node), {&b.trace().type(node.inputs[0]), &b.trace().type(node.inputs[1])}, node.attrs};
        const Dims shape = transposed_result(call);
        const ValueId y = b.emit1("convolution_input_grad", {node.inputs[0], node.inputs[1]}, with(geometry_of(node.attrs), "input_shape", shape));
        if (node.inputs[2] == no_value) return {y};
        Dims channels(shape.size() - 1, 1);
        channels[0] = shape[1];
        return {b.add(y, b.reshape(node.inputs[2], channels))};
      }},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::lower,
      /*samples=*/
      {{{"lines", {"f32[2,4,5]", "f32[4,3,3]", "f32[3]"}, {}},
        {"strided", {"f32[1,4,3,4]", "f32[4,2,3,3]", "none"}, {{"stride", Dims{2}}, {"padding", Dims{1}}, {"output_padding", Dims{1}}}},
        {"grouped", {"f32[1,4,5]", "f32[4,2,3]", "f32[4]"}, {{"groups", int64_t{2}}}}},
       {{{"channels", {"f32[2,4,5]", "f32[3,4,3]", "none"}, {}}, "ShapeError", "weight takes 3 channels, x has 4"},
        {{"output_padding", {"f32[2,4,5]", "f32[4,3,3]", "none"}, {{"output_padding", Dims{1}}}}, "ShapeError", "output_padding is [1]"}}},
      /*torch=*/{"torch.conv_transpose1d", "torch.conv_transpose2d", "torch.conv_transpose3d", "torch.nn.functional.conv_transpose1d", "torch.nn.functional.conv_transpose2d", "torch.nn.functional.conv_transpose3d"},
  };
}

}  // namespace

std::vector<OpDef> conv_ops() {
  std::vector<OpDef> ops;
  for (auto* entry : {convolution_op, input_grad_op, weight_grad_op, transposed_op}) ops.push_back(entry());
  for (OpDef& op : pooling_ops()) ops.push_back(std::move(op));
  return ops;
}

}  // namespace fulmen
