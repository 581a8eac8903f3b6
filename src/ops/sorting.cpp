// Order along one dim: sort, topk, argsort, argmax, argmin. NaN counts as larger than every number, equal elements keep
// their order, positions are i64. The values of sort and topk are differentiable through the positions.
#include <algorithm>
#include <numeric>

#include "ops/builder.h"
#include "ops/families.h"
#include "ops/reference_loops.h"
#include "ops/rules/dims.h"

namespace fulmen {
namespace {

// Is element j to come before element k?
bool comes_first(const HostTensor& x, int64_t j, int64_t k, bool descending) {
  const auto a = static_cast<size_t>(j), b = static_cast<size_t>(k);
  if (!is_float(x.type.dtype)) return descending ? x.i[a] > x.i[b] : x.i[a] < x.i[b];
  const double u = x.f[a], v = x.f[b];
  if (std::isnan(u) || std::isnan(v)) return descending ? std::isnan(u) && !std::isnan(v) : !std::isnan(u) && std::isnan(v);
  return descending ? u > v : u < v;
}

// The first `count` positions of the sorted line (o, n) of x around dim.
std::vector<int64_t> sorted_positions(const HostTensor& x, const DimView& view, int64_t o, int64_t n, bool descending, int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(view.size));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t j, int64_t k) {
    return comes_first(x, view.at(o, j, n), view.at(o, k, n), descending);
  });
  order.resize(static_cast<size_t>(count));
  return order;
}

void sort_lines(const ReferenceArgs& args, bool descending, int64_t count) {
  const HostTensor& x = *args.inputs[0];
  const DimView view = view_around(x.type.shape, dim_of(args.attrs, x.type.rank()));
  for (int64_t o = 0; o < view.outer; ++o)
    for (int64_t n = 0; n < view.inner; ++n) {
      const auto order = sorted_positions(x, view, o, n, descending, count);
      for (int64_t k = 0; k < count; ++k) {
        const int64_t to = (o * count + k) * view.inner + n;
        copy_element(x, view.at(o, order[static_cast<size_t>(k)], n), args.outputs[0], to);
        args.outputs[1].i[static_cast<size_t>(to)] = order[static_cast<size_t>(k)];
      }
    }
}

// The gradient of values picked at the positions of the second result.
GradientRule through_positions() {
  return [](Builder& b, const GradientArgs& args) -> std::vector<ValueId> {
    if (!args.need[0] || args.output_grads[0] == no_value) return {no_value};
    const ValueId positions = args.outputs[1] != no_value ? args.outputs[1] : b.emit(args.node.op->name, {args.inputs[0]}, args.node.attrs)[1];
    return {b.emit1("scatter_add", {b.zeros_like(args.inputs[0]), positions, args.output_grads[0]},
                    {{"dim", dim_of(args.node.attrs, b.type(args.inputs[0]).rank())}})};
  };
}

OpDef sort() {
  return OpDef{
      {.name = "sort"},
      "x with each line along dim in rising (or descending) order, and the positions its elements came from. Stable.",
      {{"x"}},
      {{"dim", AttrKind::integer, AttrValue(int64_t{-1})}, {"descending", AttrKind::boolean, AttrValue(false)}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        checked_dim(call, call.attrs.get_int("dim"), call[0].rank());
        return {result_type(call[0].dtype, call[0].shape), result_type(DType::i64, call[0].shape)};
      },
      Primitive{[](const ReferenceArgs& args) {
        const HostTensor& x = *args.inputs[0];
        sort_lines(args, args.attrs.get_bool("descending"), view_around(x.type.shape, dim_of(args.attrs, x.type.rank())).size);
      }},
      through_positions(),
      Autocast::keep,
      {{{"vector", {"f32[11]!"}, {}},
        {"rows", {"f32[3,7]!"}, {{"descending", true}}},
        {"columns", {"f32[7,3]{stride=1,7}!"}, {{"dim", int64_t{0}}}},
        {"ties", {"f32[2,17]"}, {{"descending", true}}, "small_int"},
        {"bf16", {"bf16[2,5,3]!"}, {{"dim", int64_t{1}}}},
        {"scalar", {"f32[]!"}, {}},
        {"empty", {"f32[0,3]!"}, {{"dim", int64_t{0}}}},
        {"integers", {"i64[9]"}, {}},
        {"bools", {"bool[9]"}, {}}},
       {{{"dim", {"f32[3]"}, {{"dim", int64_t{1}}}}, "ShapeError", "sort: dim is 1, x has 1 dims; dim must be in [-1, 0]"}}},
      {"torch.sort", "Tensor.sort"}};
}

