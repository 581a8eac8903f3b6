#include "ir/verify.h"

#include <unordered_set>

#include "core/error.h"
#include "ir/print.h"

namespace fulmen {
namespace {

[[noreturn]] void fail(std::string_view after, const std::string& what, const Trace& trace, const Node* node) {
  std::string text = "internal: after " + std::string(after) + ", trace " + trace.name + ": " + what;
  if (node) text += " in\n  " + to_string(trace, *node);
  throw InternalError(text);
}

bool same_type(const TensorType& a, const TensorType& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.strides == b.strides && a.device == b.device;
}

}  // namespace

void verify(const Trace& trace, std::string_view after) {
  const auto count = static_cast<ValueId>(trace.values.size());
  std::unordered_set<std::string_view> names;
  for (const Value& value : trace.values) {
    if (!names.insert(value.name).second) fail(after, "value name '" + value.name + "' is used twice", trace, nullptr);
    if (value.type.shape.size() != value.type.strides.size())
      fail(after, "value '" + value.name + "' has " + std::to_string(value.type.strides.size()) + " strides for " +
                      std::to_string(value.type.shape.size()) + " dims", trace, nullptr);
  }
  std::vector<bool> defined(trace.values.size(), false);
  const auto define = [&](ValueId id, const Node* node) {
    if (id < 0 || id >= count) fail(after, "value id " + std::to_string(id) + " is out of range", trace, node);
    if (defined[static_cast<size_t>(id)]) fail(after, "value '" + trace.value(id).name + "' is defined twice", trace, node);
    defined[static_cast<size_t>(id)] = true;
  };
  const auto use = [&](ValueId id, const Node* node) {
    if (id == no_value) return;
    if (id < 0 || id >= count) fail(after, "value id " + std::to_string(id) + " is out of range", trace, node);
    if (!defined[static_cast<size_t>(id)]) {
      // The node cannot be printed with an undefined name only; it has one, so printing is safe.
      fail(after, "value '" + trace.value(id).name + "' is used before it is defined", trace, node);
    }
  };
  for (ValueId id : trace.inputs) define(id, nullptr);
  for (const Node& node : trace.nodes) {
    if (!node.op) fail(after, "a node has no op", trace, nullptr);
    for (ValueId id : node.inputs) use(id, &node);
    for (ValueId id : node.outputs)
      if (id != no_value) define(id, &node);
    const bool is_fusion = node.op->name == "fusion";
    if (is_fusion != (node.body != nullptr)) fail(after, is_fusion ? "a fusion has no body" : "a node that is no fusion has a body", trace, &node);
    if (node.body) {
      verify(*node.body, after);
      const Trace& body = *node.body;
      if (body.inputs.size() != node.inputs.size() || body.outputs.size() != node.outputs.size())
        fail(after, "a fusion's body has other inputs or outputs than its node", trace, &node);
      for (size_t i = 0; i < node.inputs.size(); ++i)
        if (!same_type(body.type(body.inputs[i]), trace.type(node.inputs[i])))
          fail(after, "input " + std::to_string(i) + " of a fusion's body has another type than the node's", trace, &node);
      for (size_t i = 0; i < node.outputs.size(); ++i)
        if (node.outputs[i] != no_value && !same_type(body.type(body.outputs[i]), trace.type(node.outputs[i])))
          fail(after, "output " + std::to_string(i) + " of a fusion's body has another type than the node's", trace, &node);
    }
  }
  for (ValueId id : trace.outputs) use(id, nullptr);
}

}  // namespace fulmen
