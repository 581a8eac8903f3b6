#include "passes/differentiate.h"

#include <memory>

#include "ir/print.h"
#include "ops/builder.h"

namespace fulmen {
namespace {

class Differentiator {
 public:
  Differentiator(Trace& out) : out_(out), builder_(out), grads_(out.values.size(), no_value) {}

  void accumulate(ValueId value, ValueId grad) {
    ValueId& slot = grads_[static_cast<size_t>(value)];
    slot = slot == no_value ? grad : builder_.add(slot, grad);
  }

  ValueId grad(ValueId value) const { return grads_[static_cast<size_t>(value)]; }

  void visit(const Node& node) {
    std::vector<ValueId> output_grads;
    bool any = false;
    for (ValueId id : node.outputs) {
      output_grads.push_back(id == no_value ? no_value : grad(id));
      any |= output_grads.back() != no_value;
    }
    if (!any) return;
    const auto need = std::make_unique<bool[]>(node.inputs.size());
    bool needed = false;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      need[i] = node.inputs[i] != no_value && out_.type(node.inputs[i]).requires_grad;
      needed |= need[i];
    }
    if (!needed) return;
    const auto* rule = std::get_if<GradientRule>(&op_of(node).gradient);
    if (!rule) {
      if (std::holds_alternative<NotDifferentiable>(op_of(node).gradient)) return;
      throw InternalError("internal: " + node.op->name + " has no gradient rule of its own and was not decomposed");
    }
    const GradientArgs args{node, node.inputs, node.outputs, output_grads, {need.get(), node.inputs.size()}};
    const size_t before = out_.nodes.size();
    const std::vector<ValueId> grads = (*rule)(builder_, args);
    // A claimed pair: the backward belongs to the executor that claimed the forward, by the same plan.
    if (!node.executor.empty()) {
      for (size_t i = before; i < out_.nodes.size(); ++i) {
        if (!out_.nodes[i].op->name.ends_with("_backward")) continue;
        out_.nodes[i].executor = node.executor;
        out_.nodes[i].plan = node.plan;
      }
    }
    for (size_t i = 0; i < node.inputs.size() && i < grads.size(); ++i) {
      if (!need[i] || grads[i] == no_value) continue;
      const TensorType &wanted = out_.type(node.inputs[i]), &found = out_.type(grads[i]);
      if (wanted.shape != found.shape || wanted.dtype != found.dtype)
        throw InternalError("internal: gradient " + std::to_string(i) + " of " + node.op->name + " is " + to_string(found) +
                            ", its operand is " + to_string(wanted) + " in\n  " + to_string(out_, node));
      accumulate(node.inputs[i], grads[i]);
    }
  }

  Builder& builder() { return builder_; }

 private:
  Trace& out_;
  Builder builder_;
  std::vector<ValueId> grads_;  // of the forward's values
};

}  // namespace

JointTrace differentiate(const Trace& trace) {
  JointTrace joint;
  joint.trace = trace;
  joint.output_count = static_cast<int>(trace.outputs.size());
  joint.input_count = static_cast<int>(trace.inputs.size());
  Trace& out = joint.trace;
  const size_t forward_values = out.values.size();
  Differentiator differentiator(out);
  for (size_t i = 0; i < trace.outputs.size(); ++i) {
    const ValueId id = trace.outputs[i];
    if (id == no_value || !out.type(id).requires_grad || !is_float(out.type(id).dtype)) continue;
    TensorType type = contiguous_type(out.type(id).dtype, out.type(id).shape, out.type(id).device);
    joint.grad_outputs.push_back(static_cast<int>(i));
    differentiator.accumulate(id, out.add_input(type, "grad_" + out.value(id).name));
  }
  for (size_t i = trace.nodes.size(); i-- > 0;) {
    const Node node = out.nodes[i];  // a copy: the rule appends to the list it stands in
    differentiator.visit(node);
  }
  for (size_t i = 0; i < trace.inputs.size(); ++i) {
    const ValueId id = trace.inputs[i];
    if (!out.type(id).requires_grad) continue;
    ValueId grad = differentiator.grad(id);
    if (grad == no_value) grad = differentiator.builder().zeros_like(id);  // no output depends on it
    joint.inputs_with_grad.push_back(static_cast<int>(i));
    out.outputs.push_back(grad);
  }
  for (size_t i = forward_values; i < out.values.size(); ++i) out.values[i].type.requires_grad = false;
  return joint;
}

}  // namespace fulmen