OpDef topk() {
  return OpDef{
      {.name = "topk"},
      "The k largest (or smallest) elements of each line along dim, in order, and their positions.",
      {{"x"}},
      {{"k", AttrKind::integer, std::nullopt},
       {"dim", AttrKind::integer, AttrValue(int64_t{-1})},
       {"largest", AttrKind::boolean, AttrValue(true)},
       {"sorted", AttrKind::boolean, AttrValue(true)}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const int64_t dim = checked_dim(call, call.attrs.get_int("dim"), call[0].rank()), k = call.attrs.get_int("k");
        Dims shape = call[0].shape;
        const int64_t size = shape.empty() ? 1 : shape[static_cast<size_t>(dim)];
        if (k < 0 || k > size) call.shape_error("k is " + std::to_string(k) + ", dim " + std::to_string(dim) + " of x has size " + std::to_string(size));
        if (shape.empty()) {
          if (k != 1) call.shape_error("k is " + std::to_string(k) + ", x has one element; k must be 1");
        } else {
          shape[static_cast<size_t>(dim)] = k;
        }
        return {result_type(call[0].dtype, shape), result_type(DType::i64, shape)};
      },
      Primitive{[](const ReferenceArgs& args) { sort_lines(args, args.attrs.get_bool("largest"), args.attrs.get_int("k")); }},
      through_positions(),
      Autocast::keep,
      {{{"vector", {"f32[11]!"}, {{"k", int64_t{3}}}},
        {"experts", {"bf16[13,8]!"}, {{"k", int64_t{2}}}},
        {"smallest", {"f32[7,3]{stride=1,7}!"}, {{"k", int64_t{2}}, {"dim", int64_t{0}}, {"largest", false}}},
        {"all", {"f32[5]!"}, {{"k", int64_t{5}}}},
        {"none", {"f32[2,5]!"}, {{"k", int64_t{0}}}},
        {"ties", {"f32[2,17]"}, {{"k", int64_t{6}}}, "small_int"},
        {"scalar", {"f32[]!"}, {{"k", int64_t{1}}}},
        {"integers", {"i64[9]"}, {{"k", int64_t{4}}}}},
       {{{"k", {"f32[2,3]"}, {{"k", int64_t{4}}}}, "ShapeError", "topk: k is 4, dim 1 of x has size 3"}}},
      {"torch.topk", "Tensor.topk"}};
}

OpDef argsort() {
  return OpDef{
      {.name = "argsort"},
      "The positions that sort gives. Stable.",
      {{"x"}},
      {{"dim", AttrKind::integer, AttrValue(int64_t{-1})}, {"descending", AttrKind::boolean, AttrValue(false)}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        checked_dim(call, call.attrs.get_int("dim"), call[0].rank());
        return {result_type(DType::i64, call[0].shape)};
      },
      Decomposition{[](Builder& b, const Node& node) -> std::vector<ValueId> { return {b.emit("sort", {node.inputs[0]}, node.attrs)[1]}; }},
      NotDifferentiable{"its result is an integer"},
      Autocast::keep,
      {{{"vector", {"f32[11]"}, {}}, {"columns", {"bf16[5,3]"}, {{"dim", int64_t{0}}, {"descending", true}}}, {"integers", {"i64[7]"}, {}}},
       {{{"dim", {"f32[3]"}, {{"dim", int64_t{-2}}}}, "ShapeError", "argsort: dim is -2, x has 1 dims"}}},
      {"torch.argsort", "Tensor.argsort"}};
}

