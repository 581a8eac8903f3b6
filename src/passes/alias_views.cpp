#include "passes/alias_views.h"

#include <algorithm>
#include <unordered_set>

#include "ops/builder.h"

namespace fulmen {
namespace {

// Strides of a reshape, walking groups of dims whose products are equal; nothing if a group isn't evenly strided.
std::optional<Dims> reshape_strides(const TensorType& in, const Dims& shape) {
  if (in.element_count() == 0) return contiguous_strides(shape);
  // Size-1 dims carry no stride.
  Dims from_shape, from_strides;
  for (size_t i = 0; i < in.shape.size(); ++i) {
    if (in.shape[i] == 1) continue;
    from_shape.push_back(in.shape[i]);
    from_strides.push_back(in.strides[i]);
  }
  Dims strides(shape.size(), 1);
  size_t i = 0, j = 0;
  while (j < shape.size()) {
    if (shape[j] == 1) {
      ++j;
      continue;
    }
    if (i >= from_shape.size()) return std::nullopt;
    size_t i_end = i + 1, j_end = j + 1;
    int64_t from_product = from_shape[i], to_product = shape[j];
    while (from_product != to_product) {
      if (from_product < to_product) {
        if (i_end >= from_shape.size()) return std::nullopt;
        if (from_strides[i_end - 1] != from_strides[i_end] * from_shape[i_end]) return std::nullopt;
        from_product *= from_shape[i_end++];
      } else {
        if (j_end >= shape.size()) return std::nullopt;
        to_product *= shape[j_end++];
      }
    }
    int64_t stride = from_strides[i_end - 1];
    for (size_t k = j_end; k-- > j;) {
      strides[k] = stride;
      stride *= shape[k];
    }
    i = i_end;
    j = j_end;
  }
  // Size-1 dims: the stride a contiguous layout would have.
  for (size_t k = shape.size(); k-- > 0;)
    if (shape[k] == 1) strides[k] = k + 1 < shape.size() ? strides[k + 1] * shape[k + 1] : 1;
  return strides;
}

// (batch, heads, length, dim) stored as (batch, length, heads, dim).
Dims length_major_strides(const Dims& shape) {
  const int64_t heads = shape[1], length = shape[2], dim = shape[3];
  return {std::max<int64_t>(length * heads * dim, 1), std::max<int64_t>(dim, 1), std::max<int64_t>(heads * dim, 1), 1};
}

// The strides of a dense tensor of `shape` whose dims lie in memory in the order of `like`'s; contiguous if those say
// nothing (an expanded dim) or its rows are not contiguous.
Dims dense_strides_like(const TensorType& like, const Dims& shape) {
  if (like.rank() != static_cast<int>(shape.size()) || like.is_contiguous()) return contiguous_strides(shape);
  std::vector<size_t> order;
  for (size_t i = 0; i < shape.size(); ++i) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return like.strides[a] > like.strides[b]; });
  if (order.back() + 1 != shape.size()) return contiguous_strides(shape);
  Dims strides(shape.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    if (like.strides[order[i]] <= 0) return contiguous_strides(shape);
    strides[order[i]] = stride;
    stride *= std::max<int64_t>(shape[order[i]], 1);
  }
  return strides;
}

}  // namespace

std::optional<View> view_of(const Trace& trace, const Node& node) {
  if (node.inputs.empty() || node.inputs[0] == no_value || node.outputs.size() != 1) return std::nullopt;
  const TensorType& in = trace.type(node.inputs[0]);
  const TensorType& out = trace.type(node.outputs[0]);
  const std::string& op = node.op->name;
  if (op == "detach") return View{0, in.strides};
  if (op == "reshape") {
    auto strides = reshape_strides(in, out.shape);
    if (!strides) return std::nullopt;
    return View{0, std::move(*strides)};
  }
  if (op == "permute") {
    const Dims& dims = node.attrs.get_dims("dims");
    View view;
    for (int64_t d : dims) view.strides.push_back(in.strides[static_cast<size_t>(d < 0 ? d + in.rank() : d)]);
    return view;
  }
  if (op == "broadcast_to") {
    View view;
    const size_t added = out.shape.size() - in.shape.size();
    for (size_t i = 0; i < out.shape.size(); ++i) {
      const bool real = i >= added && in.shape[i - added] == out.shape[i];
      view.strides.push_back(real ? in.strides[i - added] : 0);
    }
    return view;
  }
  if (op == "slice") {
    int64_t dim = node.attrs.get_int("dim");
    if (dim < 0) dim += in.rank();
    const auto d = static_cast<size_t>(dim);
    int64_t begin = node.attrs.get_int("begin");
    if (begin < 0) begin = std::max<int64_t>(begin + in.shape[d], 0);
    begin = std::min(begin, in.shape[d]);
    View view{out.element_count() == 0 ? 0 : begin * in.strides[d], in.strides};
    view.strides[d] *= node.attrs.get_int("step");
    return view;
  }
  return std::nullopt;
}

Trace alias_views(const Trace& trace, size_t contiguous_outputs, bool like_operands) {
  Trace out = trace;
  out.nodes.clear();
  std::unordered_set<ValueId> inputs(trace.inputs.begin(), trace.inputs.end());
  // What only the caller reads, who wants it contiguous: another layout would be copied at the end.
  std::unordered_set<ValueId> returned;
  const std::vector<int> uses = use_counts(trace);
  for (size_t i = 0; i < trace.outputs.size() && i < contiguous_outputs; ++i)
    if (const ValueId id = trace.outputs[i]; id != no_value && uses[static_cast<size_t>(id)] == 1) returned.insert(id);
  for (Node node : trace.nodes) {
    if (auto view = view_of(out, node)) {
      out.value(node.outputs[0]).type.strides = std::move(view->strides);
      node.executor = view_executor;
    } else if (node.op->name == "sdpa_forward" || node.op->name == "sdpa_backward") {
      const size_t laid_out = node.op->name == "sdpa_forward" ? 1 : 3;
      for (size_t i = 0; i < laid_out && i < node.outputs.size(); ++i) {
        if (node.outputs[i] == no_value || out.type(node.outputs[i]).rank() != 4) continue;
        TensorType& type = out.value(node.outputs[i]).type;
        if (like_operands) type.strides = dense_strides_like(out.type(node.inputs[i]), type.shape);
        else type.strides = returned.count(node.outputs[i]) ? contiguous_strides(type.shape) : length_major_strides(type.shape);
      }
    }
    out.nodes.push_back(std::move(node));
  }
  // Outputs: own memory, each once.
  const auto producer = producers(out);
  Builder builder(out);
  std::unordered_set<ValueId> taken;
  for (size_t i = 0; i < out.outputs.size(); ++i) {
    ValueId& id = out.outputs[i];
    if (id == no_value) continue;
    const int made_by = producer[static_cast<size_t>(id)];
    const bool is_view = made_by < 0 || out.nodes[static_cast<size_t>(made_by)].executor == view_executor;
    if (is_view || (i < contiguous_outputs && !out.type(id).is_contiguous()) || taken.count(id)) id = builder.emit1("contiguous", {id});
    taken.insert(id);
  }
  return out;
}

}  // namespace fulmen
