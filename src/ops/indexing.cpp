// Ops that read or write along one dim at positions from a tensor: gather, scatter, index_select and their adding forms.
// Advanced indexing with several tensors is in advanced_indexing.cpp, sorting and arg-reductions in sorting.cpp.
// Positions are integers; negative ones count from the end; one outside ends the call with an error.
#include "ops/builder.h"
#include "ops/families.h"
#include "ops/reference_loops.h"
#include "ops/rules/dims.h"
#include "ops/rules/index_reads.h"

namespace fulmen {
namespace {


AttrDef dim_attribute() { return {"dim", AttrKind::integer, std::nullopt}; }

// Checks dim, that index is an integer tensor of x's rank, and that its sizes besides dim fit into x. Gives the dim.
int64_t check_along(const CallTypes& call) {
  need_integer(call, 1);
  if (call[1].rank() != call[0].rank())
    call.shape_error("index has " + std::to_string(call[1].rank()) + " dims, x has " + std::to_string(call[0].rank()) + "; they must be equal");
  const int64_t dim = checked_dim(call, call.attrs.get_int("dim"), call[0].rank());
  for (int64_t d = 0; d < call[0].rank(); ++d) {
    const int64_t have = call[0].shape[static_cast<size_t>(d)], asked = call[1].shape[static_cast<size_t>(d)];
    if (d != dim && asked > have)
      call.shape_error("index is " + to_string(call[1].shape) + ", x is " + to_string(call[0].shape) + "; the index may not be larger besides dim " +
                       std::to_string(dim));
  }
  return dim;
}

void check_source_along(const CallTypes& call) {
  check_along(call);
  need_same_dtype(call, 0, 2);
  if (call[2].shape != call[1].shape)
    call.shape_error("src is " + to_string(call[2].shape) + ", index is " + to_string(call[1].shape) + "; they must be equal");
}

// Where the element of `index` at each place points in a tensor of shape `into`: body(linear in index, linear in into).
template <class F>
void for_each_along(const char* op, const HostTensor& index, const Dims& into, int64_t dim, F&& body) {
  const Dims strides = contiguous_strides(into);
  for_each_index(index.type.shape, [&](const Dims& at, int64_t linear) {
    int64_t target = linear_index(at, strides);
    if (!into.empty()) {
      const auto d = static_cast<size_t>(dim);
      const int64_t position = checked_position(op, index.i[static_cast<size_t>(linear)], into[d]);
      target += (position - at[d]) * strides[d];
    } else {
      checked_position(op, index.i[static_cast<size_t>(linear)], 1);
    }
    body(linear, target);
  });
}

void add_element(HostTensor& to, int64_t j, const HostTensor& from, int64_t k) {
  if (is_float(to.type.dtype))
    to.f[static_cast<size_t>(j)] += from.f[static_cast<size_t>(k)];
  else
    to.i[static_cast<size_t>(j)] = wrap_integer(to.i[static_cast<size_t>(j)] + from.i[static_cast<size_t>(k)], to.type.dtype);
}

void start_from(HostTensor& out, const HostTensor& x) {
  out.f = x.f;
  out.i = x.i;
}

OpDef gather() {
  return OpDef{
      {.name = "gather"},
      "The elements of x at `index` along dim: out[i][j] = x[index[i][j]][j] for dim 0 of a matrix. The result has index's shape.",
      {{"x"}, {"index"}},
      {dim_attribute()},
      [](const CallTypes& call) -> std::vector<TensorType> {
        check_along(call);
        return {result_type(call[0].dtype, call[1].shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        const HostTensor& x = *args.inputs[0];
        for_each_along("gather", *args.inputs[1], x.type.shape, dim_of(args.attrs, x.type.rank()),
                       [&](int64_t linear, int64_t from) { copy_element(x, from, args.outputs[0], linear); });
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(2, no_value);
        if (args.need[0] && args.output_grads[0] != no_value)
          grads[0] = b.emit1("scatter_add", {b.zeros_like(args.inputs[0]), args.inputs[1], args.output_grads[0]}, args.node.attrs);
        return grads;
      }),
      Autocast::keep,
      {{{"rows", {"f32[5,3]!", "i64[4,3]"}, {{"dim", int64_t{0}}}},
        {"columns", {"f32[3,7]!", "i64[3,2]"}, {{"dim", int64_t{-1}}}},
        {"fewer", {"f32[5,3]!", "i32[4,2]"}, {{"dim", int64_t{0}}}},
        {"strided", {"f32[5,3]{stride=1,5}!", "i64[4,3]{stride=0,1}"}, {{"dim", int64_t{0}}}},
        {"bf16", {"bf16[2,5,3]!", "i64[2,4,3]"}, {{"dim", int64_t{1}}}},
        {"scalar", {"f32[]!", "i64[]"}, {{"dim", int64_t{0}}}, "first"},
        {"empty", {"f32[5,3]!", "i64[0,3]"}, {{"dim", int64_t{0}}}},
        {"integers", {"i64[5]", "i64[7]"}, {{"dim", int64_t{0}}}}},
       {{{"float_index", {"f32[5]", "f32[2]"}, {{"dim", int64_t{0}}}}, "TypeError", "gather: index is f32, needed an integer dtype"},
        {{"rank", {"f32[5,3]", "i64[2]"}, {{"dim", int64_t{0}}}}, "ShapeError", "index has 1 dims, x has 2; they must be equal"},
        {{"too_wide", {"f32[5,3]", "i64[2,4]"}, {{"dim", int64_t{0}}}}, "ShapeError", "index is [2,4], x is [5,3]; the index may not be larger besides dim 0"},
        {{"dim", {"f32[5]", "i64[2]"}, {{"dim", int64_t{1}}}}, "ShapeError", "dim is 1, x has 1 dims; dim must be in [-1, 0]"}}},
      /*torch=*/{}};
}

std::vector<BadSample> bad_sources(const std::string& op) {
  return {{{"src_shape", {"f32[5]", "i64[2]", "f32[3]"}, {{"dim", int64_t{0}}}}, "ShapeError", op + ": src is [3], index is [2]; they must be equal"},
          {{"src_dtype", {"f32[5]", "i64[2]", "f64[2]"}, {{"dim", int64_t{0}}}}, "TypeError", "src is f64, x is f32; needed the same dtype"},
          {{"index_dtype", {"f32[5]", "bool[2]", "f32[2]"}, {{"dim", int64_t{0}}}}, "TypeError", "index is bool, needed an integer dtype"}};
}

OpDef scatter() {
  return OpDef{
      {.name = "scatter"},
      "x with the elements at `index` along dim replaced by src, which has index's shape. Where an index repeats, one of its "
      "sources stays.",
      {{"x"}, {"index"}, {"src"}},
      {dim_attribute()},
      [](const CallTypes& call) -> std::vector<TensorType> {
        check_source_along(call);
        return {result_type(call[0].dtype, call[0].shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        HostTensor& out = args.outputs[0];
        start_from(out, *args.inputs[0]);
        for_each_along("scatter", *args.inputs[1], out.type.shape, dim_of(args.attrs, out.type.rank()),
                       [&](int64_t linear, int64_t to) { copy_element(*args.inputs[2], linear, out, to); });
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(3, no_value);
        const ValueId dy = args.output_grads[0];
        if (dy == no_value) return grads;
        if (args.need[0]) grads[0] = b.emit1("scatter", {dy, args.inputs[1], b.zeros_like(args.inputs[2])}, args.node.attrs);
        if (args.need[2]) grads[2] = b.emit1("gather", {dy, args.inputs[1]}, args.node.attrs);
        return grads;
      }),
      Autocast::keep,
      {{{"rows", {"f32[5,3]!", "i64[4,3]", "f32[4,3]!"}, {{"dim", int64_t{0}}}, "distinct"},
        {"columns", {"f32[3,7]!", "i64[3,2]", "f32[3,2]{stride=1,3}!"}, {{"dim", int64_t{-1}}}, "distinct"},
        {"bf16", {"bf16[9]!", "i32[4]", "bf16[4]!"}, {{"dim", int64_t{0}}}, "distinct"},
        {"empty", {"f32[5]!", "i64[0]", "f32[0]!"}, {{"dim", int64_t{0}}}},
        {"integers", {"i64[5]", "i64[3]", "i64[3]"}, {{"dim", int64_t{0}}}, "distinct"}},
       bad_sources("scatter")},
      /*torch=*/{}};
}

OpDef scatter_add() {
  return OpDef{
      {.name = "scatter_add"},
      "x with src (of index's shape) added at `index` along dim; repeated positions sum up.",
      {{"x"}, {"index"}, {"src"}},
      {dim_attribute()},
      [](const CallTypes& call) -> std::vector<TensorType> {
        check_source_along(call);
        return {result_type(call[0].dtype, call[0].shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        HostTensor& out = args.outputs[0];
        start_from(out, *args.inputs[0]);
        for_each_along("scatter_add", *args.inputs[1], out.type.shape, dim_of(args.attrs, out.type.rank()),
                       [&](int64_t linear, int64_t to) { add_element(out, to, *args.inputs[2], linear); });
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(3, no_value);
        const ValueId dy = args.output_grads[0];
        if (dy == no_value) return grads;
        if (args.need[0]) grads[0] = dy;
        if (args.need[2]) grads[2] = b.emit1("gather", {dy, args.inputs[1]}, args.node.attrs);
        return grads;
      }),
      Autocast::widest,
      {{{"rows", {"f32[3,2]!", "i64[7,2]", "f32[7,2]!"}, {{"dim", int64_t{0}}}},
        {"columns", {"f32[3,7]!", "i64[3,9]", "f32[3,9]{stride=1,3}!"}, {{"dim", int64_t{-1}}}},
        {"bf16", {"bf16[9]!", "i32[4]", "bf16[4]!"}, {{"dim", int64_t{0}}}},
        {"expanded_src", {"f32[4,3]!", "i64[5,3]", "f32[5,3]{stride=0,0}!"}, {{"dim", int64_t{0}}}},
        {"empty", {"f32[5]!", "i64[0]", "f32[0]!"}, {{"dim", int64_t{0}}}},
        {"integers", {"i64[3]", "i64[8]", "i64[8]"}, {{"dim", int64_t{0}}}}},
       bad_sources("scatter_add")},
      /*torch=*/{}};
}

// index_select and index_add: index is a vector; view is x around dim.
int64_t check_vector(const CallTypes& call) {
  need_integer(call, 1);
  if (call[1].rank() != 1) call.shape_error("index is " + to_string(call[1].shape) + ", needed one dim");
  if (call[0].rank() == 0) call.shape_error("x has 0 dims, needed at least 1");
  return checked_dim(call, call.attrs.get_int("dim"), call[0].rank());
}

// body(linear in the selection, linear in the whole)
template <class F>
void for_each_selected(const char* op, const Dims& whole, const HostTensor& index, int64_t dim, F&& body) {
  const DimView view = view_around(whole, dim);
  const int64_t count = index.type.element_count();
  for (int64_t o = 0; o < view.outer; ++o)
    for (int64_t k = 0; k < count; ++k) {
      const int64_t position = checked_position(op, index.i[static_cast<size_t>(k)], view.size);
      for (int64_t n = 0; n < view.inner; ++n) body((o * count + k) * view.inner + n, view.at(o, position, n));
    }
}

OpDef index_select() {
  return OpDef{
      {.name = "index_select"},
      "The slices of x along dim at the positions in the vector `index`.",
      {{"x"}, {"index"}},
      {dim_attribute()},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const int64_t dim = check_vector(call);
        Dims shape = call[0].shape;
        shape[static_cast<size_t>(dim)] = call[1].shape[0];
        return {result_type(call[0].dtype, shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        const HostTensor& x = *args.inputs[0];
        for_each_selected("index_select", x.type.shape, *args.inputs[1], dim_of(args.attrs, x.type.rank()),
                          [&](int64_t to, int64_t from) { copy_element(x, from, args.outputs[0], to); });
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(2, no_value);
        if (args.need[0] && args.output_grads[0] != no_value)
          grads[0] = b.emit1("index_add", {b.zeros_like(args.inputs[0]), args.inputs[1], args.output_grads[0]}, args.node.attrs);
        return grads;
      }),
      Autocast::keep,
      {{{"rows", {"f32[5,3]!", "i64[7]"}, {{"dim", int64_t{0}}}},
        {"middle", {"bf16[2,5,3]{stride=15,1,5}!", "i32[4]"}, {{"dim", int64_t{1}}}},
        {"last", {"f32[2,5]!", "i64[3]{stride=2}"}, {{"dim", int64_t{-1}}}},
        {"empty", {"f32[5,3]!", "i64[0]"}, {{"dim", int64_t{0}}}},
        {"integers", {"i64[5]", "i64[2]"}, {{"dim", int64_t{0}}}}},
       {{{"index_rank", {"f32[5]", "i64[2,1]"}, {{"dim", int64_t{0}}}}, "ShapeError", "index_select: index is [2,1], needed one dim"},
        {{"index_dtype", {"f32[5]", "f32[2]"}, {{"dim", int64_t{0}}}}, "TypeError", "index is f32, needed an integer dtype"}}},
      /*torch=*/{}};
}

OpDef index_add() {
  return OpDef{
      {.name = "index_add"},
      "x with the slices of src added at the positions in the vector `index` along dim; repeated positions sum up.",
      {{"x"}, {"index"}, {"src"}},
      {dim_attribute()},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const int64_t dim = check_vector(call);
        need_same_dtype(call, 0, 2);
        Dims shape = call[0].shape;
        shape[static_cast<size_t>(dim)] = call[1].shape[0];
        if (call[2].shape != shape) call.shape_error("src is " + to_string(call[2].shape) + ", needed " + to_string(shape));
        return {result_type(call[0].dtype, call[0].shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        HostTensor& out = args.outputs[0];
        start_from(out, *args.inputs[0]);
        for_each_selected("index_add", out.type.shape, *args.inputs[1], dim_of(args.attrs, out.type.rank()),
                          [&](int64_t from, int64_t to) { add_element(out, to, *args.inputs[2], from); });
      }},
      GradientRule([](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
        std::vector<ValueId> grads(3, no_value);
        const ValueId dy = args.output_grads[0];
        if (dy == no_value) return grads;
        if (args.need[0]) grads[0] = dy;
        if (args.need[2]) grads[2] = b.emit1("index_select", {dy, args.inputs[1]}, args.node.attrs);
        return grads;
      }),
      Autocast::keep,
      {{{"rows", {"f32[5,3]!", "i64[7]", "f32[7,3]!"}, {{"dim", int64_t{0}}}},
        {"middle", {"bf16[2,5,3]!", "i32[4]", "bf16[2,4,3]{stride=12,1,4}!"}, {{"dim", int64_t{1}}}},
        {"empty", {"f32[5,3]!", "i64[0]", "f32[0,3]!"}, {{"dim", int64_t{0}}}},
        {"integers", {"i64[5]", "i64[6]", "i64[6]"}, {{"dim", int64_t{0}}}}},
       {{{"src_shape", {"f32[5,3]", "i64[2]", "f32[2,4]"}, {{"dim", int64_t{0}}}}, "ShapeError", "index_add: src is [2,4], needed [2,3]"}}},
      /*torch=*/{}};
}

OpDef one_hot() {
  return OpDef{
      {.name = "one_hot"},
      "1 at each index, 0 elsewhere, along a new last dim of num_classes; i64. An index outside gives zeros.",
      {{"index"}},
      {{"num_classes", AttrKind::integer, std::nullopt}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        need_integer(call, 0);
        if (call.attrs.get_int("num_classes") < 1)
          call.shape_error("num_classes is " + std::to_string(call.attrs.get_int("num_classes")) + ", needed 1 or more: a shape can't depend on values");
        Dims shape = call[0].shape;
        shape.push_back(call.attrs.get_int("num_classes"));
        return {result_type(DType::i64, shape)};
      },
      Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> {
        const ValueId index = node.inputs[0];
        const AttrValue device = to_string(b.type(index).device);
        const ValueId classes =
            b.emit1("arange", {}, {{"start", int64_t{0}}, {"end", node.attrs.get_int("num_classes")}, {"device", device}});
        return {b.convert(b.emit1("eq", {b.unsqueeze(index, -1), classes}), DType::i64)};
      }},
      NotDifferentiable{"its result is an integer"},
      Autocast::keep,
      {{{"plain", {"i64[5]"}, {{"num_classes", int64_t{3}}}},
        {"matrix", {"i32[2,3]{stride=1,2}"}, {{"num_classes", int64_t{7}}}},
        {"scalar", {"i64[]"}, {{"num_classes", int64_t{2}}}},
        {"empty", {"i64[0]"}, {{"num_classes", int64_t{2}}}}},
       {{{"unknown_count", {"i64[5]"}, {{"num_classes", int64_t{-1}}}}, "ShapeError", "one_hot: num_classes is -1, needed 1 or more"},
        {{"floats", {"f32[5]"}, {{"num_classes", int64_t{3}}}}, "TypeError", "index is f32, needed an integer dtype"}}},
      {"torch.nn.functional.one_hot"}};
}

}  // namespace

std::vector<OpDef> advanced_indexing_ops();
std::vector<OpDef> sorting_ops();

std::vector<OpDef> indexing_ops() {
  std::vector<OpDef> ops;
  for (auto* entry : {gather, scatter, scatter_add, index_select, index_add, one_hot}) ops.push_back(entry());
  for (auto* part : {advanced_indexing_ops, sorting_ops})
    for (OpDef& op : part()) ops.push_back(std::move(op));
  return ops;
}

}  // namespace fulmen