OpDef arg_extremum(const char* name, const char* doc, bool largest, std::vector<std::string> torch) {
  return OpDef{
      {.name = name},
      doc,
      {{"x"}},
      {{"dim", AttrKind::integer, AttrValue()}, {"keepdim", AttrKind::boolean, AttrValue(false)}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        if (call[0].dtype == DType::boolean) call.type_error("x is bool; needed a number");
        Dims shape = call[0].shape;
        const bool keepdim = call.attrs.get_bool("keepdim");
        if (!call.attrs.has("dim")) {
          if (call[0].element_count() == 0) call.shape_error("x is " + to_string(shape) + " with no elements, needed at least one");
          return {result_type(DType::i64, keepdim ? Dims(shape.size(), 1) : Dims{})};
        }
        const int64_t dim = checked_dim(call, call.attrs.get_int("dim"), call[0].rank());
        if (shape.empty()) return {result_type(DType::i64, {})};
        if (shape[static_cast<size_t>(dim)] == 0) call.shape_error("dim " + std::to_string(dim) + " of x has size 0, needed at least one element");
        if (keepdim)
          shape[static_cast<size_t>(dim)] = 1;
        else
          shape.erase(shape.begin() + dim);
        return {result_type(DType::i64, shape)};
      },
      Primitive{[largest](const ReferenceArgs& args) {
        const HostTensor& x = *args.inputs[0];
        DimView view{1, x.type.element_count(), 1};
        if (args.attrs.has("dim")) view = view_around(x.type.shape, dim_of(args.attrs, x.type.rank()));
        for (int64_t o = 0; o < view.outer; ++o)
          for (int64_t n = 0; n < view.inner; ++n) {
            int64_t best = 0;
            for (int64_t k = 1; k < view.size; ++k) {
              const int64_t j = view.at(o, k, n), top = view.at(o, best, n);
              const bool is_nan = is_float(x.type.dtype) && std::isnan(x.f[static_cast<size_t>(j)]);
              const bool top_nan = is_float(x.type.dtype) && std::isnan(x.f[static_cast<size_t>(top)]);
              if (top_nan) break;
              if (is_nan || comes_first(x, j, top, largest)) best = k;
            }
            args.outputs[0].i[static_cast<size_t>(o * view.inner + n)] = best;
          }
      }},
      NotDifferentiable{"its result is an integer"},
      Autocast::keep,
      {{{"all", {"f32[3,5]"}, {}},
        {"all_keepdim", {"f32[3,5]"}, {{"keepdim", true}}},
        {"rows", {"f32[3,5]"}, {{"dim", int64_t{1}}}},
        {"columns", {"bf16[5,3]{stride=1,5}"}, {{"dim", int64_t{0}}, {"keepdim", true}}},
        {"ties", {"f32[4,9]"}, {{"dim", int64_t{-1}}}, "small_int"},
        {"scalar", {"f32[]"}, {}},
        {"no_rows", {"f32[0,3]"}, {{"dim", int64_t{1}}}},
        {"integers", {"i64[7]"}, {}}},
       {{{"empty", {"f32[0]"}, {}}, "ShapeError", "x is [0] with no elements, needed at least one"},
        {{"empty_dim", {"f32[2,0]"}, {{"dim", int64_t{1}}}}, "ShapeError", "dim 1 of x has size 0, needed at least one element"},
        {{"bools", {"bool[3]"}, {}}, "TypeError", "x is bool; needed a number"}}},
      std::move(torch)};
}

}  // namespace

std::vector<OpDef> sorting_ops() {
  std::vector<OpDef> ops;
  for (auto* entry : {sort, topk, argsort}) ops.push_back(entry());
  ops.push_back(arg_extremum("argmax", "The position of the first largest element along dim, or in row-major order of all if dim is none.", true,
                             {"torch.argmax", "Tensor.argmax"}));
  ops.push_back(arg_extremum("argmin", "The position of the first smallest element along dim, or in row-major order of all if dim is none.", false,
                             {"torch.argmin", "Tensor.argmin"}));
  return ops;
}

}  // namespace fulmen
