// Movement ops that are short programs of those in movement.cpp. All of them are differentiated by their parts.
#include "ops/builder.h"
#include "ops/families.h"
#include "ops/rules/dims.h"

namespace fulmen {
namespace {

using Build = std::function<std::vector<ValueId>(Builder&, const Node&)>;

OpDef composite(const char* name, const char* doc, std::vector<OperandDef> operands, std::vector<AttrDef> attributes, ShapeRule shape,
                Build build, Samples samples, std::vector<std::string> torch) {
  return OpDef{{.name = name},
               doc,
               std::move(operands),
               std::move(attributes),
               std::move(shape),
               Decomposition{std::move(build)},
               ByDecomposition{},
               Autocast::keep,
               std::move(samples),
               std::move(torch)};
}

AttrDef integer(const char* name) { return {name, AttrKind::integer, std::nullopt}; }
AttrDef integer(const char* name, int64_t fallback) { return {name, AttrKind::integer, AttrValue(fallback)}; }

Dims shape_of(Builder& b, ValueId x) { return b.type(x).shape; }
size_t at(int64_t dim) { return static_cast<size_t>(dim); }

Dims squeezed(const Dims& shape, const Attributes& attrs) {
  const auto rank = static_cast<int64_t>(shape.size());
  std::vector<bool> drop(shape.size() + 1, !attrs.has("dims"));
  if (attrs.has("dims"))
    for (int64_t dim : attrs.get_dims("dims")) drop[at(normalise_dim(dim, rank))] = true;
  Dims out;
  for (size_t d = 0; d < shape.size(); ++d)
    if (!drop[d] || shape[d] != 1) out.push_back(shape[d]);
  return out;
}

OpDef squeeze() {
  return composite(
      "squeeze", "x without its dims of size 1; with `dims`, without those of them that have size 1.", {{"x"}},
      {{"dims", AttrKind::dims, AttrValue()}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        if (call.attrs.has("dims"))
          for (int64_t dim : call.attrs.get_dims("dims")) checked_dim(call, dim, call[0].rank(), "a dim");
        return {result_type(call[0].dtype, squeezed(call[0].shape, call.attrs))};
      },
      [](Builder& b, const Node& node) -> std::vector<ValueId> {
        return {b.reshape(node.inputs[0], squeezed(shape_of(b, node.inputs[0]), node.attrs))};
      },
      {{{"all", {"f32[1,3,1]!"}, {}},
        {"one", {"f32[1,3,1]!"}, {{"dims", Dims{-1}}}},
        {"not_one", {"bf16[2,3]!"}, {{"dims", Dims{0}}}},
        {"strided", {"f32[3,1,2]{stride=1,50,3}!"}, {}},
        {"scalar", {"f32[]!"}, {}},
        {"empty", {"f32[0,1]!"}, {}}},
       {{{"dim", {"f32[1,2]"}, {{"dims", Dims{2}}}}, "ShapeError", "squeeze: a dim is 2, x has 2 dims; a dim must be in [-2, 1]"}}},
      {"torch.squeeze", "Tensor.squeeze"});
}

OpDef unsqueeze() {
  return composite(
      "unsqueeze", "x with a dim of size 1 put in at `dim`.", {{"x"}}, {integer("dim")},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const int64_t dim = checked_dim(call, call.attrs.get_int("dim"), call[0].rank() + 1);
        Dims shape = call[0].shape;
        shape.insert(shape.begin() + dim, 1);
        return {result_type(call[0].dtype, shape)};
      },
      [](Builder& b, const Node& node) -> std::vector<ValueId> {
        return {b.unsqueeze(node.inputs[0], node.attrs.get_int("dim"))};
      },
      {{{"front", {"f32[2,3]!"}, {{"dim", int64_t{0}}}},
        {"back", {"f32[2,3]{stride=1,2}!"}, {{"dim", int64_t{-1}}}},
        {"scalar", {"bf16[]!"}, {{"dim", int64_t{0}}}},
        {"empty", {"f32[0]!"}, {{"dim", int64_t{1}}}}},
       {{{"dim", {"f32[2,3]"}, {{"dim", int64_t{3}}}}, "ShapeError", "dim must be in [-3, 2]"}}},
      {"torch.unsqueeze", "Tensor.unsqueeze"});
}

OpDef transpose() {
  return composite(
      "transpose", "x with two dims exchanged.", {{"x"}}, {integer("dim0"), integer("dim1")},
      [](const CallTypes& call) -> std::vector<TensorType> {
        Dims shape = call[0].shape;
        const int64_t a = checked_dim(call, call.attrs.get_int("dim0"), call[0].rank(), "dim0");
        const int64_t b = checked_dim(call, call.attrs.get_int("dim1"), call[0].rank(), "dim1");
        if (!shape.empty()) std::swap(shape[at(a)], shape[at(b)]);
        return {result_type(call[0].dtype, shape)};
      },
      [](Builder& b, const Node& node) -> std::vector<ValueId> {
        if (b.type(node.inputs[0]).rank() == 0) return {node.inputs[0]};
        return {b.transpose(node.inputs[0], node.attrs.get_int("dim0"), node.attrs.get_int("dim1"))};
      },
      {{{"matrix", {"f32[2,5]!"}, {{"dim0", int64_t{0}}, {"dim1", int64_t{1}}}},
        {"inner", {"bf16[2,3,5]{stride=30,1,4}!"}, {{"dim0", int64_t{-2}}, {"dim1", int64_t{-1}}}},
        {"same", {"f32[2,3]!"}, {{"dim0", int64_t{1}}, {"dim1", int64_t{1}}}},
        {"scalar", {"f32[]!"}, {{"dim0", int64_t{0}}, {"dim1", int64_t{0}}}}},
       {{{"dim", {"f32[2,3]"}, {{"dim0", int64_t{0}}, {"dim1", int64_t{2}}}}, "ShapeError", "transpose: dim1 is 2, x has 2 dims"}}},
      {"torch.transpose", "Tensor.transpose", "torch.swapaxes"});
}

OpDef flatten() {
  const auto flat = [](const Dims& shape, int64_t first, int64_t last) {
    if (shape.empty()) return Dims{1};
    Dims out(shape.begin(), shape.begin() + first);
    out.push_back(element_count(Dims(shape.begin() + first, shape.begin() + last + 1)));
    out.insert(out.end(), shape.begin() + last + 1, shape.end());
    return out;
  };
  return composite(
      "flatten", "x with the dims from start_dim to end_dim merged into one.", {{"x"}}, {integer("start_dim", 0), integer("end_dim", -1)},
      [flat](const CallTypes& call) -> std::vector<TensorType> {
        const int64_t first = checked_dim(call, call.attrs.get_int("start_dim"), call[0].rank(), "start_dim");
        const int64_t last = checked_dim(call, call.attrs.get_int("end_dim"), call[0].rank(), "end_dim");
        if (first > last) call.shape_error("start_dim is " + std::to_string(first) + ", end_dim is " + std::to_string(last) + "; needed start_dim <= end_dim");
        return {result_type(call[0].dtype, flat(call[0].shape, first, last))};
      },
      [flat](Builder& b, const Node& node) -> std::vector<ValueId> {
        const Dims shape = shape_of(b, node.inputs[0]);
        const auto rank = static_cast<int64_t>(shape.size());
        return {b.reshape(node.inputs[0], flat(shape, dim_of(node.attrs, rank, "start_dim"), dim_of(node.attrs, rank, "end_dim")))};
      },
      {{{"all", {"f32[2,3,5]!"}, {}},
        {"tail", {"f32[2,3,5]{stride=15,1,3}!"}, {{"start_dim", int64_t{1}}}},
        {"head", {"bf16[2,3,5]!"}, {{"end_dim", int64_t{1}}}},
        {"scalar", {"f32[]!"}, {}},
        {"empty", {"f32[2,0]!"}, {}}},
       {{{"order", {"f32[2,3]"}, {{"start_dim", int64_t{1}}, {"end_dim", int64_t{0}}}}, "ShapeError", "flatten: start_dim is 1, end_dim is 0; needed start_dim <= end_dim"}}},
      {"torch.flatten", "Tensor.flatten"});
}

OpDef select() {
  return composite(
      "select", "x at one position of `dim`, without that dim; a negative index counts from the end.", {{"x"}},
      {integer("dim"), integer("index")},
      [](const CallTypes& call) -> std::vector<TensorType> {
        if (call[0].rank() == 0) call.shape_error("x has 0 dims, needed at least 1");
        const int64_t dim = checked_dim(call, call.attrs.get_int("dim"), call[0].rank());
        Dims shape = call[0].shape;
        const int64_t size = shape[at(dim)], index = call.attrs.get_int("index");
        if (index < -size || index >= size)
          call.shape_error("index is " + std::to_string(index) + ", dim " + std::to_string(dim) + " of x has size " + std::to_string(size));
        shape.erase(shape.begin() + dim);
        return {result_type(call[0].dtype, shape)};
      },
      [](Builder& b, const Node& node) -> std::vector<ValueId> {
        Dims shape = shape_of(b, node.inputs[0]);
        const int64_t dim = dim_of(node.attrs, static_cast<int64_t>(shape.size()));
        int64_t index = node.attrs.get_int("index");
        if (index < 0) index += shape[at(dim)];
        const ValueId one = b.slice(node.inputs[0], dim, index, index + 1);
        shape.erase(shape.begin() + dim);
        return {b.reshape(one, shape)};
      },
      {{{"first", {"f32[3,5]!"}, {{"dim", int64_t{0}}, {"index", int64_t{0}}}},
        {"last_column", {"f32[3,5]{stride=1,3}!"}, {{"dim", int64_t{-1}}, {"index", int64_t{-1}}}},
        {"to_scalar", {"bf16[3]!"}, {{"dim", int64_t{0}}, {"index", int64_t{1}}}},
        {"integers", {"i64[3,2]"}, {{"dim", int64_t{1}}, {"index", int64_t{0}}}}},
       {{{"index", {"f32[3]"}, {{"dim", int64_t{0}}, {"index", int64_t{3}}}}, "ShapeError", "select: index is 3, dim 0 of x has size 3"}}},
      {"torch.select", "Tensor.select"});
}

OpDef stack() {
  return composite(
      "stack", "Tensors of equal shape side by side along a new dim.", {{"tensors", Need::variadic}}, {integer("dim", 0)},
      [](const CallTypes& call) -> std::vector<TensorType> {
        if (call.inputs.empty()) call.shape_error("there are no tensors, needed at least 1");
        const int64_t dim = checked_dim(call, call.attrs.get_int("dim"), call[0].rank() + 1);
        for (size_t i = 1; i < call.inputs.size(); ++i)
          if (call[i].shape != call[0].shape)
            call.shape_error("tensors[" + std::to_string(i) + "] is " + to_string(call[i].shape) + ", tensors[0] is " +
                             to_string(call[0].shape) + "; they must be equal");
        Dims shape = call[0].shape;
        shape.insert(shape.begin() + dim, static_cast<int64_t>(call.inputs.size()));
        return {result_type(promoted_dtype(call.inputs), shape)};
      },
      [](Builder& b, const Node& node) -> std::vector<ValueId> {
        const int64_t dim = dim_of(node.attrs, b.type(node.inputs[0]).rank() + 1);
        std::vector<ValueId> parts;
        for (ValueId x : node.inputs) parts.push_back(b.unsqueeze(x, dim));
        // Promoted here and not by cat: with their new dim, 0-dim tensors would count as others do.
        std::vector<const TensorType*> types;
        for (ValueId x : node.inputs) types.push_back(&b.trace().type(x));
        const DType dtype = promoted_dtype(types);
        for (ValueId& part : parts) part = b.convert(part, dtype);
        return {b.emit1("cat", std::move(parts), {{"dim", dim}})};
      },
      {{{"rows", {"f32[3]!", "f32[3]!"}, {}},
        {"back", {"f32[2,3]!", "f32[2,3]{stride=1,2}!", "f32[2,3]!"}, {{"dim", int64_t{-1}}}},
        {"scalars", {"f32[]!", "f32[]!"}, {}},
        {"mixed", {"bf16[2]!", "f32[2]!"}, {}},
        {"one", {"bf16[2]!"}, {{"dim", int64_t{1}}}},
        {"integers", {"i64[2]", "i32[2]"}, {}}},
       {{{"shapes_differ", {"f32[3]", "f32[2]"}, {}}, "ShapeError", "stack: tensors[1] is [2], tensors[0] is [3]; they must be equal"}}},
      {"torch.stack"});
}

OpDef repeat() {
  return composite(
      "repeat", "x tiled repeats[d] times along each dim; more numbers than dims put new dims in front.", {{"x"}},
      {{"repeats", AttrKind::dims, std::nullopt}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const Dims& repeats = call.attrs.get_dims("repeats");
        if (repeats.size() < call[0].shape.size())
          call.shape_error("repeats is " + to_string(repeats) + ", x has " + std::to_string(call[0].rank()) + " dims; needed a number for each");
        Dims shape = repeats;
        const size_t lead = repeats.size() - call[0].shape.size();
        for (size_t d = 0; d < shape.size(); ++d) {
          if (repeats[d] < 0) call.shape_error("repeats is " + to_string(repeats) + "; all must be 0 or more");
          if (d >= lead) shape[d] *= call[0].shape[d - lead];
        }
        return {result_type(call[0].dtype, shape)};
      },
      [](Builder& b, const Node& node) -> std::vector<ValueId> {
        const Dims repeats = node.attrs.get_dims("repeats");
        const Dims from = shape_of(b, node.inputs[0]);
        const size_t lead = repeats.size() - from.size();
        // [a, b] tiled (r, s) times is [1, a, 1, b] broadcast to [r, a, s, b] and read as [r a, s b].
        Dims spread, wide, merged;
        for (size_t d = 0; d < repeats.size(); ++d) {
          const int64_t size = d < lead ? 1 : from[d - lead];
          spread.insert(spread.end(), {1, size});
          wide.insert(wide.end(), {repeats[d], size});
          merged.push_back(repeats[d] * size);
        }
        return {b.reshape(b.expand(b.reshape(node.inputs[0], spread), wide), merged)};
      },
      {{{"columns", {"f32[2,3]!"}, {{"repeats", Dims{1, 2}}}},
        {"both", {"f32[2,3]{stride=1,2}!"}, {{"repeats", Dims{3, 2}}}},
        {"new_dim", {"bf16[3]!"}, {{"repeats", Dims{2, 1}}}},
        {"nothing", {"f32[3]!"}, {{"repeats", Dims{0}}}},
        {"scalar", {"f32[]!"}, {{"repeats", Dims{4}}}},
        {"integers", {"i64[2]"}, {{"repeats", Dims{2}}}}},
       {{{"too_few", {"f32[2,3]"}, {{"repeats", Dims{2}}}}, "ShapeError", "repeat: repeats is [2], x has 2 dims; needed a number for each"},
        {{"negative", {"f32[3]"}, {{"repeats", Dims{-1}}}}, "ShapeError", "repeats is [-1]; all must be 0 or more"}}},
      {"Tensor.repeat", "torch.tile", "Tensor.tile"});
}

OpDef roll() {
  return composite(
      "roll", "x with its elements moved shifts[i] places along dims[i]; those that leave at one end come in at the other.", {{"x"}},
      {{"shifts", AttrKind::dims, std::nullopt}, {"dims", AttrKind::dims, std::nullopt}},
      [](const CallTypes& call) -> std::vector<TensorType> {
        const Dims &shifts = call.attrs.get_dims("shifts"), &dims = call.attrs.get_dims("dims");
        if (shifts.size() != dims.size())
          call.shape_error("shifts is " + to_string(shifts) + ", dims is " + to_string(dims) + "; needed a shift for each dim");
        if (call[0].rank() == 0 && !dims.empty()) call.shape_error("x has 0 dims, needed at least 1");
        for (int64_t dim : dims) checked_dim(call, dim, call[0].rank(), "a dim");
        return {result_type(call[0].dtype, call[0].shape)};
      },
      [](Builder& b, const Node& node) -> std::vector<ValueId> {
        const Dims shifts = node.attrs.get_dims("shifts"), dims = node.attrs.get_dims("dims");
        const Dims shape = shape_of(b, node.inputs[0]);
        ValueId x = node.inputs[0];
        for (size_t i = 0; i < dims.size(); ++i) {
          const int64_t dim = normalise_dim(dims[i], static_cast<int64_t>(shape.size())), size = shape[at(dim)];
          const int64_t shift = size ? ((shifts[i] % size) + size) % size : 0;
          if (shift) x = b.emit1("cat", {b.slice(x, dim, size - shift, size), b.slice(x, dim, 0, size - shift)}, {{"dim", dim}});
        }
        return {x};
      },
      {{{"one", {"f32[5]!"}, {{"shifts", Dims{2}}, {"dims", Dims{0}}}},
        {"both", {"f32[3,4]{stride=1,3}!"}, {{"shifts", Dims{-1, 6}}, {"dims", Dims{0, -1}}}},
        {"nothing", {"bf16[3]!"}, {{"shifts", Dims{3}}, {"dims", Dims{0}}}},
        {"empty", {"f32[0]!"}, {{"shifts", Dims{1}}, {"dims", Dims{0}}}}},
       {{{"counts_differ", {"f32[3]"}, {{"shifts", Dims{1}}, {"dims", Dims{}}}}, "ShapeError", "roll: shifts is [1], dims is []; needed a shift for each dim"}}},
      {"torch.roll", "Tensor.roll"});
}

// tril and triu: where column - row <= (or >=) diagonal.
OpDef triangle(const char* name, const char* doc, const char* keeps, std::vector<std::string> torch) {
  return composite(
      name, doc, {{"x"}}, {integer("diagonal", 0)},
      [](const CallTypes& call) -> std::vector<TensorType> {
        if (call[0].rank() < 2) call.shape_error("x has " + std::to_string(call[0].rank()) + " dims, needed at least 2");
        return {result_type(call[0].dtype, call[0].shape)};
      },
      [keeps](Builder& b, const Node& node) -> std::vector<ValueId> {
        const ValueId x = node.inputs[0];
        const TensorType type = b.type(x);
        const int64_t rows = type.shape[type.shape.size() - 2], columns = type.shape.back(), diagonal = node.attrs.get_int("diagonal");
        const AttrValue device = to_string(type.device);
        const auto count = [&](int64_t start, int64_t end) {
          return b.emit1("arange", {}, {{"start", start}, {"end", end}, {"device", device}});
        };
        const ValueId row = b.reshape(count(diagonal, diagonal + rows), {rows, 1});
        const ValueId inside = b.emit1(keeps, {count(0, columns), row});
        return {b.where(inside, x, b.number(0.0, type.dtype))};
      },
      {{{"square", {"f32[4,4]!"}, {}},
        {"above", {"f32[3,5]!"}, {{"diagonal", int64_t{1}}}},
        {"below", {"bf16[2,5,3]{stride=15,1,5}!"}, {{"diagonal", int64_t{-2}}}},
        {"empty", {"f32[0,3]!"}, {}},
        {"bools", {"bool[3,3]"}, {}},
        {"integers", {"i64[3,4]"}, {}}},
       {{{"vector", {"f32[3]"}, {}}, "ShapeError", "x has 1 dims, needed at least 2"}}},
      std::move(torch));
}

}  // namespace

std::vector<OpDef> movement_composites() {
  std::vector<OpDef> ops;
  for (auto* entry : {squeeze, unsqueeze, transpose, flatten, select, stack, repeat, roll}) ops.push_back(entry());
  ops.push_back(triangle("tril", "x on and below a diagonal of its last two dims, 0 above it.", "le", {"torch.tril", "Tensor.tril"}));
  ops.push_back(triangle("triu", "x on and above a diagonal of its last two dims, 0 below it.", "ge", {"torch.triu", "Tensor.triu"}));
  return ops;
}

}  // namespace fulmen
