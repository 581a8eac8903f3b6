// Pools over two spatial dims. max_pool2d is a primitive with a primitive gradient; the averages are composites of
// convolutions and matrix products.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/axes.h"
#include "ops/convolution_geometry.h"
#include "ops/families.h"
#include "ops/reference_loops.h"

namespace fulmen {

std::vector<OpDef> pooling_ops();

namespace {

struct Window {
  Dims kernel, stride, padding, dilation;
  explicit Window(const Attributes& attrs) : kernel(spatial_list(attrs, "kernel", 2, 1)) {
    stride = attrs.get_dims("stride").empty() ? kernel : spatial_list(attrs, "stride", 2, 1);
    padding = spatial_list(attrs, "padding", 2, 0);
    dilation = attrs.has("dilation") ? spatial_list(attrs, "dilation", 2, 1) : Dims{1, 1};
  }
};

// (batch, channels, sizes) of a pool; x may lack the batch.
Dims pooled(const CallTypes& call, const Dims& x, bool ceil_mode) {
  if (x.size() != 3 && x.size() != 4) call.shape_error("x is " + to_string(x) + ", needed (batch, channels, height, width)");
  check_spatial_list(call, "kernel", 2, 1);
  check_spatial_list(call, "stride", 2, 1);
  check_spatial_list(call, "padding", 2, 0);
  if (call.attrs.has("dilation")) check_spatial_list(call, "dilation", 2, 1);
  const Window w(call.attrs);
  Dims result(x.begin(), x.end() - 2);
  for (size_t i = 0; i < 2; ++i) {
    const int64_t size = x[x.size() - 2 + i];
    if (2 * w.padding[i] > w.kernel[i])
      call.shape_error("padding is " + to_string(w.padding) + ", needed at most half the kernel " + to_string(w.kernel));
    const int64_t room = size + 2 * w.padding[i] - w.dilation[i] * (w.kernel[i] - 1) - 1;
    if (room < 0) call.shape_error("x is " + to_string(x) + ", smaller than the kernel " + to_string(w.kernel) + " with its padding");
    int64_t count = (ceil_mode ? (room + w.stride[i] - 1) / w.stride[i] : room / w.stride[i]) + 1;
    // A last window that would start behind the input and its left padding is dropped.
    if (ceil_mode && (count - 1) * w.stride[i] >= size + w.padding[i]) --count;
    result.push_back(count);
  }
  return result;
}

// body(index of the largest element in x, index in y) for each window; NaN is the largest, ties go to the first.
template <class F>
void for_each_maximum(const HostTensor& x, const Dims& y, const Window& w, F&& body) {
  const Dims& shape = x.type.shape;
  const int64_t height = shape[shape.size() - 2], width = shape.back();
  const int64_t rows = y[y.size() - 2], columns = y.back();
  const int64_t planes = element_count(Dims(y.begin(), y.end() - 2));
  for (int64_t plane = 0; plane < planes; ++plane)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) {
        int64_t best = -1;
        for (int64_t i = 0; i < w.kernel[0]; ++i)
          for (int64_t j = 0; j < w.kernel[1]; ++j) {
            const int64_t row = r * w.stride[0] - w.padding[0] + i * w.dilation[0], column = c * w.stride[1] - w.padding[1] + j * w.dilation[1];
            if (row < 0 || row >= height || column < 0 || column >= width) continue;
            const int64_t at = (plane * height + row) * width + column;
            if (best < 0 || x.at(at) > x.at(best) || (std::isnan(x.at(at)) && !std::isnan(x.at(best)))) best = at;
          }
        body(best, (plane * rows + r) * columns + c);
      }
}

std::vector<AttrDef> max_attributes() {
  return {{"kernel", AttrKind::dims, std::nullopt},
          {"stride", AttrKind::dims, Dims{}},
          {"padding", AttrKind::dims, Dims{0}},
          {"dilation", AttrKind::dims, Dims{1}},
          {"ceil_mode", AttrKind::boolean, false}};
}

OpDef max_pool_op() {
  return {
      {.name = "max_pool2d"},
      /*doc=*/
      "The largest element of each kernel window of x, (batch, channels, height, width) or without the batch. stride is the kernel "
      "if empty; padding counts as smaller than everything. NaN wins; ties give their gradient to the first.",
      /*operands=*/{{"x"}},
      max_attributes(),
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        return {contiguous_type(call[0].dtype, pooled(call, call[0].shape, call.attrs.get_bool("ceil_mode")))};
      },
      /*meaning=*/Primitive{[](const ReferenceArgs& args) {
        const HostTensor& x = *args.inputs[0];
        HostTensor& out = args.outputs[0];
        for_each_maximum(x, out.type.shape, Window(args.attrs), [&](int64_t from, int64_t to) {
          out.f[static_cast<size_t>(to)] = from < 0 ? -std::numeric_limits<double>::infinity() : x.f[static_cast<size_t>(from)];
        });
      }},
      /*gradient=*/GradientRule{[](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        return {b.emit1("max_pool2d_grad", {args.output_grads[0], args.inputs[0]}, args.node.attrs)};
      }},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"plain", {"f32[2,3,8,6]"}, {{"kernel", Dims{2}}}},
        {"overlapping", {"f32[1,2,9,7]"}, {{"kernel", Dims{3}}, {"stride", Dims{2}}, {"padding", Dims{1}}}},
        {"ceil", {"f32[1,2,8,7]"}, {{"kernel", Dims{3, 2}}, {"stride", Dims{2}}, {"ceil_mode", true}}},
        {"dilated", {"f32[1,1,9,9]"}, {{"kernel", Dims{2}}, {"stride", Dims{1}}, {"dilation", Dims{3}}}},
        {"no_batch_dim", {"f32[2,6,6]"}, {{"kernel", Dims{2}}}},
        {"channels_last", {"f32[2,3,4,4]{stride=48,1,12,3}"}, {{"kernel", Dims{2}}}},
        {"bf16", {"bf16[1,3,8,8]"}, {{"kernel", Dims{2}}}}},
       {{{"rank", {"f32[6,6]"}, {{"kernel", Dims{2}}}}, "ShapeError", "x is [6,6], needed (batch, channels, height, width)"},
        {{"kernel", {"f32[1,1,2,2]"}, {{"kernel", Dims{3}}}}, "ShapeError", "smaller than the kernel [3,3]"},
        {{"padding", {"f32[1,1,4,4]"}, {{"kernel", Dims{2}}, {"padding", Dims{2}}}}, "ShapeError", "padding is [2,2]"}}},
      /*torch=*/{"torch.max_pool2d", "torch.nn.functional.max_pool2d"},
  };
}

