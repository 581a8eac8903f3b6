#include "passes/simplify.h"

#include <optional>

#include "passes/substitution.h"

namespace fulmen {
namespace {

bool same_value_type(const TensorType& a, const TensorType& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.is_number == b.is_number;
}

class Simplifier {
 public:
  explicit Simplifier(Trace& out) : out_(out), producer_(out.values.size(), -1) {}

  // The value that stands for the node's only result, or nothing; may change the node in place.
  std::optional<ValueId> visit(Node& node) {
    const std::string& op = node.op->name;
    if (node.outputs.size() != 1 || node.inputs.empty() || node.inputs[0] == no_value) return std::nullopt;
    const ValueId x = node.inputs[0];
    const TensorType& in = out_.type(x);
    const TensorType& result = out_.type(node.outputs[0]);
    const Node* before = producer(x);
    if (op == "convert" || op == "reshape" || op == "broadcast_to") {
      if (same_value_type(in, result)) return x;
    }
    // Before layouts are chosen every value is contiguous in meaning; copies come back where a layout needs one.
    if (op == "contiguous" && x != no_value) return x;
    if (op == "reshape" && before && before->op->name == "reshape") {
      node.inputs[0] = before->inputs[0];
      if (same_value_type(out_.type(node.inputs[0]), result)) return node.inputs[0];
    } else if (op == "permute") {
      return visit_permute(node, before);
    } else if (op == "neg" && before && before->op->name == "neg") {
      return before->inputs[0];
    } else if ((op == "mul" || op == "div") && same_value_type(in, result) && is_number(node.inputs[1], 1.0)) {
      return x;
    } else if (op == "mul" && same_value_type(out_.type(node.inputs[1]), result) && is_number(x, 1.0)) {
      return node.inputs[1];
    } else if (op == "sum" && same_value_type(in, result)) {
      const auto* dims = node.attrs.find("dims");
      const Dims* list = dims ? std::get_if<Dims>(dims) : nullptr;
      bool trivial = list != nullptr && !list->empty();
      if (trivial)
        for (int64_t d : *list) trivial &= in.rank() == 0 || in.shape[static_cast<size_t>(d < 0 ? d + in.rank() : d)] == 1;
      if (trivial) return x;
    }
    return std::nullopt;
  }

  void define(const Node& node, int index) {
    for (ValueId id : node.outputs)
      if (id != no_value) producer_[static_cast<size_t>(id)] = index;
  }

 private:
  const Node* producer(ValueId id) const {
    const int index = producer_[static_cast<size_t>(id)];
    return index < 0 ? nullptr : &out_.nodes[static_cast<size_t>(index)];
  }

  bool is_number(ValueId id, double wanted) const {
    if (id == no_value) return false;
    const Node* node = producer(id);
    return node && node->op->name == "full" && node->attrs.has("value") && node->attrs.get_float("value") == wanted;
  }

  std::optional<ValueId> visit_permute(Node& node, const Node* before) {
    Dims dims = node.attrs.get_dims("dims");
    if (before && before->op->name == "permute") {
      const Dims& first = before->attrs.get_dims("dims");
      Dims combined(dims.size());
      for (size_t i = 0; i < dims.size(); ++i) combined[i] = first[static_cast<size_t>(dims[i])];
      node.inputs[0] = before->inputs[0];
      node.attrs.set("dims", combined);
      dims = combined;
    }
    for (size_t i = 0; i < dims.size(); ++i)
      if (dims[i] != static_cast<int64_t>(i)) return std::nullopt;
    return node.inputs[0];
  }

  Trace& out_;
  std::vector<int> producer_;
};

}  // namespace

Trace simplify(const Trace& trace) {
  Trace out = trace;
  out.nodes.clear();
  Simplifier simplifier(out);
  Substitution substitution;
  for (Node node : trace.nodes) {
    substitution.apply(node.inputs);
    if (const auto replacement = simplifier.visit(node)) {
      substitution.replace(node.outputs[0], *replacement);
      continue;
    }
    out.nodes.push_back(std::move(node));
    simplifier.define(out.nodes.back(), static_cast<int>(out.nodes.size()) - 1);
  }
  substitution.apply(out.outputs);
  return out;
}

}  // namespace fulmen
