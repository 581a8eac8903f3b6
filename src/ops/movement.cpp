// Ops that move elements and compute nothing: views (reshape, broadcast_to, permute, slice), joining, padding, turning.
// Composites made of them (squeeze, stack, repeat, tril, ...) are in movement_composites.cpp; ops that read positions
// from a tensor are in indexing.cpp.
#include <algorithm>

#include "ops/builder.h"
#include "ops/families.h"
#include "ops/reference_loops.h"
#include "ops/rules/dims.h"
#include "ops/rules/slices.h"

namespace fulmen {
namespace {

Primitive copy_as_is() {
  return {[](const ReferenceArgs& args) {
    args.outputs[0].f = args.inputs[0]->f;
    args.outputs[0].i = args.inputs[0]->i;
  }};
}

// Rules of the form dx = f(builder, args, dy), x the first operand and the only one with a gradient.
GradientRule for_first(std::function<ValueId(Builder&, const GradientArgs&, ValueId)> rule) {
  return [rule = std::move(rule)](Builder& b, const GradientArgs& args) {
    std::vector<ValueId> grads(args.inputs.size(), no_value);
    if (args.need[0] && args.output_grads[0] != no_value) grads[0] = rule(b, args, args.output_grads[0]);
    return grads;
  };
}

std::string count_text(int64_t count) { return std::to_string(count) + (count == 1 ? " element" : " elements"); }

OpDef reshape() {
  return OpDef{
      {.name = "reshape"},
      "x's elements in row-major order, read with another shape of as many elements. -1 is resolved by whoever records.",
      {{"x"}},
      {{"shape", AttrKind::dims, std::nullopt}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const Dims& shape = call.attrs.get_dims("shape");
        for (int64_t size : shape)
          if (size < 0) call.shape_error("shape is " + to_string(shape) + "; sizes must be 0 or more");
        if (element_count(shape) != call[0].element_count())
          call.shape_error("x is " + to_string(call[0].shape) + " with " + count_text(call[0].element_count()) + ", shape " +
                           to_string(shape) + " has " + std::to_string(element_count(shape)) + "; they must be equal");
        return {result_type(call[0].dtype, shape)};
      },
      copy_as_is(),
      for_first([](Builder& b, const GradientArgs& args, ValueId dy) {
        const Dims shape = b.type(args.inputs[0]).shape;
        return b.reshape(dy, shape);
      }),
      Autocast::keep,
      {{{"split", {"f32[6,4]!"}, {{"shape", Dims{2, 3, 4}}}},
        {"merge", {"f32[2,3,5]!"}, {{"shape", Dims{6, 5}}}},
        {"transposed", {"f32[4,3]{stride=1,4}!"}, {{"shape", Dims{12}}}},
        {"row_gap", {"bf16[4,3]{stride=5,1}!"}, {{"shape", Dims{2, 6}}}},
        {"expanded", {"f32[2,3]{stride=0,1}!"}, {{"shape", Dims{3, 2}}}},
        {"to_scalar", {"f32[1,1]!"}, {{"shape", Dims{}}}},
        {"from_scalar", {"f64[]!"}, {{"shape", Dims{1, 1}}}},
        {"empty", {"f32[0,3]!"}, {{"shape", Dims{5, 0, 2}}}},
        {"integers", {"i64[6]"}, {{"shape", Dims{2, 3}}}},
        {"bools", {"bool[2,2]"}, {{"shape", Dims{4}}}}},
       {{{"counts_differ", {"f32[2,3]"}, {{"shape", Dims{4, 2}}}}, "ShapeError", "reshape: x is [2,3] with 6 elements, shape [4,2] has 8; they must be equal"},
        {{"negative", {"f32[2,3]"}, {{"shape", Dims{-1}}}}, "ShapeError", "shape is [-1]; sizes must be 0 or more"}}},
      {"torch.reshape", "Tensor.reshape", "Tensor.view"}};
}

OpDef broadcast_to() {
  return OpDef{
      {.name = "broadcast_to"},
      "x repeated along new leading dims and dims of size 1 until it has `shape`.",
      {{"x"}},
      {{"shape", AttrKind::dims, std::nullopt}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const Dims &shape = call.attrs.get_dims("shape"), &from = call[0].shape;
        const auto fail = [&]() {
          call.shape_error("x is " + to_string(from) + ", shape is " + to_string(shape) + "; each size of x must be 1 or equal");
        };
        if (shape.size() < from.size()) fail();
        for (size_t back = 1; back <= shape.size(); ++back) {
          const int64_t to = shape[shape.size() - back];
          if (to < 0) fail();
          if (back <= from.size() && from[from.size() - back] != 1 && from[from.size() - back] != to) fail();
        }
        return {result_type(call[0].dtype, shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        for_each_broadcast(args.outputs[0].type.shape, {&args.inputs[0]->type.shape},
                           [&](int64_t linear, const std::vector<int64_t>& at) { copy_element(*args.inputs[0], at[0], args.outputs[0], linear); });
      }},
      for_first([](Builder& b, const GradientArgs& args, ValueId dy) {
        const TensorType type = b.type(args.inputs[0]);
        return b.sum_to(dy, type.shape, type.dtype);
      }),
      Autocast::keep,
      {{{"rows", {"f32[5]!"}, {{"shape", Dims{3, 5}}}},
        {"inner", {"f32[2,1,3]!"}, {{"shape", Dims{2, 4, 3}}}},
        {"both", {"bf16[3,1]{stride=7,1}!"}, {{"shape", Dims{2, 3, 5}}}},
        {"same", {"f32[2,3]!"}, {{"shape", Dims{2, 3}}}},
        {"scalar", {"f64[]!"}, {{"shape", Dims{7}}}},
        {"to_empty", {"f32[1,3]!"}, {{"shape", Dims{0, 3}}}},
        {"integers", {"i32[3,1]"}, {{"shape", Dims{3, 2}}}}},
       {{{"sizes_differ", {"f32[2,3]"}, {{"shape", Dims{2, 4}}}}, "ShapeError", "broadcast_to: x is [2,3], shape is [2,4]; each size of x must be 1 or equal"},
        {{"fewer_dims", {"f32[2,3]"}, {{"shape", Dims{3}}}}, "ShapeError", "x is [2,3], shape is [3]"}}},
      {"torch.broadcast_to", "Tensor.broadcast_to"}};
}

OpDef permute() {
  return OpDef{
      {.name = "permute"},
      "x with its dims in another order: dim i of the result is dim dims[i] of x.",
      {{"x"}},
      {{"dims", AttrKind::dims, std::nullopt}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const Dims& dims = call.attrs.get_dims("dims");
        const int64_t rank = call[0].rank();
        std::vector<bool> seen(static_cast<size_t>(rank), false);
        const auto fail = [&]() {
          call.shape_error("dims is " + to_string(dims) + ", x has " + std::to_string(rank) + " dims; needed each of them once");
        };
        if (static_cast<int64_t>(dims.size()) != rank) fail();
        Dims shape;
        for (int64_t dim : dims) {
          if (dim < -rank || dim >= rank) fail();
          const auto at = static_cast<size_t>(normalise_dim(dim, rank));
          if (seen[at]) fail();
          seen[at] = true;
          shape.push_back(call[0].shape[at]);
        }
        return {result_type(call[0].dtype, shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        const HostTensor& x = *args.inputs[0];
        const Dims own = contiguous_strides(x.type.shape);
        Dims strides;
        for (int64_t dim : args.attrs.get_dims("dims")) strides.push_back(own[static_cast<size_t>(normalise_dim(dim, x.type.rank()))]);
        for_each_index(args.outputs[0].type.shape, [&](const Dims& index, int64_t linear) {
          copy_element(x, linear_index(index, strides), args.outputs[0], linear);
        });
      }},
      for_first([](Builder& b, const GradientArgs& args, ValueId dy) {
        const Dims& dims = args.node.attrs.get_dims("dims");
        Dims inverse(dims.size());
        for (size_t i = 0; i < dims.size(); ++i)
          inverse[static_cast<size_t>(normalise_dim(dims[i], static_cast<int64_t>(dims.size())))] = static_cast<int64_t>(i);
        return b.permute(dy, inverse);
      }),
      Autocast::keep,
      {{{"transpose", {"f32[3,5]!"}, {{"dims", Dims{1, 0}}}},
        {"rotate", {"f32[2,3,5]!"}, {{"dims", Dims{2, 0, 1}}}},
        {"negative", {"bf16[2,3,5]!"}, {{"dims", Dims{0, -1, -2}}}},
        {"strided", {"f32[2,3,4]{stride=1,20,2}!"}, {{"dims", Dims{1, 2, 0}}}},
        {"scalar", {"f32[]!"}, {{"dims", Dims{}}}},
        {"empty", {"f32[0,3]!"}, {{"dims", Dims{1, 0}}}},
        {"bools", {"bool[2,3]"}, {{"dims", Dims{1, 0}}}}},
       {{{"twice", {"f32[2,3]"}, {{"dims", Dims{0, 0}}}}, "ShapeError", "permute: dims is [0,0], x has 2 dims; needed each of them once"},
        {{"too_few", {"f32[2,3]"}, {{"dims", Dims{0}}}}, "ShapeError", "dims is [0], x has 2 dims"},
        {{"too_large", {"f32[2,3]"}, {{"dims", Dims{0, 2}}}}, "ShapeError", "dims is [0,2], x has 2 dims"}}},
      {"torch.permute", "Tensor.permute"}};
}

OpDef slice() {
  return OpDef{
      {.name = "slice"},
      "Elements begin, begin + step, ... before end of one dim. As in Python, negative positions count from the end and "
      "positions outside are clamped; end none is the dim's size.",
      {{"x"}},
      slice_attributes(),
      [](const CallTypes& call) -> std::vector<TensorType> {
        const SliceRange range = checked_slice(call);
        Dims shape = call[0].shape;
        shape[static_cast<size_t>(range.dim)] = range.count;
        return {result_type(call[0].dtype, shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        const HostTensor& x = *args.inputs[0];
        const SliceRange range = slice_range(args.attrs, x.type.shape);
        const Dims strides = contiguous_strides(x.type.shape);
        for_each_index(args.outputs[0].type.shape, [&](const Dims& index, int64_t linear) {
          copy_element(x, linear_index(range.source_index(index), strides), args.outputs[0], linear);
        });
      }},
      for_first([](Builder& b, const GradientArgs& args, ValueId dy) {
        const TensorType type = b.type(args.inputs[0]);
        const SliceRange range = slice_range(args.node.attrs, type.shape);
        if (range.step != 1)
          return b.emit1("slice_scatter", {b.zeros_like(args.inputs[0]), dy}, args.node.attrs);
        Dims pads(type.shape.size() * 2, 0);
        const auto at = static_cast<size_t>(range.dim) * 2;
        pads[at] = range.begin;
        pads[at + 1] = type.shape[static_cast<size_t>(range.dim)] - range.begin - range.count;
        if (pads[at] == 0 && pads[at + 1] == 0) return dy;
        return b.emit1("pad", {dy}, {{"pads", pads}});
      }),
      Autocast::keep,
      {{{"rows", {"f32[7,3]!"}, {{"dim", int64_t{0}}, {"begin", int64_t{2}}, {"end", int64_t{5}}}},
        {"columns", {"f32[3,11]!"}, {{"dim", int64_t{-1}}, {"begin", int64_t{4}}}},
        {"step", {"f32[3,11]!"}, {{"dim", int64_t{1}}, {"begin", int64_t{1}}, {"end", int64_t{10}}, {"step", int64_t{3}}}},
        {"from_the_end", {"bf16[9]!"}, {{"dim", int64_t{0}}, {"begin", int64_t{-4}}, {"end", int64_t{-1}}}},
        {"clamped", {"f32[5]!"}, {{"dim", int64_t{0}}, {"begin", int64_t{1}}, {"end", int64_t{1000}}}},
        {"all", {"f32[2,3]!"}, {{"dim", int64_t{1}}}},
        {"nothing", {"f32[5]!"}, {{"dim", int64_t{0}}, {"begin", int64_t{4}}, {"end", int64_t{2}}}},
        {"strided", {"f32[4,6,2]{stride=2,20,1}!"}, {{"dim", int64_t{1}}, {"begin", int64_t{1}}, {"end", int64_t{6}}, {"step", int64_t{2}}}},
        {"expanded", {"f32[4,6]{stride=0,1}!"}, {{"dim", int64_t{0}}, {"begin", int64_t{1}}, {"end", int64_t{3}}}},
        {"integers", {"i64[5]"}, {{"dim", int64_t{0}}, {"begin", int64_t{1}}}}},
       {{{"dim", {"f32[2,3]"}, {{"dim", int64_t{2}}}}, "ShapeError", "slice: dim is 2, x has 2 dims; dim must be in [-2, 1]"},
        {{"step", {"f32[5]"}, {{"dim", int64_t{0}}, {"step", int64_t{0}}}}, "ShapeError", "step is 0, needed 1 or more"},
        {{"scalar", {"f32[]"}, {{"dim", int64_t{0}}}}, "ShapeError", "x has 0 dims, needed at least 1"}}},
      /*torch=*/{}};
}

OpDef slice_scatter() {
  return OpDef{
      {.name = "slice_scatter"},
      "x with the elements that slice(x) with these attributes reads replaced by src, which has the slice's shape.",
      {{"x"}, {"src"}},
      slice_attributes(),
      [](const CallTypes& call) -> std::vector<TensorType> {
        need_same_dtype(call, 0, 1);
        const SliceRange range = checked_slice(call);
        Dims shape = call[0].shape;
        shape[static_cast<size_t>(range.dim)] = range.count;
        if (call[1].shape != shape) call.shape_error("src is " + to_string(call[1].shape) + ", the slice of x is " + to_string(shape) + "; they must be equal");
        return {result_type(call[0].dtype, call[0].shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        HostTensor& out = args.outputs[0];
        out.f = args.inputs[0]->f;
        out.i = args.inputs[0]->i;
        const SliceRange range = slice_range(args.attrs, out.type.shape);
        const Dims strides = contiguous_strides(out.type.shape);
        for_each_index(args.inputs[1]->type.shape, [&](const Dims& index, int64_t linear) {
          copy_element(*args.inputs[1], linear, out, linear_index(range.source_index(index), strides));
        });
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(2, no_value);
        const ValueId dy = args.output_grads[0];
        if (dy == no_value) return grads;
        if (args.need[0]) grads[0] = b.emit1("slice_scatter", {dy, b.zeros_like(args.inputs[1])}, args.node.attrs);
        if (args.need[1]) grads[1] = b.emit1("slice", {dy}, args.node.attrs);
        return grads;
      }),
      Autocast::keep,
      {{{"rows", {"f32[7,3]!", "f32[3,3]!"}, {{"dim", int64_t{0}}, {"begin", int64_t{2}}, {"end", int64_t{5}}}},
        {"step", {"f32[3,11]!", "f32[3,3]{stride=1,3}!"}, {{"dim", int64_t{1}}, {"begin", int64_t{1}}, {"end", int64_t{10}}, {"step", int64_t{3}}}},
        {"nothing", {"f32[5]!", "f32[0]!"}, {{"dim", int64_t{0}}, {"begin", int64_t{4}}, {"end", int64_t{2}}}},
        {"bf16", {"bf16[9]!", "bf16[3]!"}, {{"dim", int64_t{0}}, {"begin", int64_t{-3}}}},
        {"integers", {"i64[5]", "i64[4]"}, {{"dim", int64_t{0}}, {"begin", int64_t{1}}}}},
       {{{"src_shape", {"f32[5]", "f32[2]"}, {{"dim", int64_t{0}}, {"begin", int64_t{1}}}}, "ShapeError", "slice_scatter: src is [2], the slice of x is [4]; they must be equal"},
        {{"src_dtype", {"f32[5]", "f64[5]"}, {{"dim", int64_t{0}}}}, "TypeError", "src is f64, x is f32; needed the same dtype"}}},
      {"torch.slice_scatter", "Tensor.slice_scatter"}};
}

OpDef cat() {
  return OpDef{
      {.name = "cat"},
      "The tensors one after the other along `dim`; the other sizes are equal. The dtype is the promoted one.",
      {{"tensors", Need::variadic}},
      {{"dim", AttrKind::integer, AttrValue(int64_t{0})}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        if (call.inputs.empty()) call.shape_error("there are no tensors, needed at least 1");
        if (call[0].rank() == 0) call.shape_error("tensors[0] has 0 dims, needed at least 1");
        const int64_t dim = checked_dim(call, call.attrs.get_int("dim"), call[0].rank());
        Dims shape = call[0].shape;
        for (size_t i = 1; i < call.inputs.size(); ++i) {
          Dims other = call[i].shape;
          const bool same_rank = other.size() == shape.size();
          const int64_t added = same_rank ? other[static_cast<size_t>(dim)] : 0;
          if (same_rank) other[static_cast<size_t>(dim)] = shape[static_cast<size_t>(dim)];
          if (other != shape)
            call.shape_error("tensors[" + std::to_string(i) + "] is " + to_string(call[i].shape) + ", tensors[0] is " +
                             to_string(call[0].shape) + "; all sizes but that of dim " + std::to_string(dim) + " must be equal");
          shape[static_cast<size_t>(dim)] += added;
        }
        return {result_type(promoted_dtype(call.inputs), shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        HostTensor& out = args.outputs[0];
        const int64_t dim = dim_of(args.attrs, out.type.rank());
        const Dims strides = contiguous_strides(out.type.shape);
        int64_t begin = 0;
        for (const HostTensor* part : args.inputs) {
          for_each_index(part->type.shape, [&](const Dims& index, int64_t linear) {
            copy_element(*part, linear, out, linear_index(index, strides) + begin * strides[static_cast<size_t>(dim)]);
          });
          begin += part->type.shape[static_cast<size_t>(dim)];
        }
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(args.inputs.size(), no_value);
        const ValueId dy = args.output_grads[0];
        if (dy == no_value) return grads;
        const int64_t dim = dim_of(args.node.attrs, b.type(dy).rank());
        int64_t begin = 0;
        for (size_t i = 0; i < args.inputs.size(); ++i) {
          const TensorType type = b.type(args.inputs[i]);
          const int64_t end = begin + type.shape[static_cast<size_t>(dim)];
          if (args.need[i]) grads[i] = b.convert(b.slice(dy, dim, begin, end), type.dtype);
          begin = end;
        }
        return grads;
      }),
      Autocast::widest,
      {{{"rows", {"f32[2,3]!", "f32[4,3]!"}, {}},
        {"columns", {"f32[3,2]!", "f32[3,5]{stride=1,3}!", "f32[3,1]!"}, {{"dim", int64_t{-1}}}},
        {"one", {"f32[3]!"}, {}},
        {"empty_part", {"f32[2,0]!", "f32[2,3]!"}, {{"dim", int64_t{1}}}},
        {"mixed", {"bf16[2]!", "f32[3]!"}, {}},
        {"middle", {"bf16[2,3,2]!", "bf16[2,2,2]{stride=4,0,1}!"}, {{"dim", int64_t{1}}}},
        {"integers", {"i32[2]", "i64[3]"}, {}},
        {"bools", {"bool[2]", "bool[1]"}, {}}},
       {{{"sizes_differ", {"f32[2,3]", "f32[2,4]"}, {}}, "ShapeError", "cat: tensors[1] is [2,4], tensors[0] is [2,3]; all sizes but that of dim 0 must be equal"},
        {{"dim", {"f32[2,3]", "f32[2,3]"}, {{"dim", int64_t{2}}}}, "ShapeError", "dim is 2, tensors[0] has 2 dims; dim must be in [-2, 1]"},
        {{"scalars", {"f32[]", "f32[]"}, {}}, "ShapeError", "tensors[0] has 0 dims, needed at least 1"}}},
      {"torch.cat", "torch.concat", "torch.concatenate"}};
}

OpDef pad() {
  return OpDef{
      {.name = "pad"},
      "x with pads[2 d] elements of `value` before and pads[2 d + 1] after it in dim d.",
      {{"x"}},
      {{"pads", AttrKind::dims, std::nullopt}, {"value", AttrKind::number, AttrValue(0.0)}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const Dims& pads = call.attrs.get_dims("pads");
        if (pads.size() != call[0].shape.size() * 2)
          call.shape_error("pads has " + std::to_string(pads.size()) + " numbers, x has " + std::to_string(call[0].rank()) + " dims; needed two a dim");
        Dims shape = call[0].shape;
        for (size_t i = 0; i < pads.size(); ++i) {
          if (pads[i] < 0) call.shape_error("pads is " + to_string(pads) + "; all must be 0 or more");
          shape[i / 2] += pads[i];
        }
        return {result_type(call[0].dtype, shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        HostTensor& out = args.outputs[0];
        const Dims& pads = args.attrs.get_dims("pads");
        HostTensor value = make_host(DType::f64, {});
        value.f[0] = args.attrs.get_float("value");
        for (int64_t k = 0; k < out.type.element_count(); ++k) copy_element(value, 0, out, k);
        const Dims strides = contiguous_strides(out.type.shape);
        int64_t first = 0;
        for (size_t d = 0; d < strides.size(); ++d) first += pads[2 * d] * strides[d];
        for_each_index(args.inputs[0]->type.shape, [&](const Dims& index, int64_t linear) {
          copy_element(*args.inputs[0], linear, out, first + linear_index(index, strides));
        });
      }},
      for_first([](Builder& b, const GradientArgs& args, ValueId dy) {
        const Dims& pads = args.node.attrs.get_dims("pads");
        const Dims shape = b.type(args.inputs[0]).shape;
        for (size_t d = 0; d < shape.size(); ++d)
          if (pads[2 * d] || pads[2 * d + 1]) dy = b.slice(dy, static_cast<int64_t>(d), pads[2 * d], pads[2 * d] + shape[d]);
        return dy;
      }),
      Autocast::keep,
      {{{"both_dims", {"f32[2,3]!"}, {{"pads", Dims{1, 0, 2, 1}}}},
        {"value", {"f32[5]!"}, {{"pads", Dims{1, 2}}, {"value", -1.5}}},
        {"nothing", {"f32[2,2]!"}, {{"pads", Dims{0, 0, 0, 0}}}},
        {"from_empty", {"f32[0,2]!"}, {{"pads", Dims{1, 1, 0, 0}}, {"value", 3.0}}},
        {"transposed", {"bf16[3,4]{stride=1,3}!"}, {{"pads", Dims{0, 1, 1, 0}}}},
        {"scalar", {"f32[]!"}, {{"pads", Dims{}}}},
        {"integers", {"i64[3]"}, {{"pads", Dims{1, 1}}, {"value", int64_t{-100}}}}},
       {{{"count", {"f32[2,3]"}, {{"pads", Dims{1, 1}}}}, "ShapeError", "pad: pads has 2 numbers, x has 2 dims; needed two a dim"},
        {{"negative", {"f32[3]"}, {{"pads", Dims{-1, 1}}}}, "ShapeError", "pads is [-1,1]; all must be 0 or more"}}},
      /*torch=*/{}};
}

OpDef flip() {
  return OpDef{{.name = "flip"},
               "x with the order of elements turned round in the named dims.",
               {{"x"}},
               {{"dims", AttrKind::dims, std::nullopt}},
               [](const CallTypes& call) -> std::vector<TensorType> {
                 for (int64_t dim : call.attrs.get_dims("dims")) checked_dim(call, dim, call[0].rank(), "a dim");
                 return {result_type(call[0].dtype, call[0].shape)};
               },
               Primitive{[](const ReferenceArgs& args) {
                 const Dims& shape = args.outputs[0].type.shape;
                 const Dims strides = contiguous_strides(shape);
                 std::vector<bool> turned(shape.size() + 1, false);
                 for (int64_t dim : args.attrs.get_dims("dims")) turned[static_cast<size_t>(normalise_dim(dim, static_cast<int64_t>(shape.size())))] = true;
                 for_each_index(shape, [&](const Dims& index, int64_t linear) {
                   Dims from = index;
                   for (size_t d = 0; d < from.size(); ++d)
                     if (turned[d]) from[d] = shape[d] - 1 - from[d];
                   copy_element(*args.inputs[0], linear_index(from, strides), args.outputs[0], linear);
                 });
               }},
               for_first([](Builder& b, const GradientArgs& args, ValueId dy) { return b.emit1("flip", {dy}, args.node.attrs); }),
               Autocast::keep,
               {{{"one", {"f32[2,5]!"}, {{"dims", Dims{1}}}},
                 {"both", {"f32[3,4]{stride=1,3}!"}, {{"dims", Dims{0, -1}}}},
                 {"none", {"bf16[3]!"}, {{"dims", Dims{}}}},
                 {"empty", {"f32[0,3]!"}, {{"dims", Dims{0}}}},
                 {"integers", {"i64[5]"}, {{"dims", Dims{0}}}}},
                {{{"dim", {"f32[2]"}, {{"dims", Dims{1}}}}, "ShapeError", "flip: a dim is 1, x has 1 dims; a dim must be in [-1, 0]"}}},
               {"torch.flip", "Tensor.flip"}};
}

OpDef contiguous() {
  return OpDef{{.name = "contiguous"},
               "x itself, in memory of its own in row-major order.",
               {{"x"}},
               /*attributes=*/{},
               [](const CallTypes& call) -> std::vector<TensorType> { return {result_type(call[0].dtype, call[0].shape)}; },
               copy_as_is(),
               for_first([](Builder&, const GradientArgs&, ValueId dy) { return dy; }),
               Autocast::keep,
               {{{"plain", {"f32[3,5]!"}, {}},
                 {"transposed", {"f32[5,3]{stride=1,5}!"}, {}},
                 {"expanded", {"bf16[4,3]{stride=0,1}!"}, {}},
                 {"spread", {"f64[2,3,5]{stride=60,2,8}!"}, {}},
                 {"bools", {"bool[3,2]{stride=1,3}"}, {}},
                 {"bytes", {"u8[3,7]{stride=9,1}"}, {}},
                 {"empty", {"f32[0]!"}, {}},
                 {"scalar", {"i64[]"}, {}}},
                {{{"two_operands", {"f32[2]", "f32[2]"}, {}}, "TypeError", "takes at most 1"}}},
               {"Tensor.contiguous", "Tensor.clone", "torch.clone"}};
}

}  // namespace

std::vector<OpDef> movement_composites();

std::vector<OpDef> movement_ops() {
  std::vector<OpDef> ops;
  for (auto* entry : {reshape, broadcast_to, permute, slice, slice_scatter, cat, pad, flip, contiguous}) ops.push_back(entry());
  for (OpDef& op : movement_composites()) ops.push_back(std::move(op));
  return ops;
}

}  // namespace fulmen