OpDef max_pool_grad_op() {
  return {
      {.name = "max_pool2d_grad"},
      /*doc=*/"Adds grad, of max_pool2d's result shape, at each window's largest element of x. The attributes are max_pool2d's.",
      /*operands=*/{{"grad"}, {"x"}},
      max_attributes(),
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        need_same_dtype(call, 0, 1);
        const Dims needed = pooled(call, call[1].shape, call.attrs.get_bool("ceil_mode"));
        if (call[0].shape != needed) call.shape_error("grad is " + to_string(call[0].shape) + ", needed " + to_string(needed));
        return {contiguous_type(call[1].dtype, call[1].shape)};
      },
      /*meaning=*/Primitive{[](const ReferenceArgs& args) {
        HostTensor& out = args.outputs[0];
        std::fill(out.f.begin(), out.f.end(), 0.0);
        for_each_maximum(*args.inputs[1], args.inputs[0]->type.shape, Window(args.attrs), [&](int64_t from, int64_t to) {
          if (from >= 0) out.f[static_cast<size_t>(from)] += args.inputs[0]->f[static_cast<size_t>(to)];
        });
      }},
      /*gradient=*/GradientRule{[](Builder&, const GradientArgs&) -> std::vector<ValueId> {
        throw UnsupportedError("max_pool2d_grad: second derivatives of max_pool2d are not supported");
      }},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"plain", {"f32[2,3,4,3]", "f32[2,3,8,6]"}, {{"kernel", Dims{2}}}},
        {"overlapping", {"f32[1,2,3,3]{stride=0,0,0,0}", "f32[1,2,7,7]"}, {{"kernel", Dims{3}}, {"stride", Dims{2}}}},
        {"bf16", {"bf16[1,2,4,4]", "bf16[1,2,7,7]"}, {{"kernel", Dims{3}}, {"stride", Dims{2}}, {"padding", Dims{1}}}}},
       {{{"grad_shape", {"f32[2,3,4,4]", "f32[2,3,8,6]"}, {{"kernel", Dims{2}}}}, "ShapeError", "grad is [2,3,4,4], needed [2,3,4,3]"}}},
      /*torch=*/{},
  };
}

