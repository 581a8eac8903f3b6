// Indexing by several integer tensors at once, as PyTorch's x[i, :, j] does: the index tensors are broadcast together;
// their dims replace the indexed ones where those stand side by side, and come first where they don't. Bool masks
// aren't taken, because a shape can't depend on values.
#include <algorithm>

#include "ops/builder.h"
#include "ops/families.h"
#include "ops/reference_loops.h"
#include "ops/rules/dims.h"
#include "ops/rules/index_reads.h"

namespace fulmen {
namespace {

// Where the parts of an indexed result stand.
struct IndexLayout {
  Dims picked;       // broadcast shape of the index tensors
  Dims result;       // shape of x[...]
  int64_t front = 0;  // first dim of `picked` in the result
  Dims dims;         // indexed dims of x, normal
  Dims kept;         // the other dims of x, in order
};

IndexLayout layout_of(const Dims& x, const Dims& dims, Dims picked) {
  IndexLayout layout;
  layout.picked = std::move(picked);
  const auto rank = static_cast<int64_t>(x.size());
  for (int64_t dim : dims) layout.dims.push_back(normalise_dim(dim, rank));
  bool adjacent = true;
  for (size_t i = 1; i < layout.dims.size(); ++i) adjacent &= layout.dims[i] == layout.dims[i - 1] + 1;
  layout.front = adjacent && !layout.dims.empty() ? layout.dims[0] : 0;
  for (int64_t d = 0; d < rank; ++d) {
    if (std::find(layout.dims.begin(), layout.dims.end(), d) != layout.dims.end()) continue;
    layout.kept.push_back(d);
    layout.result.push_back(x[static_cast<size_t>(d)]);
  }
  layout.result.insert(layout.result.begin() + layout.front, layout.picked.begin(), layout.picked.end());
  return layout;
}

// The layout of a call whose index tensors start at operand `first`, checked.
IndexLayout checked_layout(const CallTypes& call, size_t first) {
  const Dims& dims = call.attrs.get_dims("dims");
  const int64_t rank = call[0].rank();
  const size_t count = call.inputs.size() - std::min(first, call.inputs.size());
  if (count == 0 || count != dims.size())
    call.shape_error("dims is " + to_string(dims) + ", there are " + std::to_string(count) + " index tensors; needed one a dim, at least one");
  Dims picked;
  for (size_t i = first; i < call.inputs.size(); ++i) {
    if (!is_integer(call[i].dtype))
      call.type_error(operand_name(call.op, i) + " is " + std::string(dtype_name(call[i].dtype)) + ", needed an integer dtype" +
                      (call[i].dtype == DType::boolean ? ": the shape of a masked selection depends on values" : ""));
    const auto joined = broadcast_shapes(picked, call[i].shape);
    if (!joined)
      call.shape_error(operand_name(call.op, i) + " is " + to_string(call[i].shape) + ", those before it give " + to_string(picked) +
                       "; sizes must be equal or 1");
    picked = *joined;
  }
  int64_t before = -1;
  for (int64_t dim : dims) {
    const int64_t d = checked_dim(call, dim, rank, "a dim");
    if (rank == 0 || d <= before) call.shape_error("dims is " + to_string(dims) + ", x has " + std::to_string(rank) + " dims; they must rise");
    before = d;
  }
  return layout_of(call[0].shape, dims, picked);
}

Dims picked_shape(const std::vector<Dims>& shapes) {
  Dims picked;
  for (const Dims& shape : shapes) picked = broadcast_shapes(picked, shape).value();
  return picked;
}

// body(linear in the result, linear in x)
template <class F>
void for_each_indexed(const char* op, const ReferenceArgs& args, size_t first, const Dims& x, F&& body) {
  std::vector<Dims> shapes, strides;
  for (size_t i = first; i < args.inputs.size(); ++i) shapes.push_back(args.inputs[i]->type.shape);
  const IndexLayout layout = layout_of(x, args.attrs.get_dims("dims"), picked_shape(shapes));
  for (const Dims& shape : shapes) strides.push_back(broadcast_strides(shape, layout.picked));
  const Dims x_strides = contiguous_strides(x);
  const auto picked_rank = static_cast<int64_t>(layout.picked.size());
  for_each_index(layout.result, [&](const Dims& index, int64_t linear) {
    int64_t from = 0;
    const Dims place(index.begin() + layout.front, index.begin() + layout.front + picked_rank);
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto d = static_cast<size_t>(layout.dims[i]);
      const int64_t held = args.inputs[first + i]->i[static_cast<size_t>(linear_index(place, strides[i]))];
      from += checked_position(op, held, x[d]) * x_strides[d];
    }
    for (size_t k = 0; k < layout.kept.size(); ++k) {
      const auto at = static_cast<int64_t>(k) < layout.front ? k : k + static_cast<size_t>(picked_rank);
      from += index[at] * x_strides[static_cast<size_t>(layout.kept[k])];
    }
    body(linear, from);
  });
}

std::vector<ValueId> with_indices(std::vector<ValueId> head, std::span<const ValueId> inputs, size_t first) {
  for (size_t i = first; i < inputs.size(); ++i) head.push_back(inputs[i]);
  return head;
}

OpDef index() {
  return OpDef{
      {.name = "index"},
      "x indexed by integer tensors in `dims` (rising), as PyTorch's x[i, :, j]: the tensors are broadcast together, their dims "
      "stand where the indexed dims stood if those are neighbours, else first. Negative positions count from the end.",
      {{"x"}, {"indices", Need::variadic}},
      {{"dims", AttrKind::dims, std::nullopt}},
      [](const CallTypes& call) -> std::vector<TensorType> { return {result_type(call[0].dtype, checked_layout(call, 1).result)}; },
      Primitive{[](const ReferenceArgs& args) {
        const HostTensor& x = *args.inputs[0];
        for_each_indexed("index", args, 1, x.type.shape, [&](int64_t linear, int64_t from) { copy_element(x, from, args.outputs[0], linear); });
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(args.inputs.size(), no_value);
        if (args.need[0] && args.output_grads[0] != no_value)
          grads[0] = b.emit1("index_put", with_indices({b.zeros_like(args.inputs[0]), args.output_grads[0]}, args.inputs, 1),
                             {{"dims", args.node.attrs.get_dims("dims")}, {"accumulate", true}});
        return grads;
      }),
      Autocast::keep,
      {{{"rows", {"f32[5,3]!", "i64[4]"}, {{"dims", Dims{0}}}, "signed"},
        {"pairs", {"f32[5,3]!", "i64[4]", "i64[4]"}, {{"dims", Dims{0, 1}}}, "signed"},
        {"broadcast", {"f32[5,3,2]!", "i64[4,1]", "i32[3]"}, {{"dims", Dims{0, 1}}}},
        {"apart", {"f32[4,3,5]!", "i64[2]", "i64[2]"}, {{"dims", Dims{0, 2}}}},
        {"middle", {"bf16[2,5,3,2]!", "i64[3]", "i64[3]"}, {{"dims", Dims{1, 2}}}},
        {"last", {"f32[2,5]{stride=1,2}!", "i64[2,2]"}, {{"dims", Dims{-1}}}},
        {"scalar_index", {"f32[5,3]!", "i64[]"}, {{"dims", Dims{0}}}},
        {"empty", {"f32[5,3]!", "i64[0]"}, {{"dims", Dims{0}}}},
        {"integers", {"i64[5]", "i64[7]"}, {{"dims", Dims{0}}}, "signed"}},
       {{{"mask", {"f32[5]", "bool[5]"}, {{"dims", Dims{0}}}}, "TypeError", "index: indices[0] is bool, needed an integer dtype: the shape of a masked selection depends on values"},
        {{"count", {"f32[5,3]", "i64[2]"}, {{"dims", Dims{0, 1}}}}, "ShapeError", "dims is [0,1], there are 1 index tensors; needed one a dim, at least one"},
        {{"order", {"f32[5,3]", "i64[2]", "i64[2]"}, {{"dims", Dims{1, 0}}}}, "ShapeError", "dims is [1,0], x has 2 dims; they must rise"},
        {{"sizes", {"f32[5,3]", "i64[2]", "i64[3]"}, {{"dims", Dims{0, 1}}}}, "ShapeError", "indices[1] is [3], those before it give [2]; sizes must be equal or 1"}}},
      /*torch=*/{}};
}

OpDef index_put() {
  return OpDef{
      {.name = "index_put"},
      "x with the elements that index(x, indices) reads replaced by values (broadcast to that shape), or with values added to "
      "them if accumulate. Without accumulate, one of the values of a repeated position stays.",
      {{"x"}, {"values"}, {"indices", Need::variadic}},
      {{"dims", AttrKind::dims, std::nullopt}, {"accumulate", AttrKind::boolean, AttrValue(false)}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        need_same_dtype(call, 0, 1);
        const IndexLayout layout = checked_layout(call, 2);
        const auto joined = broadcast_shapes(call[1].shape, layout.result);
        if (!joined || *joined != layout.result)
          call.shape_error("values is " + to_string(call[1].shape) + ", the indexed part of x is " + to_string(layout.result) + "; values must broadcast to it");
        return {result_type(call[0].dtype, call[0].shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        HostTensor& out = args.outputs[0];
        out.f = args.inputs[0]->f;
        out.i = args.inputs[0]->i;
        const HostTensor& values = *args.inputs[1];
        const bool accumulate = args.attrs.get_bool("accumulate");
        std::vector<Dims> shapes;
        for (size_t i = 2; i < args.inputs.size(); ++i) shapes.push_back(args.inputs[i]->type.shape);
        const Dims result = layout_of(out.type.shape, args.attrs.get_dims("dims"), picked_shape(shapes)).result;
        std::vector<int64_t> source;  // the element of values for each element of the indexed part
        for_each_broadcast(result, {&values.type.shape}, [&](int64_t, const std::vector<int64_t>& at) { source.push_back(at[0]); });
        for_each_indexed("index_put", args, 2, out.type.shape, [&](int64_t linear, int64_t to) {
          const int64_t from = source[static_cast<size_t>(linear)];
          const auto j = static_cast<size_t>(to), k = static_cast<size_t>(from);
          if (!accumulate)
            copy_element(values, from, out, to);
          else if (is_float(out.type.dtype))
            out.f[j] += values.f[k];
          else
            out.i[j] = wrap_integer(out.i[j] + values.i[k], out.type.dtype);
        });
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(args.inputs.size(), no_value);
        const ValueId dy = args.output_grads[0];
        if (dy == no_value) return grads;
        const TensorType values = b.type(args.inputs[1]);
        if (args.need[0]) {
          if (args.node.attrs.get_bool("accumulate"))
            grads[0] = dy;
          else
            grads[0] = b.emit1("index_put", with_indices({dy, b.number(0.0, values.dtype)}, args.inputs, 2), args.node.attrs);
        }
        if (args.need[1]) {
          const ValueId picked = b.emit1("index", with_indices({dy}, args.inputs, 2), {{"dims", args.node.attrs.get_dims("dims")}});
          grads[1] = b.sum_to(picked, values.shape, values.dtype);
        }
        return grads;
      }),
      Autocast::widest,
      {{{"rows", {"f32[5,3]!", "f32[4,3]!", "i64[4]"}, {{"dims", Dims{0}}}, "distinct"},
        {"rows_added", {"f32[5,3]!", "f32[7,3]!", "i64[7]"}, {{"dims", Dims{0}}, {"accumulate", true}}, "signed"},
        {"one_value", {"bf16[5,3]!", "bf16[]!", "i64[2]"}, {{"dims", Dims{0}}}, "distinct"},
        {"pairs_added", {"f32[5,3,2]!", "f32[4,2]!", "i64[4]", "i64[4]"}, {{"dims", Dims{0, 1}}, {"accumulate", true}}},
        {"apart_added", {"f32[4,3,5]!", "f32[3]!", "i64[2]", "i64[2]"}, {{"dims", Dims{0, 2}}, {"accumulate", true}}},
        {"empty", {"f32[5,3]!", "f32[0,3]!", "i64[0]"}, {{"dims", Dims{0}}}},
        {"integers", {"i64[5]", "i64[3]", "i64[3]"}, {{"dims", Dims{0}}}, "distinct"}},
       {{{"values_shape", {"f32[5,3]", "f32[2,2]", "i64[2]"}, {{"dims", Dims{0}}}}, "ShapeError", "index_put: values is [2,2], the indexed part of x is [2,3]; values must broadcast to it"},
        {{"values_dtype", {"f32[5]", "bf16[2]", "i64[2]"}, {{"dims", Dims{0}}}}, "TypeError", "values is bf16, x is f32; needed the same dtype"}}},
      /*torch=*/{}};
}

}  // namespace

std::vector<OpDef> advanced_indexing_ops() {
  std::vector<OpDef> ops;
  ops.push_back(index());
  ops.push_back(index_put());
  return ops;
}

}  // namespace fulmen
