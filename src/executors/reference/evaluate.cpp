#include "executors/reference/evaluate.h"

#include <optional>

#include "ops/builder.h"
#include "ops/reference_loops.h"

namespace fulmen {
namespace {

void round_to_dtype(HostTensor& tensor) {
  if (!is_float(tensor.type.dtype) || tensor.type.dtype == DType::f64) return;
  for (double& value : tensor.f) value = round_float(value, tensor.type.dtype);
}

// The result types of a node; those that nobody wants come from its shape rule.
std::vector<TensorType> result_types(const Trace& trace, const Node& node, const std::vector<const HostTensor*>& inputs) {
  std::vector<TensorType> types;
  bool unwanted = false;
  for (ValueId id : node.outputs) {
    unwanted |= id == no_value;
    types.push_back(id == no_value ? TensorType{} : trace.type(id));
  }
  if (!unwanted) return types;
  CallTypes call{op_of(node), {}, node.attrs};
  for (size_t i = 0; i < inputs.size(); ++i)
    call.inputs.push_back(inputs[i] && node.inputs[i] != no_value ? &trace.type(node.inputs[i]) : nullptr);
  const auto inferred = op_of(node).shape(call);
  FULMEN_CHECK(inferred.size() >= types.size());
  for (size_t i = 0; i < types.size(); ++i)
    if (node.outputs[i] == no_value) types[i] = inferred[i];
  return types;
}

std::vector<HostTensor> run_composite(const Trace& trace, const Node& node, const Decomposition& decomposition,
                                      const std::vector<const HostTensor*>& inputs, const EvaluateOptions& options) {
  Trace parts;
  Builder builder(parts);
  Node inner = node;
  std::vector<HostTensor> values;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    if (!inputs[i]) {
      inner.inputs[i] = no_value;
      continue;
    }
    inner.inputs[i] = parts.add_input(trace.type(node.inputs[i]));
    values.push_back(*inputs[i]);
  }
  inner.outputs.clear();
  parts.outputs = decomposition.build(builder, inner);
  return evaluate(parts, values, options);
}

}  // namespace

std::vector<HostTensor> evaluate_node(const Trace& trace, const Node& node, const std::vector<const HostTensor*>& inputs,
                                      const EvaluateOptions& options) {
  if (node.body) {
    std::vector<HostTensor> values;
    for (const HostTensor* input : inputs) values.push_back(*input);
    return evaluate(*node.body, values, options);
  }
  const OpDef& op = op_of(node);
  if (const auto* decomposition = std::get_if<Decomposition>(&op.meaning))
    return run_composite(trace, node, *decomposition, inputs, options);
  std::vector<HostTensor> outputs;
  for (const TensorType& type : result_types(trace, node, inputs)) outputs.push_back(make_host(type));
  std::get<Primitive>(op.meaning).reference(ReferenceArgs{inputs, node.attrs, outputs});
  if (options.round)
    for (HostTensor& output : outputs) round_to_dtype(output);
  return outputs;
}

std::vector<HostTensor> evaluate(const Trace& trace, const std::vector<HostTensor>& inputs, const EvaluateOptions& options) {
  FULMEN_CHECK(inputs.size() == trace.inputs.size());
  std::vector<std::optional<HostTensor>> values(trace.values.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const TensorType& type = trace.type(trace.inputs[i]);
    FULMEN_CHECK(inputs[i].type.shape == type.shape && inputs[i].type.dtype == type.dtype);
    values[static_cast<size_t>(trace.inputs[i])] = inputs[i];
    if (options.round) round_to_dtype(*values[static_cast<size_t>(trace.inputs[i])]);
  }
  std::vector<int> uses = use_counts(trace);
  for (const Node& node : trace.nodes) {
    std::vector<const HostTensor*> operands;
    for (ValueId id : node.inputs) operands.push_back(id == no_value ? nullptr : &values[static_cast<size_t>(id)].value());
    std::vector<HostTensor> results = evaluate_node(trace, node, operands, options);
    FULMEN_CHECK(results.size() >= node.outputs.size());
    for (size_t i = 0; i < node.outputs.size(); ++i)
      if (node.outputs[i] != no_value) values[static_cast<size_t>(node.outputs[i])] = std::move(results[i]);
    for (ValueId id : node.inputs)  // values that nobody reads again are freed
      if (id != no_value && --uses[static_cast<size_t>(id)] == 0) values[static_cast<size_t>(id)].reset();
  }
  std::vector<HostTensor> outputs;
  for (ValueId id : trace.outputs) {
    if (id == no_value)
      outputs.emplace_back();
    else
      outputs.push_back(values[static_cast<size_t>(id)].value());
  }
  return outputs;
}

}  // namespace fulmen