OpDef avg_pool_op() {
  return {
      {.name = "avg_pool2d"},
      /*doc=*/
      "The mean of each kernel window of x, (batch, channels, height, width) or without the batch. stride is the kernel if empty. "
      "Padding counts as zeros, or not at all without count_include_pad.",
      /*operands=*/{{"x"}},
      /*attributes=*/
      {{"kernel", AttrKind::dims, std::nullopt},
       {"stride", AttrKind::dims, Dims{}},
       {"padding", AttrKind::dims, Dims{0}},
       {"ceil_mode", AttrKind::boolean, false},
       {"count_include_pad", AttrKind::boolean, true}},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        if (call.attrs.get_bool("ceil_mode")) call.shape_error("ceil_mode is true, needed false: averages of partial windows are not supported");
        return {contiguous_type(call[0].dtype, pooled(call, call[0].shape, false))};
      },
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const ValueId x = node.inputs[0];
        const TensorType type = b.type(x);
        const DType dtype = compute_dtype(type.dtype);
        const Window w(node.attrs);
        const Dims& shape = type.shape;
        const int64_t planes = element_count(Dims(shape.begin(), shape.end() - 2)), height = shape[shape.size() - 2], width = shape.back();
        const Attributes attrs{{"stride", w.stride}, {"padding", w.padding}};
        const auto sums = [&](ValueId value, double weight) {
          return b.emit1("convolution", {value, full_on(b, {1, 1, w.kernel[0], w.kernel[1]}, weight, dtype, x)}, attrs);
        };
        const bool all = node.attrs.get_bool("count_include_pad");
        ValueId y = sums(b.reshape(b.convert(x, dtype), {planes, 1, height, width}), all ? 1.0 / static_cast<double>(w.kernel[0] * w.kernel[1]) : 1.0);
        if (!all) y = b.div(y, sums(full_on(b, {1, 1, height, width}, 1.0, dtype, x), 1.0));
        Dims result(shape.begin(), shape.end() - 2);
        result.push_back(b.type(y).shape[2]);
        result.push_back(b.type(y).shape[3]);
        return {b.convert(b.reshape(y, result), type.dtype)};
      }},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"plain", {"f32[2,3,8,6]"}, {{"kernel", Dims{2}}}},
        {"padded", {"f32[1,2,9,7]"}, {{"kernel", Dims{3}}, {"stride", Dims{2}}, {"padding", Dims{1}}}},
        {"padding_left_out", {"f32[1,2,9,7]"}, {{"kernel", Dims{3}}, {"stride", Dims{2}}, {"padding", Dims{1}}, {"count_include_pad", false}}},
        {"no_batch_dim", {"f32[2,6,6]"}, {{"kernel", Dims{3, 2}}}},
        {"bf16", {"bf16[1,3,8,8]"}, {{"kernel", Dims{2}}}}},
       {{{"kernel", {"f32[1,1,2,2]"}, {{"kernel", Dims{3}}}}, "ShapeError", "smaller than the kernel [3,3]"}}},
      /*torch=*/{"torch._C._nn.avg_pool2d", "torch.nn.functional.avg_pool2d"},
  };
}

// (result, size): 1 / length where the input position lies in window i of [floor(i size / result), ceil((i + 1) size / result)).
ValueId averaging_matrix(Builder& b, int64_t size, int64_t result, DType dtype, ValueId like) {
  const ValueId i = count_along(b, result, 2, 0, like), position = count_along(b, size, 2, 1, like);
  const auto number = [&](int64_t value) { return b.number(static_cast<double>(value), DType::i64); };
  const ValueId begin = b.emit1("div", {b.mul(i, number(size)), number(result)}, {{"rounding", std::string("floor")}});
  const ValueId end = b.emit1("div", {b.add(b.mul(b.add(i, number(1)), number(size)), number(result - 1)), number(result)}, {{"rounding", std::string("floor")}});
  const ValueId inside = b.emit1("logical_and", {b.emit1("ge", {position, begin}), b.emit1("lt", {position, end})});
  const ValueId length = b.convert(b.sub(end, begin), dtype);
  return b.where(inside, b.div(b.number(1.0, dtype), length), b.number(0.0, dtype));
}

OpDef adaptive_op() {
  return {
      {.name = "adaptive_avg_pool2d"},
      /*doc=*/
      "Means over windows chosen so that the result has output_size: row i averages x's rows floor(i h / r) to ceil((i + 1) h / r) - 1, "
      "columns likewise. [1,1] is the mean of each plane.",
      /*operands=*/{{"x"}},
      /*attributes=*/{{"output_size", AttrKind::dims, std::nullopt}},
      /*shape=*/[](const CallTypes& call) -> std::vector<TensorType> {
        need_float(call, 0);
        need_rank(call, 0, 3, 4);
        check_spatial_list(call, "output_size", 2, 1);
        const Dims size = spatial_list(call.attrs, "output_size", 2, 1);
        Dims shape = call[0].shape;
        for (size_t i = 0; i < 2; ++i) {
          int64_t& at = shape[shape.size() - 2 + i];
          if (at < 1) call.shape_error("x is " + to_string(call[0].shape) + ", which has no pixels; needed 1 or more");
          at = size[i];
        }
        return {contiguous_type(call[0].dtype, shape)};
      },
      /*meaning=*/Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const ValueId x = node.inputs[0];
        const TensorType type = b.type(x);
        const DType dtype = compute_dtype(type.dtype);
        const Dims size = spatial_list(node.attrs, "output_size", 2, 1);
        const ValueId wide = b.convert(x, dtype);
        if (size == Dims{1, 1}) return {b.convert(b.emit1("mean", {wide}, {{"dims", Dims{-2, -1}}, {"keepdim", true}}), type.dtype)};
        const ValueId rows = averaging_matrix(b, type.shape[type.shape.size() - 2], size[0], dtype, x);
        const ValueId columns = averaging_matrix(b, type.shape.back(), size[1], dtype, x);
        return {b.convert(b.matmul(b.matmul(rows, wide), b.transpose(columns, 0, 1)), type.dtype)};
      }},
      /*gradient=*/ByDecomposition{},
      /*autocast=*/Autocast::keep,
      /*samples=*/
      {{{"whole", {"f32[2,3,5,7]"}, {{"output_size", Dims{1}}}},
        {"uneven", {"f32[2,3,5,7]"}, {{"output_size", Dims{2, 3}}}},
        {"larger", {"f32[1,2,3,3]"}, {{"output_size", Dims{4, 5}}}},
        {"no_batch_dim", {"f32[2,6,6]"}, {{"output_size", Dims{3}}}},
        {"bf16", {"bf16[1,3,8,8]"}, {{"output_size", Dims{1}}}}},
       {{{"rank", {"f32[6,6]"}, {{"output_size", Dims{1}}}}, "ShapeError", "x has 2 dims, needed 3 to 4"}}},
      /*torch=*/{"torch.nn.functional.adaptive_avg_pool2d"},
  };
}

}  // namespace

std::vector<OpDef> pooling_ops() {
  std::vector<OpDef> ops;
  for (auto* entry : {max_pool_op, max_pool_grad_op, avg_pool_op, adaptive_op}) ops.push_back(entry());
  return ops;
}

}  // namespace fulmen
